"""Net2Net, wider (Chen et al., 2016): new units are copies of existing ones, chosen at random."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rbdc.data.randomness import generator
from rbdc.growth.protocol import OneParent
from rbdc.growth.replicate import Replication
from rbdc.growth.units import Units


@dataclass(frozen=True, kw_only=True)
class Net2Wider(Replication):
    """Each new unit copies a random one; the wide model is its parent's function, but for noise.

    Of a transformer every unit is copied exactly once: its layer norms take their statistics over
    the units, which must keep their shares.
    """

    name: ClassVar[str] = "net2net"

    def maps(self, units: Units, seed: int) -> dict[str, Tensor]:
        chosen = {}
        for name, group in units.groups.items():
            n, draws = group.units, generator(seed, "units", name)
            new = (
                torch.randperm(n, generator=draws)
                if units.layer_norm
                else torch.randint(n, (n,), generator=draws)
            )
            chosen[name] = torch.cat([torch.arange(n), new])
        return chosen


@dataclass(frozen=True, kw_only=True)
class Net2Net(OneParent):
    name: ClassVar[str] = "net2net"
    summary: ClassVar[str] = "one narrow model; the wide one has random units of it twice"

    def method(self) -> Net2Wider:
        return Net2Wider()
