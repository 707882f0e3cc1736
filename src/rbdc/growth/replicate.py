"""Widen a model by copying its units so that its function is preserved: Net2Net, HyperCloning.

A map gives the narrow unit that each unit of a wide group copies. A group has one map, used in
every tensor that contains the group, so that all layers that write to or read from it agree.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rbdc.coupling import example_for, verify_coupling
from rbdc.data.randomness import generator
from rbdc.growth.protocol import OneParent
from rbdc.growth.units import Units, along, units_of
from rbdc.jobs.method import Grown, GrowthContext, Parent
from rbdc.models import ModelSpec, build_empty


@dataclass(frozen=True, kw_only=True)
class Replication(OneParent):
    """Copy every unit at least once, then perturb the copies.

    Without noise, copies would have equal gradients and stay equal forever.
    """

    noise: float = 1e-2
    """Standard deviation of the noise on weights, relative to that of the layer's weights."""

    @abstractmethod
    def maps(self, units: Units, seed: int) -> dict[str, Tensor]:
        """Return the map of each group; its first half is the identity."""

    @torch.no_grad()
    def perturb(self, model: nn.Module, units: Units, seed: int) -> None:
        """Add noise to the incoming weights of new units, the second half of each group."""
        for name, weight in model.state_dict().items():
            if units.written(name) is None:
                continue  # a norm, a token, a bias; or a head, whose outputs are not new
            std, draws = self.noise * weight.std(), generator(seed, "noise", name)
            for part in units.by_unit(weight, name, 0):
                new = part[len(part) // 2 :].flatten(0, 1)
                new += std * torch.randn(new.shape, generator=draws)

    def check_model(self, wide: ModelSpec) -> None:
        """Refuse a model whose units are not known."""
        units_of(wide.scaled(0.5))

    def grow(self, parents: Sequence[Parent], wide: ModelSpec, context: GrowthContext) -> Grown:
        """Copy units, measure how exactly the function is preserved, then perturb."""
        (parent,) = (parent.model for parent in parents)
        units = units_of(wide.scaled(0.5))
        model = replicate(parent, wide, units, self.maps(units, context.seed))
        # The parent is the mean of itself and itself, so the proof of a coupling applies.
        proof = verify_coupling(parent, parent, model, example_for(model))
        self.perturb(model, units, context.seed)
        return Grown(model=model, record={"proof_error": proof.error, "norm_drift": proof.drift})


@torch.no_grad()
def replicate(
    parent: nn.Module, wide: ModelSpec, units: Units, maps: Mapping[str, Tensor]
) -> nn.Module:
    """Return a wide model that copies its parent's units by the maps and has the same function.

    On a layer's input axis, a unit with k copies is divided by k. With layer norms the function is
    the same only if every unit has equally many copies.
    """
    state = {}
    for name, tensor in parent.state_dict().items():
        for number, group in enumerate(units.axes[name]):
            if group is None:
                continue
            index = maps[group]
            tensor = units.by_unit(tensor, name, number).index_select(number + 1, index)
            if number == units.layout[name].input_axis:
                tensor = tensor / along(index.bincount()[index], tensor, number + 1)
            tensor = tensor.flatten(number, number + 2)
        state[name] = tensor
    model = build_empty(wide)
    model.load_state_dict(state)
    return model
