"""The plan of an RBDC training: which models are trained for how many epochs, at what cost.

`rbdc plan` prints a Plan, and a training executes the same value.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table

from rbdc.models import ModelSpec, image_side, parameters_of
from rbdc.plan.flops import CounterName
from rbdc.plan.growth import describe
from rbdc.plan.schedule import Schedule, training_flops
from rbdc.settings import Axis
from rbdc.shown import Shown

MANY_TOKENS = 20  # per parameter, above which growth gains less (published)
ROUNDING_TOLERANCE = 0.03  # relative difference in FLOPs above which a warning is given

Costs = Literal["exact", "quarter"]
Rounding = Literal["whole", "none"]
Batches = Literal["shared", "separate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Equal models that are trained alike: which, how many, for how long, and grown how."""

    level: int
    """Stages between this one and the target, whose level is 0."""
    model: ModelSpec
    models: int
    """Number of models."""
    parents: int
    """Trained models that each model is grown of: two are coupled; 0 for random leaves."""
    grown: tuple[Axis, ...]
    """What is larger than in its parents: width (two of them are coupled), depth, resolution."""
    epochs: float
    """Training epochs of each model."""
    forward_flops: int
    """FLOPs of a forward pass of one image through one model."""
    training_flops: float
    """FLOPs of training all models of the stage."""
    share: float
    """Fraction of the plan's FLOPs, from 0 to 1."""

    @property
    def width(self) -> float:
        """The width of the models, relative to the named architecture."""
        return self.model.width

    def to_json(self) -> dict[str, Any]:
        """Return the stage as JSON values."""
        return {**asdict(self), "width": self.width, "size": describe(self.model)}


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Plan(Shown):
    """The models to train, leaves first, and their total cost: `for stage in plan` yields them."""

    model: ModelSpec
    steps: int
    ratio: float
    schedule: Schedule
    costs: Costs
    counter: CounterName
    uncounted: dict[str, int]
    """How often the target calls each operation that the FLOP counter ignores."""
    inexact: tuple[str, ...]
    """Tensors whose coupling is not exact; empty if the coupled model is its parents' mean."""
    images: int
    asked_flops: float
    """FLOPs of the plan before epochs were rounded."""
    baseline_epochs: float
    warmup_epochs: float
    batches: Batches
    stages: tuple[Stage, ...]
    """In the order of training: the leaves first, the target last."""
    sequence_length: int | None = None
    """Tokens per sequence of a language model, which takes the place of an image; else None."""

    def __iter__(self) -> Iterator[Stage]:
        """Yield the stages in the order of training."""
        return iter(self.stages)

    def __len__(self) -> int:
        return len(self.stages)

    def __rich__(self) -> RenderableType:
        table = Table(box=SIMPLE, pad_edge=False)
        for column in ("models", "width", "parents each", "epochs each", "FLOPs"):
            table.add_column(column, justify="right")
        for stage in self:
            numbers = f"{stage.models:,}", f"{stage.width:g}", str(stage.parents or "random")
            table.add_row(*numbers, f"{stage.epochs:.4g}", f"{stage.training_flops:.4g}")
        cost = f"{self.training_flops:.4g} FLOPs in all, {self.normalized_flops:.3g} of standard"
        return Group(f"Plan of {self.model}", table, f"{cost} training's")

    @property
    def target(self) -> Stage:
        return self.stages[-1]

    @property
    def leaves(self) -> Stage:
        return self.stages[0]

    @property
    def training_flops(self) -> float:
        return sum(stage.training_flops for stage in self.stages)

    @property
    def baseline_flops(self) -> float:
        """FLOPs of standard training: the target alone, for `baseline_epochs`."""
        return training_flops(self.target.forward_flops, self.baseline_epochs, self.images)

    @property
    def normalized_flops(self) -> float:
        return self.training_flops / self.baseline_flops

    @property
    def data_passes(self) -> float:
        """Passes over the data that all models make together."""
        return sum(stage.models * stage.epochs for stage in self.stages)

    @property
    def decoded_passes(self) -> float:
        """Passes over the data that are decoded: one for all models of a level that share it."""
        if self.batches == "separate":
            return self.data_passes
        return sum(stage.epochs for stage in self.stages)

    def tokens_per_parameter(self, stage: Stage) -> float | None:
        """Return the tokens that a stage's model sees, over its parameters; None for images."""
        if self.sequence_length is None:
            return None
        tokens = stage.epochs * self.images * image_side(stage.model)
        return tokens / parameters_of(stage.model)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about settings that are allowed but likely mistakes."""
        found = []
        seen = self.tokens_per_parameter(self.target)
        if self.steps and seen is not None and seen > MANY_TOKENS:
            found.append(
                f"the target sees {seen:.3g} tokens per parameter; published growth methods gain "
                f"most below about {MANY_TOKENS}"
            )
        if self.steps and self.leaves.epochs <= self.warmup_epochs:
            found.append(
                f"the leaves train for {self.leaves.epochs:g} epochs, not more than the "
                f"{self.warmup_epochs:g} epochs of warm-up: their learning rate does not reach its "
                "peak"
            )
        if self.steps and self.ratio < 1:
            found.append(
                f"ratio {self.ratio:g} trains narrow models longer than wide ones; the paper found "
                "that suboptimal, and ratios of 1.5 to 2 best"
            )
        if self.normalized_flops > 10:
            found.append(
                f"it costs {self.normalized_flops:.0f} times standard training: a budget of 0.7 "
                "means 0.7 times"
            )
        rounding = self.training_flops / self.asked_flops - 1
        if abs(rounding) > ROUNDING_TOLERANCE:
            found.append(
                f"rounding to whole epochs spends {abs(rounding):.1%} "
                f"{'more' if rounding > 0 else 'less'} than asked for"
            )
        if self.inexact:
            found.append(
                f"couplings will not be exact: {self.inexact[0]}"
                + (f" and {len(self.inexact) - 1} more tensors are" if self.inexact[1:] else " is")
                + " shared by both halves and can only be averaged"
            )
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        language = self.sequence_length is not None
        known = asdict(self)
        if not language:
            del known["sequence_length"]
        return {
            **known,
            "stages": [
                stage.to_json()
                | ({"tokens_per_parameter": self.tokens_per_parameter(stage)} if language else {})
                for stage in self.stages
            ],
            "training_flops": self.training_flops,
            "baseline_flops": self.baseline_flops,
            "normalized_flops": self.normalized_flops,
            "data_passes": self.data_passes,
            "decoded_passes": self.decoded_passes,
            "warnings": self.warnings,
        }
