"""What a training is, as the loop sees it: classification here, detection in `transfer`."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rbdc.settings import Optimization
from rbdc.training.state import State


class Problem(ABC):
    """Batches, a model with its loss, and scores. All of it follows from what `to_json` says."""

    name: str
    """For messages."""
    recipe: Optimization
    epochs: float
    steps_per_epoch: int
    steps: int
    """Updates in all."""
    primary_metric: str
    """The score that the best model has most of."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """What decides the result: a checkpoint is only used for the same."""

    @abstractmethod
    def state(self, *, fresh: bool) -> State:
        """The model before its first step; if not fresh, its weights may be anything: what a
        checkpoint holds goes over them."""

    @abstractmethod
    def batches(self, start: int, stop: int) -> Iterator[Sequence[Any]]:
        """This process's shares of the batches of steps `start` to `stop` (without it); each has
        `indices`, the images it is of."""

    @abstractmethod
    def image_name(self, index: int) -> str:
        """Of a training image."""

    @abstractmethod
    def evaluate(self, model: nn.Module, autocast: AbstractContextManager[Any]) -> dict[str, float]:
        """How good the model is, by name; every process takes part, and gets the same."""

    @abstractmethod
    def export(self, model: nn.Module, folder: Path) -> None:
        """Write the model as users load it."""

    has_blocks: bool = False
    """Whether its weights are looked at block by block, now and then."""

    def blocks(self, weights: Mapping[str, Tensor]) -> Mapping[str, Sequence[Sequence[float]]]:
        """The sizes of the blocks of each weight."""
        raise NotImplementedError
