"""HyperCloning (Samragh et al., 2024): every unit twice, [[W/2, W/2], [W/2, W/2]].

Noise that breaks the symmetry cancels between the two column blocks, [[W/2 + N, W/2 - N], ...]:
what they are multiplied with is equal at first, so the function is preserved with it, too.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rbdc.data.randomness import generator
from rbdc.growth.protocol import OneParent
from rbdc.growth.replicate import Replication
from rbdc.growth.units import Units


@dataclass(frozen=True, kw_only=True)
class Cloning(Replication):
    """The model beside itself; the wide model is its parent's function."""

    name: ClassVar[str] = "hypercloning"

    def maps(self, units: Units, seed: int) -> dict[str, Tensor]:  # noqa: ARG002
        return {name: torch.arange(group.units).repeat(2) for name, group in units.groups.items()}

    @torch.no_grad()
    def perturb(self, model: nn.Module, units: Units, seed: int) -> None:
        for name, weight in model.state_dict().items():
            column = units.input_axes[name]
            if column is None or units.axes[name][column] is None:
                continue  # no layer, or one whose input is the image: there is nothing to cancel
            first, second = weight.chunk(2, dim=column)
            draws = generator(seed, "noise", name)
            noise = self.noise * weight.std() * torch.randn(first.shape, generator=draws)
            first += noise
            second -= noise


@dataclass(frozen=True, kw_only=True)
class HyperCloning(OneParent):
    name: ClassVar[str] = "hypercloning"
    summary: ClassVar[str] = "one narrow model; the wide one has each of its units twice"

    def method(self) -> Cloning:
        return Cloning()
