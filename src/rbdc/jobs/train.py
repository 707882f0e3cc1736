"""Train one model: from its own initialisation (a leaf) or from one grown of its parents."""

import json
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rbdc.data import (
    DataSet,
    ImageFormat,
    ImageSet,
    TextFormat,
    check_batch_size,
    check_image_size,
)
from rbdc.data.augment import TrainingTransform
from rbdc.errors import CouplingError, RecipeError, WidthError
from rbdc.jobs.job import FORMAT, Context, TrainingJob
from rbdc.jobs.layout import AVERAGE, MODEL, SAVED_FOR_GROWTH, START
from rbdc.jobs.measure import measure_training
from rbdc.jobs.method import SavedForGrowth
from rbdc.jobs.ways import WORTH_MEASURING, Way, measure_speed, measure_ways
from rbdc.metrics import final_scores
from rbdc.models import (
    ModelSpec,
    at_size,
    build_empty,
    export,
    family,
    halves_layout,
    patch_side,
    shapes_of,
)
from rbdc.models.build import build_zeros
from rbdc.plan import CounterName, Scaling, forward_flops, training_flops
from rbdc.plan.flops import DEFAULT_COUNTER
from rbdc.plan.growth import depth_of
from rbdc.settings import Augmentation, Machine, Recipe
from rbdc.settings.schema import schemas
from rbdc.training import Observer, Session, Start, Task, Trained, initial_weights
from rbdc.training.checkpoint import read_state, write_state
from rbdc.training.machine import check_machine, settled, torch_device
from rbdc.training.optimizer import check_carried, optimizer_slots
from rbdc.training.problems import make_problem
from rbdc.training.state import select_prefix
from rbdc.training.teacher import Teacher

if TYPE_CHECKING:
    from rbdc.jobs.grow import GrowJob

LANGUAGE_METRICS = ("loss", "perplexity", "bits_per_byte")


@dataclass(frozen=True, kw_only=True)
class TrainJob(TrainingJob):
    """Train a task's model on the data, and save what the next growth step needs of it."""

    compiles = True
    task: Task
    data: DataSet = field(repr=False, compare=False)
    initial: "GrowJob | None" = None
    """The job that makes the initial weights; None draws them from the task's seed."""
    teacher: Teacher | None = None
    saved_for_growth: SavedForGrowth = ""
    """State saved beside the weights, for the method that widens this model."""
    counter: CounterName = DEFAULT_COUNTER
    fused_with: tuple[int, ...] = ()
    """Seeds of all trainings that take their steps as one model, in order; empty: on its own."""

    @property
    def fused(self) -> int:
        return len(self.fused_with)

    @property
    def is_language(self) -> bool:
        """Return whether it learns from text."""
        return isinstance(self.task.image, TextFormat)

    @property
    def sequence_length(self) -> int | None:
        return self.task.image.sequence_length if self.is_language else None

    @property
    def metrics(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the metrics shown to people, the primary one first."""
        return LANGUAGE_METRICS if self.is_language else TrainingJob.metrics

    @property
    def model(self) -> ModelSpec:
        """The architecture at its width."""
        return self.task.model

    @property
    def parents(self) -> "tuple[GrowJob, ...]":  # type: ignore[override]
        """The growth job, if there is one."""
        return (self.initial,) if self.initial else ()

    def content(self) -> dict[str, Any]:
        fused = {"fused_with": list(self.fused_with)} if self.fused_with else {}
        return {
            "kind": "train",
            "format": FORMAT,
            **fused,  # rounds otherwise than a training on its own
            "task": self.task.to_json(),
            "data": self.data.fingerprint,
            "class_names": list(self.data.class_names),
            "initial": self.initial.key if self.initial else None,
            "teacher": self.teacher.sha256 if self.teacher else None,
            "saved_for_growth": self.saved_for_growth,
        }

    def describe(self) -> dict[str, Any]:
        task = self.task
        return {
            "kind": "train",
            "width": self.model.width,
            "blocks": depth_of(self.model),
            **(
                {"sequence_length": self.sequence_length}
                if self.is_language
                else {"image": [task.image.height, task.image.width]}
            ),
            "epochs": task.epochs,
            "seed": task.seed,
            "metrics": list(self.metrics),
        }

    @property
    def label(self) -> str:
        """The architecture and its width."""
        return f"{self.model.name}-w{self.model.width:g}"

    @property
    def size(self) -> str:
        return f"width {self.model.width:g}"

    @cached_property
    def image_flops(self) -> float:
        """FLOPs of training on one image. A worker is sent what its parent process counted."""
        return training_flops(forward_flops(self.model, counter=self.counter), 1, 1)

    @property
    def flops(self) -> float:
        """FLOPs of the images that the training will really see."""
        batch_size = self.task.recipe.batch_size
        return self.image_flops * self.task.steps(len(self.data.train) // batch_size) * batch_size

    @property
    def model_bytes(self) -> int:
        return bytes_of(self.model)

    def result_bytes(self) -> int:
        """Return the bytes of the last and the best model, the EMA's, and what growth needs."""
        saved = 2 * self._training_bytes * bool(self.saved_for_growth)
        return self.model_bytes * (2 + self.task.recipe.model_ema) + saved

    def checkpoint_bytes(self, machine: Machine) -> int:
        """Return the bytes of checkpoints: weights, best weights, two moments, EMA weights."""
        copies = 4 + self.task.recipe.model_ema
        return self._training_bytes * copies * (machine.keep + 1)

    @property
    def _training_bytes(self) -> int:
        made_of = self.task.parametrization
        return self.model_bytes * (made_of.count if made_of else 1)

    def check(self, machine: Machine, processes: int) -> None:
        """Refuse a batch that does not divide, images that do not fit, an unusable optimizer."""
        task, data = self.task, self.data
        recipe = task.recipe
        micro_batches = processes * recipe.grad_accum_steps
        check_batch_size(len(data.train), recipe.batch_size, micro_batches, mixes=recipe.mixes)
        if isinstance(data.train, ImageSet) and recipe.batched:
            check_image_size(data.train, task.image)
        if self.is_language:
            _check_language(recipe)
        else:
            _check_recipe(recipe, task.image)
            _check_test_size(task, machine)
        if self.saved_for_growth == "optimizer":
            check_carried(recipe)

    def check_device(self, machine: Machine, local_rank: int = 0) -> None:
        check_machine(machine, self.task.recipe, local_rank)

    def loader_processes(self, machine: Machine) -> int:
        """Return how many processes decode images: none for text and for images in memory."""
        in_memory = self.data.in_memory and (self.is_language or self.task.recipe.batched)
        return 0 if in_memory else machine.workers or 0

    def expected_seconds(self, machine: Machine) -> float | None:
        updates = self.task.steps(len(self.data.train) // self.task.recipe.batch_size)
        if updates < WORTH_MEASURING:
            return None
        return updates * self.task.recipe.batch_size / measure_speed(self.task, machine)

    def ways(self, siblings: int, threads: int, machine: Machine) -> list[Way]:
        if siblings == 1:
            return []
        return measure_ways(self.task, machine, siblings=siblings, threads=threads)

    def measure_scaling(self, machine: Machine) -> Scaling:
        """Measure how fast the model trains here, on noise."""
        recipe = self.task.recipe
        found = measure_training(self.task, machine)
        return Scaling(
            batch_size=recipe.batch_size // recipe.grad_accum_steps,
            images_per_second=(found.images_per_second,),
            gradient_bytes=(self.model_bytes,),
            max_images_per_device=None if torch_device(machine).type == "cpu" else found.batch_size,
        )

    @property
    def stream(self) -> str:
        """Everything that decides the batches, of training and of evaluation."""
        recipe, images = self.task.recipe, schemas(Augmentation)
        alike = replace(self.task, seed=0).to_json()  # models are fused with models of this task
        content = {
            "data": self.data.fingerprint,
            "seed": self.task.data_seed,
            "image": asdict(self.task.image),
            "augmentation": {k: v for k, v in recipe.to_json().items() if k in images},
            "batch": (recipe.batch_size, recipe.grad_accum_steps),
            "amp": (recipe.amp, recipe.amp_dtype),  # of the evaluation
            "fused": (self.fused_with, alike) if self.fused else None,
        }
        return json.dumps(content, sort_keys=True)

    def session(self, context: Context, observe: Observer, resume_at: int | None = None) -> Session:
        machine = settled(context.machine, self.flops, context.world.size)
        problem = make_problem(
            self.task,
            self.data,
            lambda: self._start(context),
            machine,
            context.world,
            teacher=self.teacher.model if self.teacher else None,
            blocks=self._blocks(),
        )
        flops_before = sum(parent.total_flops for parent in self.parents)
        return Session(
            problem,
            context.store.folder(self),
            machine=machine,
            world=context.world,
            flops=(flops_before, self.image_flops),
            observe=observe,
            resume_at=resume_at,
        )

    def finish(self, context: Context, session: Session, trained: Trained) -> dict[str, Any]:
        """Leave the model with what growth needs in the job's folder."""
        model = trained.state.unsharded(trained.state.best_model())
        result = self._result(trained) | session.problem.samples(model)
        folder = context.store.folder(self)
        self._save(folder, trained, result, writes=context.world.is_main)
        return result

    def _start(self, context: Context) -> Start:
        if self.initial is None:
            return initial_weights(self.task)
        tensors, facts = read_state(context.store.folder(self.initial) / START)
        model = build_empty(self.model)
        model.load_state_dict(select_prefix(tensors, "model/"))
        moments = select_prefix(tensors, "optimizer/")
        return Start(model=model, optimizer=(moments, facts["optimizer"]) if moments else None)

    def _blocks(self) -> int:
        """Return the blocks per side whose norms are logged: one per leaf, 2 if never coupled."""
        if self.initial is None:
            return 2 if _has_halves(self.model) else 1
        parents = self.initial.parents
        before = 1 if parents[0].initial is None else parents[0]._blocks()
        return max(2, before * len(parents))

    def _result(self, trained: Trained) -> dict[str, Any]:
        last = trained.history[-1]
        return {
            "kind": "train",
            "metrics": final_scores(last),
            "last": last,
            "best": trained.best,
            "images": trained.images,
            "decoded": trained.decoded,
            "training_flops": self.image_flops * trained.images,
            "teacher_flops": self.teacher.forward_flops * trained.images if self.teacher else 0,
            **trained.spent.to_json(),
        }

    def _save(
        self, folder: Path, trained: Trained, result: dict[str, Any], *, writes: bool
    ) -> None:
        """Write the model, its EMA and what growth needs. Collective: every rank must call it."""
        record = {"job": {"key": self.key, **self.content()}, "result": result}
        state = trained.state
        for place, model in ((MODEL, state.model), (AVERAGE, state.ema_model)):
            plain = state.unsharded(model) if model is not None else None
            if plain is not None and writes:
                export(plain, folder / place, record=record, force=True)
        if kind := self.saved_for_growth:
            tensors, facts = state.saved()
            if writes:
                saved = select_prefix(tensors, f"{kind}/"), facts.get(kind, {})
                write_state(folder / SAVED_FOR_GROWTH, *saved)


def bytes_of(spec: ModelSpec) -> int:
    """Return the bytes of a model's weights."""
    return sum(t.numel() * t.element_size() for t in shapes_of(spec).values())


def _check_language(recipe: Recipe) -> None:
    """Refuse settings that are about images and labels."""
    optimizer_slots(recipe)
    for name in ("mixup", "cutmix", "test_size"):
        if value := getattr(recipe, name):
            raise RecipeError(f"{name} is {value:g}, and is meant for images", "Leave it out.")
    if recipe.smoothing or recipe.distillation != "none":
        raise RecipeError(
            "label smoothing and distillation are for classifiers",
            "Use --smoothing 0 and no --distillation for a language model.",
        )


@cache
def _check_recipe(recipe: Recipe, image: ImageFormat) -> None:
    """Refuse an optimizer or an augmentation that cannot be made."""
    optimizer_slots(recipe)
    TrainingTransform(recipe, image)


def _check_test_size(task: Task, machine: Machine) -> None:
    """Refuse test images that the model cannot take, or not in the form that it is trained in."""
    side = task.recipe.test_size
    if side is None or not family(task.model).takes_image_size:
        return
    if (patch := patch_side(task.model)) and side % patch:
        raise RecipeError(
            f"test-size is {side}, which cannot be cut into patches of {patch} px",
            f"Give a multiple of {patch}.",
        )
    if task.parametrization or machine.parallel == "fsdp":
        raise RecipeError(
            f"test-size is {side}, and position embeddings that are sharded or computed from other "
            "tensors cannot be resampled",
            "Leave --test-size out, or use --parallel ddp.",
        )
    at_size(build_zeros(task.model), task.model, side)


def _has_halves(model: ModelSpec) -> bool:
    """Return whether it could be coupled of two; standard training also takes other models."""
    try:
        halves_layout(model)
    except (CouplingError, WidthError):
        return False
    return True
