"""Net2Net, wider (Chen et al., ICLR 2016): new units are copies of randomly chosen units."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rbdc.data.randomness import generator
from rbdc.growth.replicate import Replication
from rbdc.growth.units import Units


@dataclass(frozen=True, kw_only=True)
class Net2Net(Replication):
    """Copy random units; up to the noise, the wide model computes its parent's function.

    In a transformer every unit is copied exactly once. Its layer norms compute statistics over the
    units, so each unit must keep its weight in them.
    """

    name: ClassVar[str] = "net2net"
    summary: ClassVar[str] = "one narrow model; the wide one has random units of it twice"

    def maps(self, units: Units, seed: int) -> dict[str, Tensor]:
        """Return the identity for the first half of each group, and random units for the second."""
        chosen = {}
        for name, group in units.groups.items():
            n, draws = group.units, generator(seed, "units", name)
            if units.layer_norm:
                new = torch.randperm(n, generator=draws)
            else:
                new = torch.randint(n, (n,), generator=draws)
            chosen[name] = torch.cat([torch.arange(n), new])
        return chosen
