"""A run: the jobs of a tree in one folder, from the first check to the trained target."""

import os
import platform
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from rbdc.coupling import check_slots
from rbdc.data import DataSet, ImageSet, check_batch_size, check_image_size
from rbdc.disk import free_bytes, is_writable, read_json, write_json
from rbdc.errors import RunError
from rbdc.models import ModelSpec, build_meta, export, load, timm_builds
from rbdc.recipes import Machine, Recipe
from rbdc.training import World, image_format
from rbdc.training.machine import check_machine, default_threads, torch_device
from rbdc.training.optimizer import optimizer_slots
from rbdc.training.teacher import Teacher
from rbdc.tree.engine import Engine, InProcess, SideBySide, Watcher
from rbdc.tree.execute import Workshop, own_flops
from rbdc.tree.jobs import CoupleJob, TrainJob
from rbdc.tree.lock import locked
from rbdc.tree.measure import faster_jobs
from rbdc.tree.nodes import Node, Tree
from rbdc.tree.places import AVERAGE, JOBS, LOCK, MODEL, RESULT, RUN
from rbdc.tree.store import Store, folder_name


def run_tree(
    tree: Tree,
    recipe: Recipe,
    data: DataSet,
    output: Path,
    *,
    request: Mapping[str, Any],
    machine: Machine,
    world: World,
    watch: Watcher,
    jobs: int | None = None,
    engine: Engine | None = None,
    teacher: Teacher | None = None,
) -> dict[str, Any]:
    """Run what is not finished of the tree in `output`, and return the result.

    The same request on the same folder goes on where it was; another one is refused. `jobs`
    siblings are trained side by side; by default one on a GPU, and on a CPU what is faster.
    Another `engine` than this machine's runs them as it likes.
    """
    check_run(tree, recipe, data, output, machine, world, jobs)
    store = Store(output / JOBS)
    shop = Workshop(
        store=store,
        data=data,
        machine=machine,
        world=world,
        teacher=teacher,
        counter=tree.plan.counter,
    )
    with ExitStack() as stack:

        def begin() -> dict[str, Any]:
            output.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(output))
            store.clean()  # it is ours: check_run has looked
            return _begin(output, tree, request, shop, jobs)

        local = _engine(tree, world.tell(begin))
        (engine or local).run([node.job for node in tree.all], shop, watch)
        return world.tell(lambda: _finish(output, tree, store))


def check_run(
    tree: Tree,
    recipe: Recipe,
    data: DataSet,
    output: Path,
    machine: Machine,
    world: World,
    jobs: int | None = None,
) -> None:
    """Everything that can be known to fail, before the first step. The plan has already coupled
    the whole tree by shapes."""
    if jobs is not None and jobs < 1:
        raise RunError(f"jobs is {jobs}, expected 1 or more", "1 is one training at a time.")
    if jobs is not None and jobs > 1 and world.size > 1:
        raise RunError(
            f"{world.size} processes train each model together: there is no room for {jobs} jobs",
            "Leave --jobs out under torchrun.",
        )
    check_machine(machine, recipe, world.local_rank)
    if not is_writable(output):
        raise RunError(f"{output} cannot be written to", "Choose another folder.")
    if output.exists() and not (output / RUN).exists():
        foreign = [p.name for p in output.iterdir() if p.name != LOCK and RUN not in p.name]
        if foreign:
            raise RunError(
                f"{output} holds something ({foreign[0]}), but no run of ours",
                "Choose an empty or a new folder.",
            )
    shares = world.size * recipe.grad_accum_steps
    check_batch_size(len(data.train), recipe.batch_size, shares, mixes=recipe.mixes)
    image = image_format(tree.plan.model, recipe, data)
    if isinstance(data.train, ImageSet) and recipe.batched:
        check_image_size(data.train, image)
    slots = optimizer_slots(recipe)
    for node in tree.nodes:
        if isinstance(node.job, CoupleJob) and node.job.transition.carries:
            check_slots(slots)
    needed, free = _needed_bytes(tree, recipe, machine, output), free_bytes(output)
    if needed > free:
        raise RunError(
            f"the run needs up to {needed / 1e9:.1f} GB and {output} has {free / 1e9:.1f} GB free",
            "Make room, choose another folder, or keep fewer checkpoints (--keep).",
        )


def _needed_bytes(tree: Tree, recipe: Recipe, machine: Machine, output: Path) -> int:
    """Of the results that are still to come, and the checkpoints of the largest level."""
    copies_saved = 4 + recipe.model_ema  # weights, the best, two moments, average
    results, checkpoints = 0, 0
    store = Store(output / JOBS)
    for node in tree.all:
        if store.result(node.job):
            continue
        results -= sum(p.stat().st_size for p in store.folder(node.job).rglob("*") if p.is_file())
        size = _model_bytes(node.job.model)
        if isinstance(node.job, TrainJob):
            results += size * (2 + recipe.model_ema + 2 * node.job.keeps_optimizer)
            level = 2**node.level * size * copies_saved * (machine.keep + 1)
            checkpoints = max(checkpoints, level)
        else:
            results += size * (1 + 2 * node.job.transition.carries)
    return max(0, results + checkpoints) + _model_bytes(tree.plan.model)


def _model_bytes(spec: ModelSpec) -> int:
    return sum(t.numel() * t.element_size() for t in build_meta(spec).state_dict().values())


def _begin(
    output: Path,
    tree: Tree,
    request: Mapping[str, Any],
    shop: Workshop,
    jobs: int | None,
) -> dict[str, Any]:
    """Check an old folder's request against this one, and write down how the run is run."""
    old = read_json(output / RUN)
    if old:
        _check_same(output, old["request"], request)
    machine, world = shop.machine, shop.world
    recipe = next(node.job.task.recipe for node in tree.nodes if isinstance(node.job, TrainJob))
    decoders = 0 if shop.data.in_memory and recipe.batched else machine.workers
    threads = machine.threads or default_threads(decoders)
    if old and jobs is None:
        jobs = old["engine"]["jobs"]
    if old and not machine.threads:
        threads = old["engine"]["threads"]
    if jobs is None:
        jobs = _default_jobs(tree, shop, threads)
    content = {
        "request": request,
        "nodes": [_describe(node, shop) for node in tree.all],
        "engine": {"jobs": jobs, "threads": threads, "processes": world.size},
        "data": shop.data.to_json(),
        "machine": machine.to_json(),
        "environment": environment(),
        "command": (old or {}).get("command", sys.argv[1:]),
        "started": (old or {}).get("started", datetime.now(UTC).isoformat(timespec="seconds")),
    }
    if old:
        _warn_of_versions(old["environment"], content["environment"])
    write_json(output / RUN, content)
    return content


def _default_jobs(tree: Tree, shop: Workshop, threads: int) -> int:
    siblings = tree.plan.leaves.models
    on_cpu = torch_device(shop.machine).type == "cpu"
    if shop.world.size > 1 or siblings == 1 or not on_cpu:
        return 1
    leaf = next(node.job for node in tree.nodes if isinstance(node.job, TrainJob))
    return faster_jobs(leaf.task, shop.data, threads=threads, siblings=siblings)


def _engine(tree: Tree, run: Mapping[str, Any]) -> Engine:
    """Siblings side by side share the threads; one alone has them all."""
    jobs, threads = run["engine"]["jobs"], run["engine"]["threads"]
    siblings = Counter(node.level for node in tree.nodes if isinstance(node.job, TrainJob))
    share = {node.job.key: max(1, threads // min(jobs, siblings[node.level])) for node in tree.all}
    if jobs == 1 or run["engine"]["processes"] > 1:
        return InProcess(threads=share)
    gpus = torch.cuda.device_count() if run["machine"]["device"] in ("auto", "cuda") else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    devices = [visible.split(",")[number % gpus] for number in range(jobs)] if gpus else []
    return SideBySide(workers=jobs, threads=share, all_threads=max(threads, jobs), devices=devices)


def _finish(output: Path, tree: Tree, store: Store) -> dict[str, Any]:
    """The target's model where the user looks for it, and the result of the whole run."""
    target = tree.target.job
    result = run_result(tree, store)
    folder = store.folder(target)
    chosen = folder / (AVERAGE if (folder / AVERAGE).exists() else MODEL)
    export(load(chosen), output / MODEL, record={"run": result}, force=True)
    result["timm_loads"] = timm_builds(target.model)
    write_json(output / RESULT, result)
    return result


def run_result(tree: Tree, store: Store) -> dict[str, Any]:
    """What a finished run came to: every training's FLOPs counted."""
    results = {node.name: store.result(node.job) or {} for node in tree.all}
    trained = [results[node.name] for node in tree.nodes if isinstance(node.job, TrainJob)]
    spent = sum(result["training_flops"] for result in trained)
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


def _describe(node: Node, shop: Workshop) -> dict[str, Any]:
    job = node.job
    description: dict[str, Any] = {
        "name": node.name,
        "level": node.level,
        "key": job.key,
        "folder": f"{JOBS}/{folder_name(job)}",
        "width": job.model.width,
        "parents": [parent.key for parent in job.parents],
    }
    if isinstance(job, TrainJob):
        return {
            **description,
            "kind": "train",
            "epochs": job.task.epochs,
            "seed": job.task.seed,
            "flops": own_flops(job, shop),
        }
    return {**description, "kind": "couple", "transition": job.transition.name}


def environment() -> dict[str, str]:
    packages = ("rbdc", "torch", "torchvision", "timm", "numpy")
    return {
        **{name: version(name) for name in packages},
        "python": platform.python_version(),
        "cpu": platform.processor() or platform.machine(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
    }


def _warn_of_versions(old: Mapping[str, str], new: Mapping[str, str]) -> None:
    for name, value in new.items():
        if old.get(name) != value:
            warnings.warn(
                f"the run began with {name} {old.get(name)} and goes on with {value}: "
                "results may differ in their last bits",
                stacklevel=2,
            )


def _check_same(output: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    different = list(differences(old, new))
    if different:
        more = f" and {len(different) - 5} more" if different[5:] else ""
        raise RunError(
            f"{output} holds a run that was asked for otherwise: "
            + "; ".join(f"{name} was {was}, now {now}" for name, was, now in different[:5])
            + more,
            "Ask for the same to go on, or choose another folder.",
        )


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], where: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """(name, old value, new value) of everything that differs, nested names with dots."""
    for name in dict.fromkeys([*old, *new]):
        was, now = old.get(name), new.get(name)
        if isinstance(was, dict) and isinstance(now, dict):
            yield from differences(was, now, f"{where}{name}.")
        elif was != now:
            yield f"{where}{name}", was, now
