"""The interface of a training problem: classification, language, or detection in `transfer`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rbdc.settings import Optimization
from rbdc.training.state import State


class Problem(ABC):
    """Batches, a model with its loss, and scores. `to_json` determines all of them."""

    name: str
    """Name of the model, for messages."""
    recipe: Optimization
    epochs: float
    steps_per_epoch: int
    steps: int
    """Total number of updates."""
    primary_metric: str
    """Name of the score by which the best model is chosen."""
    fixed_shapes: bool = True
    """Whether all training batches have one shape."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return everything that decides the result. A checkpoint must have the same value."""

    @abstractmethod
    def state(self, *, fresh: bool) -> State:
        """Return the state before the first step.

        If not `fresh`, the weights may be uninitialised: a checkpoint overwrites them.
        """

    @abstractmethod
    def batches(
        self, start: int, stop: int, stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[Sequence[Any]]:
        """Yield this process's micro-batches of each step from `start` to `stop` (exclusive).

        Each micro-batch has `indices`, the indices of its images, and `decoded`, the number of
        images that this process decoded for it. Once `stopped` returns True, the next batch does
        not wait for other processes.
        """

    @abstractmethod
    def image_name(self, index: int) -> str:
        """Return the name of a training image, for messages."""

    @abstractmethod
    def evaluate(
        self, models: Sequence[nn.Module], autocast: AbstractContextManager[Any]
    ) -> list[dict[str, float]]:
        """Return the scores of each model by name. Collective: every process gets all scores."""

    @abstractmethod
    def export(self, model: nn.Module, folder: Path) -> None:
        """Write the model in the format that users load."""

    def samples(self, model: nn.Module) -> dict[str, Any]:  # noqa: ARG002
        """Return what a training's result also shows of its model, such as texts."""
        return {}

    has_blocks: bool = False
    """Whether the norms of weight blocks are logged during the training."""

    def blocks(self, weights: Mapping[str, Tensor]) -> Mapping[str, Sequence[Sequence[float]]]:
        """Return the root mean square of each block of each weight."""
        raise NotImplementedError
