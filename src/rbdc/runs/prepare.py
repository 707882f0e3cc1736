"""From what was asked for to what will be done (data, model, plan, tree), and to its result."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rbdc.plan import Plan, make_plan
from rbdc.data import DataSet, open_data
from rbdc.disk import write_json
from rbdc.errors import RecipeError
from rbdc.models import ModelSpec, export, load, timm_builds
from rbdc.settings import PLAN, Cluster, Machine, Recipe, Request, read_recipe, split_settings
from rbdc.training import World, fit_to_data, image_format
from rbdc.training.teacher import Teacher, load_teacher
from rbdc.jobs.engine import Engine, Watcher
from rbdc.jobs.job import TrainJob
from rbdc.jobs.tree import Tree, grow_tree
from rbdc.jobs.layout import AVERAGE, JOBS, MODEL, RESULT
from rbdc.runs.run import check_run, run_nodes
from rbdc.runs.single import run_one
from rbdc.jobs.store import Store
from rbdc.jobs.workshop import TreeWorkshop

_ELSEWHERE = {*PLAN, "model", "model_kwargs", "width", "img_size"}  # in the plan
# May differ when a run goes on: the data is known by its fingerprint, wherever it lies.
_HARMLESS = {"data", "data_dir", "data_download", "in_memory", "skip_bad", "with_baseline"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A run that is ready to start: everything is known, nothing is written yet."""

    request: Request
    recipe: Recipe
    data: DataSet
    plan: Plan
    tree: Tree
    teacher: Teacher | None = None

    def check(
        self,
        output: str | Path,
        *,
        machine: Machine,
        jobs: int | None = None,
        cluster: Cluster | None = None,
        world: World | None = None,
    ) -> None:
        """Refuse what cannot work; `run` does this first. Nothing is written."""
        shop = self._shop(Path(output), machine, world)
        check_run(self.tree.all, shop, Path(output), jobs, cluster)

    def work(self) -> dict[str, float]:
        """FLOPs of each job, by its key."""
        shop = self._shop(Path(), Machine(), None)
        return shop.work(node.job for node in self.tree.all)

    def record(self) -> dict[str, Any]:
        """What decides the result, for run.json."""
        others = {
            name: value
            for name, value in asdict(self.request).items()
            if name not in _ELSEWHERE | _HARMLESS
        }
        content = {
            "plan": self.plan.to_json(),
            "recipe": self.recipe.to_json(),
            "data_set": {  # wherever it lies, and whatever it is called there
                name: value
                for name, value in self.data.to_json().items()
                if name not in ("name", "skipped")
            },
            "teacher": self.teacher.sha256 if self.teacher else None,
            **others,
        }
        return dict(json.loads(json.dumps(content)))

    def run(
        self,
        output: str | Path,
        *,
        machine: Machine,
        watch: Watcher,
        jobs: int | None = None,
        cluster: Cluster | None = None,
        engine: Engine | None = None,
        world: World | None = None,
    ) -> dict[str, Any]:
        """Run it in `output`, or go on with it there; the result."""
        output = Path(output)
        shop = self._shop(output, machine, world)
        return run_nodes(
            self.tree.all,
            shop,
            output,
            request=self.record(),
            watch=watch,
            finish=lambda: _finish(output, self.tree, shop.store),
            jobs=jobs,
            cluster=cluster,
            engine=engine,
        )

    def run_one(
        self,
        node: str,
        output: str | Path,
        *,
        machine: Machine,
        watch: Watcher,
        world: World | None = None,
    ) -> dict[str, Any] | None:
        """Train one model of the tree alone; the result of the whole run if it was the last."""
        output = Path(output)
        shop = self._shop(output, machine, world)
        return run_one(
            node,
            self.tree.all,
            shop,
            output,
            request=self.record(),
            watch=watch,
            finish=lambda: _finish(output, self.tree, shop.store),
        )

    def _shop(self, output: Path, machine: Machine, world: World | None) -> TreeWorkshop:
        return TreeWorkshop(
            store=Store(output / JOBS),
            data=self.data,
            machine=machine,
            world=world or World(),
            teacher=self.teacher,
            counter=self.plan.counter,
        )


def train(
    output: str | Path,
    *,
    recipe: str = "demo",
    machine: Machine | None = None,
    jobs: int | None = None,
    cluster: Cluster | None = None,
    watch: Watcher = lambda _event: None,
    **settings: Any,
) -> dict[str, Any]:
    """Train a wide model by RBDC, as `rbdc train` does, and return the result.

    `recipe` is a shipped one or a YAML file; `settings` override it, by the names of Request and
    Recipe: `train("runs/x", recipe="deit", model="deit_base_patch16_224", data="/data/imagenet",
    steps=2, budget=0.7, lr=5e-4)`. The same call goes on with a run that was stopped.
    """
    prepared = prepare(*split_settings(read_recipe(recipe), settings))
    return prepared.run(
        output, machine=machine or Machine(), watch=watch, jobs=jobs, cluster=cluster
    )


def prepare(request: Request, recipe: Recipe, world: World | None = None) -> Prepared:
    """Open the data, make the plan and the tree; whatever does not fit is said here."""
    data, spec = open_and_fit(request, recipe, world or World())
    plan = make_plan(
        spec,
        warmup_epochs=recipe.warmup_epochs,
        images=len(data.train),
        **{name: getattr(request, name) for name in PLAN},
    )
    image = image_format(spec, recipe, data)
    teacher = load_teacher(recipe, image, len(data.class_names), request.counter)
    tree = grow_tree(
        plan,
        recipe,
        data,
        seed=request.seed,
        transition=request.transition,
        carry_warmup_epochs=request.carry_warmup_epochs,
        narrow_lr=request.narrow_lr,
        with_baseline=request.with_baseline,
        teacher=teacher.sha256 if teacher else None,
        allow_inexact=request.allow_inexact,
    )
    return Prepared(
        request=request,
        recipe=recipe,
        data=data,
        plan=plan,
        tree=tree,
        teacher=teacher,
    )


def _finish(output: Path, tree: Tree, store: Store) -> dict[str, Any]:
    """The target's model where the user looks for it, and the result of the whole run."""
    result = run_result(tree, store)
    folder = store.folder(tree.target.job)
    chosen = folder / (AVERAGE if (folder / AVERAGE).exists() else MODEL)
    export(load(chosen), output / MODEL, record={"run": result}, force=True)
    result["timm_loads"] = timm_builds(tree.plan.model)
    write_json(output / RESULT, result)
    return result


def run_result(tree: Tree, store: Store) -> dict[str, Any]:
    """What a finished run came to: every training's FLOPs counted."""
    results = {node.name: store.result(node.job) or {} for node in tree.all}
    trained = [results[node.name] for node in tree.nodes if isinstance(node.job, TrainJob)]
    spent = sum(results[node.name]["training_flops"] for node in tree.nodes)
    target = results[tree.target.name]
    summary: dict[str, Any] = {
        "model": tree.plan.model.to_json(),
        "top1": target["top1"],
        "top5": target["top5"],
        "loss": target["loss"],
        "best": target["best"],
        "training_flops": spent,
        "teacher_flops": sum(result["teacher_flops"] for result in trained),
        "planned_flops": tree.plan.training_flops,
        "normalized_flops": spent / tree.plan.baseline_flops,
        "seconds": sum(result["seconds"] for result in results.values()),
        "nodes": results,
    }
    if tree.baseline:
        summary["standard"] = results[tree.baseline.name]
    return summary


def open_and_fit(
    request: Request, recipe: Recipe, world: World, data: DataSet | None = None
) -> tuple[DataSet, ModelSpec]:
    """The data, if it is not given, and the target fitted to it."""
    if request.model is None:
        raise RecipeError("no model is named", "Give --model, a timm name, or a recipe that does.")
    data = data or _open(request, world)
    arguments = dict(request.model_kwargs)
    if request.img_size is not None:
        arguments["img_size"] = request.img_size
    spec = ModelSpec(name=request.model, width=request.width, arguments=arguments)
    return data, fit_to_data(spec, data, recipe)


def _open(request: Request, world: World) -> DataSet:
    def open_it(download: bool) -> DataSet:
        return open_data(
            request.data,
            folder=request.data_dir,
            download=download,
            in_memory=request.in_memory,
            skip_bad=request.skip_bad,
        )

    if request.data_download and world.size > 1:  # one fetches, then all read
        world.broadcast(lambda: open_it(True).fingerprint)
        return open_it(False)
    return open_it(request.data_download)
