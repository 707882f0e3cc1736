"""HyperCloning (Samragh et al., 2024): every unit twice, [[W/2, W/2], [W/2, W/2]].

The noise that breaks the symmetry cancels between the two column blocks, [[W/2 + N, W/2 - N], ...]:
their inputs are equal at first, so the function is preserved with noise as well.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rbdc.data.randomness import generator
from rbdc.growth.replicate import Replication
from rbdc.growth.units import Units


@dataclass(frozen=True, kw_only=True)
class HyperCloning(Replication):
    """Copy the whole model; the wide model computes exactly its parent's function."""

    name: ClassVar[str] = "hypercloning"
    summary: ClassVar[str] = "one narrow model; the wide one has each of its units twice"

    def maps(self, units: Units, seed: int) -> dict[str, Tensor]:  # noqa: ARG002
        """Return all units of each group, twice."""
        return {name: torch.arange(group.units).repeat(2) for name, group in units.groups.items()}

    @torch.no_grad()
    def perturb(self, model: nn.Module, units: Units, seed: int) -> None:
        """Add noise to the first half of a layer's columns and subtract it from the second."""
        for name, weight in model.state_dict().items():
            column = units.layout[name].input_axis
            if column is None or units.axes[name][column] is None:
                continue  # not a layer's weight, or its input is the image, which is not doubled
            first, second = weight.chunk(2, dim=column)
            draws = generator(seed, "noise", name)
            noise = self.noise * weight.std() * torch.randn(first.shape, generator=draws)
            first += noise
            second -= noise
