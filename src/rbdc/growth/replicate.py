"""Widen a model by copying its units so that its function is preserved: Net2Net, HyperCloning.

A map gives the narrow unit that each unit of a wide group copies. A group has one map, used in
every tensor that contains the group, so that all layers that write to or read from it agree. If
every unit is copied once and in order, nothing has to be known of groups: `clone`.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from rbdc.coupling import Axes, Layout, check_exact, example_for, verify_coupling
from rbdc.growth.protocol import OneParent
from rbdc.growth.units import Units, along
from rbdc.jobs.method import Grown, GrowthContext, Parent
from rbdc.models import ModelSpec, build_empty, halves_layout, halves_structure


@dataclass(frozen=True, kw_only=True)
class Replication(OneParent):
    """Copy every unit at least once, then perturb the copies.

    Without noise, copies would have equal gradients and stay equal forever.
    """

    noise: float = 1e-2
    """Standard deviation of the noise on weights, relative to that of the layer's weights."""

    def check_model(self, wide: ModelSpec) -> None:
        """Refuse a model whose halves are not independent: the copies would disturb each other."""
        check_exact(halves_structure(wide))

    def widen(self, parent: nn.Module, wide: ModelSpec, seed: int) -> nn.Module:  # noqa: ARG002
        """Return the wide model, before any noise."""
        return clone(parent, wide, halves_layout(wide))

    @abstractmethod
    def perturb(self, name: str, weight: Tensor, axes: Axes, seed: int) -> None:
        """Add noise to a layer's weight."""

    def grow(self, parents: Sequence[Parent], wide: ModelSpec, context: GrowthContext) -> Grown:
        """Copy units, measure how exactly the function is preserved, then perturb."""
        (parent,) = (parent.model for parent in parents)
        model = self.widen(parent, wide, context.seed)
        # The parent is the mean of itself and itself, so the proof of a coupling applies.
        proof = verify_coupling(parent, parent, model, example_for(model))
        layout = halves_layout(wide)
        with torch.no_grad():
            for name, parameter in model.named_parameters():  # a tied weight once
                if layout[name].input_axis is not None:
                    self.perturb(name, parameter, layout[name], context.seed)
        return Grown(model=model, record={"proof_error": proof.error, "norm_drift": proof.drift})


def halves(weight: Tensor, axes: Axes, axis: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the first and the second half of each packed part along a scaled axis, as views."""
    sizes = axes.parts(axes.narrow_shape(weight.shape))[axes.scaled.index(axis)]
    for start, size in zip([0, *accumulate(sizes)], sizes, strict=False):
        yield weight.narrow(axis, 2 * start, size), weight.narrow(axis, 2 * start + size, size)


@torch.no_grad()
def clone(parent: nn.Module, wide: ModelSpec, layout: Layout) -> nn.Module:
    """Return a wide model with each unit of its parent twice, and the same function."""
    state = {name: _cloned(tensor, layout[name]) for name, tensor in parent.state_dict().items()}
    model = build_empty(wide)
    model.load_state_dict(state)
    return model


def _cloned(tensor: Tensor, axes: Axes) -> Tensor:
    """Return [[W/2, W/2], [W/2, W/2]] for a layer between units, and copies of other tensors."""
    if axes.scaled:
        tensor = axes.scaled_entries(tensor)
    if len(axes.scaled) > 1:
        tensor = tensor / 2
    for axis, sizes in zip(axes.scaled, axes.parts(tensor.shape), strict=True):
        parts = tensor.split(list(sizes), dim=axis)
        tensor = torch.cat([part for part in parts for _ in range(2)], dim=axis)
    return tensor


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
