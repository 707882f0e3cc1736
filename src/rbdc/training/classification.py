"""Learn to classify: a task, its data and its weights, as work for the loop."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from rbdc.coupling import block_sizes, set_class_names
from rbdc.data import (
    Batch,
    DataSet,
    EvaluationBatches,
    TextFormat,
    TrainingBatches,
    derive_seed,
)
from rbdc.errors import RunError
from rbdc.models import at_size, build, build_empty, export, halves_layout
from rbdc.settings import Machine
from rbdc.training.evaluation import evaluate
from rbdc.training.machine import settled, torch_device
from rbdc.training.objective import Objective, next_token_loss
from rbdc.training.optimizer import make_optimizer, make_schedule
from rbdc.training.problem import Problem
from rbdc.training.state import Moments, State
from rbdc.training.task import Task, describe_images, tested_images
from rbdc.training.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The start of a training."""

    model: nn.Module
    optimizer: Moments | None = None
    """Optimizer state carried over from the parents; None for a new one."""


def initial_weights(task: Task) -> Start:
    """Return new weights: the architecture's default initialisation, drawn from the task's seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(task.seed, "weights"))
        return Start(model=_parametrized(build(task.model), task))


def _parametrized(model: nn.Module, task: Task) -> nn.Module:
    return task.parametrization.apply(model) if task.parametrization else model


def training_state(
    task: Task,
    start: Start | None,
    steps_per_epoch: int,
    *,
    device: torch.device,
    machine: Machine,
    world: World,
    teacher: nn.Module | None = None,
) -> State:
    """Return the state of a training. Without a start, its weights are uninitialised."""
    machine = settled(machine)
    objective = Objective(task.recipe, teacher.to(device).eval() if teacher else None)
    model: Any = start.model if start else _parametrized(build_empty(task.model), task)
    if teacher and hasattr(model, "set_distilled_training"):
        model.set_distilled_training(True)  # a distillation token then has an output of its own
    if machine.recompute:
        _recompute_activations(model)

    def loss(forward: Callable[[Tensor], Any], batch: Batch) -> Tensor:
        images = batch.images
        if machine.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return objective(forward(images), images, batch.targets, batch.outputs)

    return State(
        model,
        task.recipe,
        seed=task.seed,
        loss=next_token_loss if isinstance(task.image, TextFormat) else loss,
        make_optimizer=lambda model: make_optimizer(model, task.recipe),
        make_schedule=partial(make_schedule, task=task, steps_per_epoch=steps_per_epoch),
        device=device,
        machine=machine,
        world=world,
        moments=start.optimizer if start else None,
    )


def _recompute_activations(model: Any) -> None:
    """Turn on activation checkpointing, as the model's library does it."""
    try:
        if any(isinstance(module, BatchNorm) for module in model.modules()):
            raise ValueError("its batch norms would count each batch twice")
        if older := getattr(model, "gradient_checkpointing_enable", None):  # transformers
            getattr(model, "activation_checkpointing_enable", older)({"use_reentrant": False})
        else:
            model.set_grad_checkpointing(True)  # timm
    except (AttributeError, AssertionError, ValueError) as error:
        raise RunError(
            f"{type(model).__name__} cannot recompute its activations: {error}",
            "Leave --recompute out, or use more micro-batches (--grad-accum-steps).",
        ) from None


class Classification(Problem):
    """Train a task's model to classify the images of a data set."""

    primary_metric = "top1"

    def __init__(
        self,
        task: Task,
        data: DataSet,
        start: Callable[[], Start],
        machine: Machine,
        world: World,
        *,
        teacher: nn.Module | None = None,
        blocks: int = 1,
    ) -> None:
        """Prepare the batches. `start` returns the initial weights, if there is no checkpoint.

        If `blocks` > 1, the norms of `blocks` x `blocks` blocks of each weight are logged.
        """
        machine = settled(machine)
        self.task, self.data, self.start, self.machine = task, data, start, machine
        self.world, self.teacher = world, teacher
        self.name, self.recipe, self.epochs = str(task.model), task.recipe, task.epochs
        self.device = torch_device(machine, world.local_rank)
        micro = task.recipe.grad_accum_steps
        self.training = TrainingBatches(
            data,
            task.recipe,
            task.image,
            seed=task.data_seed,
            batch_size=task.recipe.batch_size,
            micro_batches=(world.size * micro, range(world.rank * micro, (world.rank + 1) * micro)),
            device=self.device,
            workers=machine.workers or 0,
        )
        self.test = EvaluationBatches(
            data,
            tested_images(task),
            batch_size=max(256, task.recipe.batch_size // world.size),
            part=(world.size, world.rank),
            device=self.device,
            workers=machine.workers or 0,
        )
        self.steps_per_epoch = self.training.steps_per_epoch
        self.steps = task.steps(self.steps_per_epoch)
        self.layout = halves_layout(task.model) if blocks > 1 and not task.parametrization else None
        self.blocks_a_side, self.has_blocks = blocks, self.layout is not None

    def to_json(self) -> dict[str, Any]:
        return self.task.to_json()

    def state(self, *, fresh: bool) -> State:
        state = training_state(
            self.task,
            self.start() if fresh else None,
            self.steps_per_epoch,
            device=self.device,
            machine=self.machine,
            world=self.world,
            teacher=self.teacher,
        )
        for model in state.models():
            describe_images(model, self.task.image, self.test.image)
            set_class_names(model, self.data.class_names)
        return state

    def batches(
        self, start: int, stop: int, stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[Sequence[Batch]]:
        return self.training.from_step(start, stop, stopped)

    def image_name(self, index: int) -> str:
        return self.data.train.name(index)

    def evaluate(
        self, models: Sequence[nn.Module], autocast: AbstractContextManager[Any]
    ) -> list[dict[str, float]]:
        side = self.test.image.height
        tested = [at_size(model, self.task.model, side) for model in models]
        return evaluate(tested, self.test, self.world, autocast, idle=self.test.idle)

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write the model in timm's layout."""
        export(model, folder, force=True)

    def blocks(self, weights: Mapping[str, Tensor]) -> Mapping[str, Sequence[Sequence[float]]]:
        assert self.layout is not None
        return block_sizes(weights, self.layout, self.blocks_a_side)
