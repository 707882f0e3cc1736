"""What a training tells while it goes on, and what comes of it."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rbdc.training.state import State


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """What an observer is told, a few times a second at most."""

    step: int
    steps: int
    epoch: int
    epochs: float
    batch_size: int
    loss: float
    lr: float
    images_per_second: float
    scores: Mapping[str, float] | None = None
    """By name, at the end of an epoch."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """The result of a training."""

    state: State
    history: list[dict[str, Any]]
    """A row an evaluation; the last is that of the last weights."""
    best: dict[str, Any]
    """The best evaluation: its step, epoch and accuracy."""
    images: int
    """Training images seen."""
    seconds: float
    """Of training, evaluation included, over all sittings."""


Observer = Callable[[Progress], None]
