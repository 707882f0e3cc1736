"""HyperCloning (Samragh et al., 2024): every unit twice, [[W/2, W/2], [W/2, W/2]].

The authors draw noise that cancels between the two column blocks. Here it is as Net2Net's, on the
new units' rows alone, so that the two rivals differ in what they copy and in nothing else.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rbdc.growth.protocol import OneParent
from rbdc.growth.replicate import Replication
from rbdc.growth.units import Units


@dataclass(frozen=True, kw_only=True)
class Cloning(Replication):
    """The model beside itself; the wide model is its parent's function, but for noise."""

    name: ClassVar[str] = "hypercloning"

    def maps(self, units: Units, seed: int) -> dict[str, Tensor]:  # noqa: ARG002
        return {name: torch.arange(group.units).repeat(2) for name, group in units.groups.items()}


@dataclass(frozen=True, kw_only=True)
class HyperCloning(OneParent):
    name: ClassVar[str] = "hypercloning"
    summary: ClassVar[str] = "one narrow model; the wide one has each of its units twice"

    def method(self) -> Cloning:
        return Cloning()
