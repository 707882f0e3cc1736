"""Compute epochs from a budget: the appendix's equations, and Algorithm 1.

Level i = 0 is the target, and level S has the 2^S leaves. A schedule gives the epochs of the levels
relative to each other. A budget determines the common factor.
"""

from collections.abc import Sequence
from typing import Literal

TRAINING_PASSES = 3  # one forward, and a backward that costs two (Hoffmann et al., 2022)

Schedule = Literal["appendix", "algorithm-1"]


def relative_epochs(schedule: Schedule, steps: int, ratio: float) -> list[float]:
    """Return the epochs of each level up to a common factor, target first. `ratio` is r, Eq. 2."""
    if schedule == "appendix":  # Eq. 12: epochs_i = epochs_target / r^i
        return [ratio**-level for level in range(steps + 1)]
    # Algorithm 1: a model trains for r/(r+2) of the epochs it is given, and gives 1/(r+2) to each
    # of its two parents. A leaf trains for all of them. The unit is the target's given epochs.
    given = [(ratio + 2) ** -level for level in range(steps + 1)]
    return [epochs * ratio / (ratio + 2) for epochs in given[:-1]] + given[-1:]


def training_flops(forward_flops: float, epochs: float, images: int) -> float:
    """Return FLOPs_training = epochs x |D| x 3 x FLOPs_forward (Eq. 11)."""
    return epochs * images * TRAINING_PASSES * forward_flops


def cost_of_unit(
    models: Sequence[int], epochs: Sequence[float], forward_flops: Sequence[float]
) -> float:
    """Sum models_i x epochs_i x FLOPs_forward_i over levels, per image (Eq. 10 and 13)."""
    return sum(
        float(number) * count * flops
        for number, count, flops in zip(models, epochs, forward_flops, strict=True)
    )


def quartered(forward_flops: float, steps: int) -> list[float]:
    """Return the approximation FLOPs_forward_i = FLOPs_forward_0 / 4^i (Eq. 17)."""
    return [forward_flops / 4**level for level in range(steps + 1)]


def data_passes(models: Sequence[int], epochs: Sequence[float]) -> float:
    """Return the passes over the data that all models make: Algorithm 1's total epochs."""
    return sum(float(number) * count for number, count in zip(models, epochs, strict=True))
