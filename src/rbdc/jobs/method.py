"""Growth methods: the interface by which a GrowJob widens trained models.

RBDC's coupling and every rival implement it: trained parents in, initialised wide model out.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from rbdc.data import Batch
from rbdc.models import ModelSpec

SavedForGrowth = Literal["", "optimizer", "model"]
"""State that a parent's training saves beside its exported weights: none, the optimizer's, or the
model's own, in which parametrized weights are still in their parts."""
State = tuple[Mapping[str, Tensor], Mapping[str, Any]]
"""Tensors by name, and values for JSON."""
NOT_IN_KEY = {"in_key": False}
"""Metadata of an option that does not decide the grown model. What it decides is in the parents'
keys already, so that equal growth jobs have equal keys whichever options asked for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parent:
    """A trained narrow model."""

    model: nn.Module
    saved_for_growth: State | None = None
    """The state that the method's `saved_for_growth` names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowthContext:
    """What a method may use beside its parents."""

    seed: int
    device: torch.device
    batches: Callable[[], Iterator[Batch]]
    """Return the training batches that the job pays for, on `device`, in the same order at every
    call."""
    loss: Callable[[nn.Module, Batch], Tensor]
    """The recipe's training objective."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grown:
    """The result of a growth method."""

    model: nn.Module
    optimizer: State | None = None
    """Initial state of the wide model's optimizer; None starts it empty."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """Measurements to add to the job's result."""


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """A way to widen models. Its options are its fields."""

    name: ClassVar[str]
    saved_for_growth: ClassVar[SavedForGrowth] = ""
    """State that the method needs from its parents' trainings."""
    cost: ClassVar[float] = 0.0
    """FLOPs per training image that the method looks at, relative to training the wide model."""

    def content(self) -> dict[str, Any]:
        """Return the name and the options that decide the grown model, for the job's key."""
        options = (option for option in fields(self) if option.metadata.get("in_key", True))
        return {"name": self.name, **{o.name: getattr(self, o.name) for o in options}}

    @abstractmethod
    def grow(self, parents: Sequence[Parent], wide: ModelSpec, context: GrowthContext) -> Grown:
        """Return the initialised wide model. Models are on the CPU; parents are not changed."""
