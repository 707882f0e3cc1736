"""HyperCloning (Samragh et al., 2024): every unit twice, [[W/2, W/2], [W/2, W/2]].

The noise that breaks the symmetry cancels between the two column blocks, [[W/2 + N, W/2 - N], ...]:
their inputs are equal at first, so the function is preserved with noise as well.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rbdc.coupling import Axes
from rbdc.data.randomness import generator
from rbdc.growth.replicate import Replication, halves


@dataclass(frozen=True, kw_only=True)
class HyperCloning(Replication):
    """Copy the whole model; the wide model computes exactly its parent's function."""

    name: ClassVar[str] = "hypercloning"
    summary: ClassVar[str] = "one narrow model; the wide one has each of its units twice"

    def perturb(self, name: str, weight: Tensor, axes: Axes, seed: int) -> None:
        """Add noise to the first half of a layer's columns and subtract it from the second."""
        column = axes.input_axis
        if column is None or column not in axes.scaled:
            return  # its input is the image, which is not doubled
        draws, scale = generator(seed, "noise", name), self.noise * weight.std()
        for first, second in halves(weight, axes, column):
            noise = scale * torch.randn(first.shape, generator=draws)
            first += noise
            second -= noise
