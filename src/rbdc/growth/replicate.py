"""Widen a model by copying its units, so that it stays the same function: Net2Net and its kin.

A map gives, for each unit of a wide group, the narrow unit that it copies. A group has one map,
used in every tensor that has the group, so that all who write to a stream or read from it agree.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rbdc.coupling import verify_coupling
from rbdc.data.randomness import generator
from rbdc.growth.units import Units, units_of
from rbdc.jobs.method import Grown, GrowthContext, Method, Parent
from rbdc.models import ModelSpec, build_empty
from rbdc.models.coupled import noise_image


@dataclass(frozen=True, kw_only=True)
class Replication(Method):
    """Copy every unit at least once, then let the copies differ a little: equal ones would have
    equal gradients, and stay equal for ever."""

    noise: float = 1e-2
    """On weights that copies take their input by: its std, relative to that of the layer's."""

    @abstractmethod
    def maps(self, units: Units, seed: int) -> dict[str, Tensor]:
        """For each group, what its wide units copy; those of the first half, themselves."""

    @torch.no_grad()
    def perturb(self, model: nn.Module, units: Units, seed: int) -> None:
        """Let the new units, the second half of each group, take their input a little otherwise."""
        for name, weight in model.state_dict().items():
            given = units.axes[name][0] if units.input_axes[name] is not None else None
            if given is None:
                continue  # a norm, a token, a bias; or a head, whose outputs are not new
            std, draws = self.noise * weight.std(), generator(seed, "noise", name)
            for part in weight.chunk(given.parts):
                new = part[len(part) // 2 :]
                new += std * torch.randn(new.shape, generator=draws)

    def check(self, narrow: ModelSpec, wide: ModelSpec) -> None:  # noqa: ARG002
        units_of(narrow)

    def grow(self, parents: Sequence[Parent], wide: ModelSpec, context: GrowthContext) -> Grown:
        (parent,) = (parent.model for parent in parents)
        units = units_of(wide.scaled(0.5))
        model = replicate(parent, wide, units, self.maps(units, context.seed))
        # A model is the mean of itself and itself: what proves a coupling proves this as well.
        proof = verify_coupling(parent, parent, model, noise_image(model))
        self.perturb(model, units, context.seed)
        return Grown(model=model, record={"proof_error": proof.error, "norm_drift": proof.drift})


@torch.no_grad()
def replicate(
    parent: nn.Module, wide: ModelSpec, units: Units, maps: Mapping[str, Tensor]
) -> nn.Module:
    """The wide model that copies its parent's units by the maps, and is the same function.

    Where a layer takes its input, a unit that is there k times counts 1/k each time. With layer
    norms the function is the same only if every unit is there equally often.
    """
    state = {}
    for name, tensor in parent.state_dict().items():
        for number, axis in enumerate(units.axes[name]):
            if axis is None:
                continue
            index = units.index(axis, maps[axis.group])
            tensor = tensor.index_select(number, index)
            if number == units.input_axes[name]:
                copies = index.bincount()[index]
                tensor = tensor / copies.view(
                    [-1 if k == number else 1 for k in range(tensor.ndim)]
                )
        state[name] = tensor
    model = build_empty(wide)
    model.load_state_dict(state)
    return model
