"""A schedule that timm does not have: warm up, stay at the peak, then fall to the end."""

from collections.abc import Callable, Mapping
from math import cos, pi, sqrt

from timm.scheduler.scheduler import Scheduler
from torch.optim import Optimizer

SHAPES: Mapping[str, Callable[[float], float]] = {
    "cosine": lambda part: (1 + cos(pi * part)) / 2,
    "linear": lambda part: 1 - part,
    "1-sqrt": lambda part: 1 - sqrt(part),  # Haegele et al., 2024
}
"""What is left of the way from the peak to the end, after a part of the decay."""


class Decay(Scheduler):  # type: ignore[misc]
    """Warm up linearly, stay at the peak until `start`, and fall to `min_lr` at `total`."""

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        shape: str,
        total: int,
        warmup: int,
        start: int,
        warmup_lr: float,
        min_lr: float,
    ) -> None:
        """Set the learning rate of update 0. All lengths are in updates."""
        super().__init__(optimizer, param_group_field="lr")
        self.shape, self.total, self.warmup = SHAPES[shape], total, warmup
        self.start = max(start, warmup)
        self.warmup_lr, self.min_lr = warmup_lr, min_lr
        self.update_groups(self._get_lr(0))

    def _get_lr(self, t: int) -> list[float]:
        peaks: list[float] = self.base_values
        if t < self.warmup:
            return [self.warmup_lr + (peak - self.warmup_lr) * t / self.warmup for peak in peaks]
        part = (t - self.start) / max(1, self.total - self.start)
        left = self.shape(min(1.0, max(0.0, part)))
        return [self.min_lr + (peak - self.min_lr) * left for peak in peaks]
