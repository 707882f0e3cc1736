"""How a wide model begins: the one signature that RBDC's coupling has, and every rival of it.

Trained parents in, initialised wide model out; and what it costs beside its parents.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from rbdc.data import Batch
from rbdc.models import ModelSpec

Kept = Literal["", "optimizer", "templates"]
"""What a parent's training keeps beside its weights, for a method that needs it."""
State = tuple[Mapping[str, Tensor], Mapping[str, Any]]
"""Tensors by name, and facts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parent:
    """A trained narrow model."""

    model: nn.Module
    kept: State | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowthContext:
    """What a method may use beside its parents."""

    seed: int
    device: torch.device
    batches: Callable[[], Iterator[Batch]]
    """Training batches on that device, in the same order at every call; as many as the job pays
    for."""
    loss: Callable[[nn.Module, Batch], Tensor]
    """The recipe's objective: what training will minimise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grown:
    """What a method gives."""

    model: nn.Module
    optimizer: State | None = None
    """What the wide model's optimizer starts with, where a method knows."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """What is worth knowing of how it went."""


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """A way to widen models. Its options are its fields; they decide the result, so a job's key
    has them all."""

    name: ClassVar[str]
    parents: ClassVar[int] = 1
    keeps: ClassVar[Kept] = ""
    """What it needs of its parents' trainings."""
    cost: ClassVar[float] = 0.0
    """FLOPs of looking at an image, relative to training the wide model on it; 0: it never looks"""

    def content(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self)}

    def check(self, narrow: ModelSpec, wide: ModelSpec) -> None:  # noqa: B027 - most take any
        """Refuse a model that the method cannot widen, by its shapes alone."""

    @abstractmethod
    def grow(self, parents: Sequence[Parent], wide: ModelSpec, context: GrowthContext) -> Grown:
        """The wide model at its start. Models are on the CPU, and the parents are left alone."""
