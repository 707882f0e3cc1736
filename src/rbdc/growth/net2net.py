"""Net2Net, wider (Chen et al., ICLR 2016): new units are copies of randomly chosen units."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rbdc.coupling import Axes
from rbdc.data.randomness import generator
from rbdc.growth.replicate import Replication, halves, replicate
from rbdc.growth.units import Units, units_of
from rbdc.models import ModelSpec
from rbdc.models.language import is_language


@dataclass(frozen=True, kw_only=True)
class Net2Net(Replication):
    """Copy random units; up to the noise, the wide model computes its parent's function.

    Where layer norms compute statistics over the units, as in a transformer, every unit is copied
    exactly once, so that each keeps its weight in them. A language model's copies stay in order:
    their order changes nothing but which noise a copy gets.
    """

    name: ClassVar[str] = "net2net"
    summary: ClassVar[str] = "one narrow model; the wide one has random units of it twice"

    def check_model(self, wide: ModelSpec) -> None:
        """Refuse a model whose units cannot be told apart."""
        if is_language(wide.name):
            super().check_model(wide)
        else:
            units_of(wide.scaled(0.5))

    def widen(self, parent: nn.Module, wide: ModelSpec, seed: int) -> nn.Module:
        """Copy random units where it is known which units belong together."""
        if is_language(wide.name):
            return super().widen(parent, wide, seed)
        units = units_of(wide.scaled(0.5))
        return replicate(parent, wide, units, self.maps(units, seed))

    def maps(self, units: Units, seed: int) -> dict[str, Tensor]:
        """Return the identity for the first half of each group, and random units for the second."""
        chosen = {}
        for name, group in units.groups.items():
            n, draws = group.units, generator(seed, "units", name)
            if units.uniform:
                new = torch.randperm(n, generator=draws)
            else:
                new = torch.randint(n, (n,), generator=draws)
            chosen[name] = torch.cat([torch.arange(n), new])
        return chosen

    def perturb(self, name: str, weight: Tensor, axes: Axes, seed: int) -> None:
        """Add noise to the incoming weights of new units, the second half of a layer's outputs."""
        rows = [axis for axis in axes.scaled if axis != axes.input_axis]  # none: a head
        draws, scale = generator(seed, "noise", name), self.noise * weight.std()
        for row in rows:
            for _, new in halves(weight, axes, row):
                new += scale * torch.randn(new.shape, generator=draws)
