"""The progress reports and the result of a training."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rbdc.training.clock import Spent
from rbdc.training.state import State


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """A progress report for observers, sent a few times per second at most."""

    step: int
    steps: int
    epoch: int
    epochs: float
    batch_size: int
    loss: float
    lr: float
    images_per_second: float
    seconds: float = 0.0
    """Time of the training so far, over all sessions."""
    waited: float = 0.0
    """Share of the time, from 0 to 1, that the training has waited for its batches."""
    workers: int = 0
    """Processes that decode its images."""
    scores: Mapping[str, float] | None = None
    """Scores by name at the end of an epoch, otherwise None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """The result of a training."""

    state: State
    history: list[dict[str, Any]]
    """One row per evaluation; the last row is that of the final weights."""
    best: dict[str, Any]
    """Step, epoch and primary metric of the best evaluation."""
    images: int
    """Number of training images seen, repeated ones included."""
    decoded: int
    """Number of training images decoded for it: none if another training decoded them, too."""
    spent: Spent
    """Time of training and evaluation, over all sessions."""


Observer = Callable[[Progress], None]
