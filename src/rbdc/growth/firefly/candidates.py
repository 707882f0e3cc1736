"""The parent with all candidate units added, and the wide model that the best of them make.

Between two layers, a group of n units gets n splits and some new units as candidates. A split
replaces a unit w by w + v and w - v, and halves its outgoing weights; a new unit has small incoming
and outgoing weights. A gate of 1 leaves a candidate as it is; a gate of 0 undoes it (w twice, or
nothing). So a model whose gates are all 0 or 1 equals a smaller one without the undone candidates.

In a residual stream every unit is split: many layers share it, so there is no choice.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rbdc.data.randomness import generator
from rbdc.growth.units import Axis, Units
from rbdc.models import ModelSpec, build_meta

START = 0.5
"""Initial norm of a candidate, relative to its radius. With much less, w + v and w - v are on the
same side of a ReLU's kink for every image, and the split has no effect and no gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Balls:
    """One trainable vector per unit, each within a ball of its own radius."""

    vectors: Tensor
    unit: int
    """The axis of the units; the other axes are those of a vector."""
    radii: Tensor

    @property
    def step_size(self) -> float:
        """Return the step per element that moves a vector by about its radius."""
        return float(self.radii.mean() / (self.vectors.numel() / len(self.radii)) ** 0.5)

    @torch.no_grad()
    def project(self) -> None:
        """Scale vectors outside their balls back to the surface, in place."""
        norms = norms_of(self.vectors, self.unit).clamp_min(torch.finfo(torch.float32).tiny)
        self.vectors.mul_(along((self.radii / norms).clamp_max(1), self.vectors, self.unit))


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidates:
    """What may be added to one group of units."""

    split: Balls
    """The direction v in which each unit is split."""
    fresh_in: Balls
    """Incoming weights of new units."""
    fresh_out: Balls
    """Outgoing weights of new units."""
    gates: Tensor
    """Gates of the splits, then of the new units."""

    @property
    def balls(self) -> tuple[Balls, ...]:
        """Return the trainable vectors; there may be no new units."""
        return (self.split, self.fresh_in, self.fresh_out) if self.fresh else (self.split,)

    @property
    def splits(self) -> int:
        """Return the number of splits: one per unit of the group."""
        return len(self.split.radii)

    @property
    def fresh(self) -> int:
        """Return the number of new units."""
        return len(self.fresh_in.radii)


class Enlarged(nn.Module):
    """The parent with its streams doubled and all candidates added.

    It computes the parent's function, except for what the candidates change. Only candidates are
    trainable: the parent's tensors, norm statistics included, stay as they are.

    The norm of a split is at most `radius` times its unit's, that of a new unit at most `radius`
    times the mean of existing units, for incoming and outgoing weights. The incoming weights of
    the two copies of a stream unit are the parent's plus and minus a random vector of `noise` times
    their norm: equal copies would stay equal forever.
    """

    def __init__(
        self,
        parent: nn.Module,
        wide: ModelSpec,
        units: Units,
        *,
        surplus: float,
        radius: float,
        noise: float,
        seed: int,
        device: torch.device,
    ) -> None:
        """Draw the candidates from `seed` and put all tensors on `device`."""
        super().__init__()
        self.units = units
        self.parent = {name: tensor.to(device) for name, tensor in parent.state_dict().items()}
        self.candidates = dict(self._candidates(surplus, radius, seed))
        self.apart = dict(self._apart(noise, seed))
        self.shell = _shell(wide, units, self.candidates).eval()

    @property
    def balls(self) -> list[Balls]:
        """Return all trainable vectors."""
        return [balls for candidates in self.candidates.values() for balls in candidates.balls]

    def forward(self, images: Tensor) -> Any:
        """Return the output of the model with all candidates."""
        return functional_call(self.shell, self.enlarged(), (images,), strict=True)

    def enlarged(self) -> dict[str, Tensor]:
        """Return the state of the model with all candidates, multiplied by their gates."""
        return {name: self._enlarge(name, tensor) for name, tensor in self.parent.items()}

    @torch.no_grad()
    def restricted(self, chosen: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Set the gates to what is chosen; return the state without the other candidates."""
        for name, mask in chosen.items():
            self.candidates[name].gates.copy_(mask)
        state = self.enlarged()
        for name, tensor in state.items():
            for number, axis in enumerate(self.units.axes[name]):
                if axis is not None and axis.group in chosen:
                    is_input = number == self.units.input_axes[name]
                    mask = chosen[axis.group].to(tensor.device)
                    tensor = self._restrict(tensor, number, axis, mask, is_input=is_input)
            state[name] = tensor
        return state

    def _candidates(
        self, surplus: float, radius: float, seed: int
    ) -> Iterator[tuple[str, Candidates]]:
        for inner in self.units.inner:
            group = self.units.groups[inner.group]
            fresh = round((surplus - 1) * group.units)
            out_axis = self.units.axes[f"{inner.first}.weight"][0]
            in_axis = self.units.axes[f"{inner.second}.weight"][1]
            assert out_axis and in_axis, inner
            rows = self._by_unit(self.parent[f"{inner.first}.weight"], 0, out_axis)
            columns = self._by_unit(self.parent[f"{inner.second}.weight"], 1, in_axis)
            sizes, places = radius * norms_of(rows, 1), (seed, "candidates", inner.group)
            reaches = (radius * norms_of(columns, 2).mean()).expand(fresh)
            yield (
                inner.group,
                Candidates(
                    split=random_balls(rows, 1, sizes, *places, "split"),
                    fresh_in=random_balls(rows, 1, sizes.mean().expand(fresh), *places, "in"),
                    fresh_out=random_balls(columns, 2, reaches, *places, "out"),
                    gates=rows.new_ones(group.units + fresh).requires_grad_(),
                ),
            )

    def _apart(self, noise: float, seed: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the random vectors that separate stream copies, by the layer that writes them."""
        for name, tensor in self.parent.items():
            out_axis = self.units.axes[name][0] if self.units.input_axes[name] is not None else None
            if out_axis is not None and out_axis.group not in self.candidates:
                rows = self._by_unit(tensor, 0, out_axis)
                yield name, random_vectors(rows, 1, noise * norms_of(rows, 1), seed, name)

    def _enlarge(self, name: str, tensor: Tensor) -> Tensor:
        if self.units.input_axes[name] is not None:
            return self._enlarge_weight(name, tensor)
        fill = 1.0 if name.endswith(("weight", "running_var")) else 0.0  # an identity norm
        for number, axis in enumerate(self.units.axes[name]):
            tensor = self._copies(tensor, number, axis, fill=fill)
        return tensor

    def _enlarge_weight(self, name: str, tensor: Tensor) -> Tensor:
        out_axis, in_axis = self.units.axes[name][:2]
        candidates = self.candidates.get(out_axis.group) if out_axis else None
        if candidates:
            gates = candidates.gates[: candidates.splits]
            vectors = candidates.split.vectors
            split = vectors * along(gates, vectors, 1)
            rows = self._copies(tensor, 0, out_axis, split, candidates.fresh_in.vectors)
        else:
            rows = self._copies(tensor, 0, out_axis, self.apart.get(name, 0.0))
        candidates = self.candidates.get(in_axis.group) if in_axis else None
        if not candidates:
            return self._copies(rows / 2 if in_axis else rows, 1, in_axis)
        vectors = candidates.fresh_out.vectors
        fresh = vectors * along(candidates.gates[candidates.splits :], vectors, 2)
        return self._copies(rows / 2, 1, in_axis, 0.0, self._copies(fresh, 0, out_axis))

    def _copies(
        self,
        tensor: Tensor,
        number: int,
        axis: Axis | None,
        split: Tensor | float = 0.0,
        fresh: Tensor | None = None,
        fill: float = 0.0,
    ) -> Tensor:
        """Return every unit along an axis plus and minus `split`, followed by the new units."""
        if axis is None:
            return tensor
        units = self._by_unit(tensor, number, axis)
        blocks = [units + split, units - split]
        if axis.group in self.candidates:
            shape = list(units.shape)
            shape[number + 1] = self.candidates[axis.group].fresh
            blocks.append(fresh if fresh is not None else units.new_full(shape, fill))
        return torch.cat(blocks, number + 1).flatten(number, number + 2)

    def _restrict(
        self, tensor: Tensor, number: int, axis: Axis, chosen: Tensor, *, is_input: bool
    ) -> Tensor:
        """Drop second copies that equal the first, and new units that are not chosen."""
        units, n = self._by_unit(tensor, number, axis), self.candidates[axis.group].splits
        first, second, fresh = units.tensor_split((n, 2 * n), number + 1)
        split, added = chosen.tensor_split((n,))
        if is_input:  # the two halved columns of an undone split are added
            first = first + second * along(~split, second, number + 1)
        blocks = (
            first,
            second.index_select(number + 1, split.nonzero()[:, 0]),
            fresh.index_select(number + 1, added.nonzero()[:, 0]),
        )
        return torch.cat(blocks, number + 1).flatten(number, number + 2)

    def _by_unit(self, tensor: Tensor, number: int, axis: Axis) -> Tensor:
        """Unflatten an axis into parts, units and the channels of a unit."""
        channels = self.units.groups[axis.group].channels
        units: Tensor = tensor.unflatten(number, (axis.parts, -1, channels))
        return units


def _shell(wide: ModelSpec, units: Units, candidates: Mapping[str, Candidates]) -> nn.Module:
    """Return a model that takes the enlarged state.

    Layers read their sizes off their weights, except for attention's number of heads.
    """
    shell = build_meta(wide)
    for inner in units.inner:
        owner: Any = shell.get_submodule(inner.first.rpartition(".")[0])
        if hasattr(owner, "num_heads") and inner.group.endswith("heads"):
            owner.num_heads = 2 * candidates[inner.group].splits + candidates[inner.group].fresh
            owner.attn_dim = owner.num_heads * owner.head_dim
    return shell


def random_balls(like: Tensor, unit: int, radii: Tensor, *place: int | str) -> Balls:
    """Return a ball per radius, each with a random vector of START times the radius."""
    vectors = random_vectors(like, unit, START * radii, *place)
    return Balls(vectors=vectors.requires_grad_(), unit=unit, radii=radii)


def random_vectors(like: Tensor, unit: int, lengths: Tensor, *place: int | str) -> Tensor:
    """Return random vectors of these lengths, shaped like the units of a tensor."""
    shape = list(like.shape)
    shape[unit] = len(lengths)
    vectors = torch.randn(shape, generator=generator(*place)).to(like)
    return vectors * along(lengths / norms_of(vectors, unit), vectors, unit)


def norms_of(tensor: Tensor, unit: int) -> Tensor:
    """Return the norm of each unit along an axis."""
    norms: Tensor = tensor.movedim(unit, 0).flatten(1).norm(dim=1)
    return norms


def along(values: Tensor, tensor: Tensor, unit: int) -> Tensor:
    """Reshape one value per unit so that it broadcasts over the tensor."""
    return values.view([-1 if number == unit else 1 for number in range(tensor.ndim)])
