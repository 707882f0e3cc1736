"""A model with more units than it will keep, and what is left of it when the best are chosen.

Between two layers, a group of n units gets n splits and some new units to choose from. A split
replaces a unit w by w + v and w - v, and halves what goes out of it; a new unit has small weights
on both sides. A gate of 1 lets a candidate be, one of 0 undoes it: w twice, or nothing. So the
model whose gates are 0 or 1 can be written without the units that are not kept, exactly.

Of a residual stream every unit is split: many layers share it, and there is nothing to choose.
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
"""Of its radius, what a candidate begins with. Not less: while w + v and w - v are on one side of a
ReLU's kink for every image, the split does nothing and learns nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Balls:
    """A learnable vector a unit, within a ball of its own."""

    vectors: Tensor
    unit: int
    """The axis of the units; all others are the vectors'."""
    radii: Tensor

    @property
    def step_size(self) -> float:
        """What moves each number of a vector by this much moves the vector by about its radius."""
        return float(self.radii.mean() / (self.vectors.numel() / len(self.radii)) ** 0.5)

    @torch.no_grad()
    def project(self) -> None:
        norms = norms_of(self.vectors, self.unit).clamp_min(torch.finfo(torch.float32).tiny)
        self.vectors.mul_(along((self.radii / norms).clamp_max(1), self.vectors, self.unit))


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidates:
    """What may be added to a group."""

    split: Balls
    """The direction in which each unit is split."""
    fresh_in: Balls
    fresh_out: Balls
    """New units' weights."""
    gates: Tensor
    """Of the splits, then of the new units."""

    @property
    def balls(self) -> tuple[Balls, ...]:
        """What learns; there may be no new units."""
        return (self.split, self.fresh_in, self.fresh_out) if self.fresh else (self.split,)

    @property
    def splits(self) -> int:
        return len(self.split.radii)

    @property
    def fresh(self) -> int:
        return len(self.fresh_in.radii)


class Enlarged(nn.Module):
    """The parent with its streams doubled and all candidates added: its function, but for what
    they change. Only candidates can learn: the parent's tensors stay as they are, norms' statistics
    among them.

    A split has at most `radius` of its unit's norm, and a new unit `radius` of the others' mean on
    either side. The two copies of a stream's unit are written with weights that are `noise` of
    their norm apart on either side of the parent's: equal ones would stay equal for ever.
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
        super().__init__()
        self.units = units
        self.parent = {name: tensor.to(device) for name, tensor in parent.state_dict().items()}
        self.candidates = dict(self._candidates(surplus, radius, seed))
        self.apart = dict(self._apart(noise, seed))
        self.shell = _shell(wide, units, self.candidates).eval()

    @property
    def balls(self) -> list[Balls]:
        """All that learns."""
        return [balls for candidates in self.candidates.values() for balls in candidates.balls]

    def forward(self, images: Tensor) -> Any:
        return functional_call(self.shell, self.enlarged(), (images,), strict=True)

    def enlarged(self) -> dict[str, Tensor]:
        """The tensors of the model with all units, candidates times their gates."""
        return {name: self._enlarge(name, tensor) for name, tensor in self.parent.items()}

    @torch.no_grad()
    def restricted(self, chosen: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the model without what is not chosen: gates of 0 and 1, then undone."""
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
            given = self.units.axes[f"{inner.first}.weight"][0]
            taken = self.units.axes[f"{inner.second}.weight"][1]
            assert given and taken, inner
            rows = self._by_unit(self.parent[f"{inner.first}.weight"], 0, given)
            columns = self._by_unit(self.parent[f"{inner.second}.weight"], 1, taken)
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
        """For each layer that writes to a stream, what its two copies of a unit differ by."""
        for name, tensor in self.parent.items():
            given = self.units.axes[name][0] if self.units.input_axes[name] is not None else None
            if given is not None and given.group not in self.candidates:
                rows = self._by_unit(tensor, 0, given)
                yield name, random_vectors(rows, 1, noise * norms_of(rows, 1), seed, name)

    def _enlarge(self, name: str, tensor: Tensor) -> Tensor:
        if self.units.input_axes[name] is not None:
            return self._enlarge_weight(name, tensor)
        fill = 1.0 if name.endswith(("weight", "running_var")) else 0.0  # a norm that does nothing
        for number, axis in enumerate(self.units.axes[name]):
            tensor = self._copies(tensor, number, axis, fill=fill)
        return tensor

    def _enlarge_weight(self, name: str, tensor: Tensor) -> Tensor:
        given, taken = self.units.axes[name][:2]
        candidates = self.candidates.get(given.group) if given else None
        if candidates:
            gates = candidates.gates[: candidates.splits]
            vectors = candidates.split.vectors
            split = vectors * along(gates, vectors, 1)
            rows = self._copies(tensor, 0, given, split, candidates.fresh_in.vectors)
        else:
            rows = self._copies(tensor, 0, given, self.apart.get(name, 0.0))
        candidates = self.candidates.get(taken.group) if taken else None
        if not candidates:
            return self._copies(rows / 2 if taken else rows, 1, taken)
        vectors = candidates.fresh_out.vectors
        fresh = vectors * along(candidates.gates[candidates.splits :], vectors, 2)
        return self._copies(rows / 2, 1, taken, 0.0, self._copies(fresh, 0, given))

    def _copies(
        self,
        tensor: Tensor,
        number: int,
        axis: Axis | None,
        split: Tensor | float = 0.0,
        fresh: Tensor | None = None,
        fill: float = 0.0,
    ) -> Tensor:
        """Every unit along an axis twice, `split` apart on either side; then the new ones."""
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
        """Without second copies that equal the first, and without new units that are not there."""
        units, n = self._by_unit(tensor, number, axis), self.candidates[axis.group].splits
        first, second, fresh = units.tensor_split((n, 2 * n), number + 1)
        split, added = chosen.tensor_split((n,))
        if is_input:  # an undone split is read twice, by halves
            first = first + second * along(~split, second, number + 1)
        blocks = (
            first,
            second.index_select(number + 1, split.nonzero()[:, 0]),
            fresh.index_select(number + 1, added.nonzero()[:, 0]),
        )
        return torch.cat(blocks, number + 1).flatten(number, number + 2)

    def _by_unit(self, tensor: Tensor, number: int, axis: Axis) -> Tensor:
        """An axis as three: parts, units, and a unit's channels."""
        channels = self.units.groups[axis.group].channels
        units: Tensor = tensor.unflatten(number, (axis.parts, -1, channels))
        return units


def _shell(wide: ModelSpec, units: Units, candidates: Mapping[str, Candidates]) -> nn.Module:
    """A model that takes any number of units: its layers ask their weights how many there are,
    but for attention."""
    shell = build_meta(wide)
    for inner in units.inner:
        owner: Any = shell.get_submodule(inner.first.rpartition(".")[0])
        if hasattr(owner, "num_heads") and inner.group.endswith("heads"):
            owner.num_heads = 2 * candidates[inner.group].splits + candidates[inner.group].fresh
            owner.attn_dim = owner.num_heads * owner.head_dim
    return shell


def random_balls(like: Tensor, unit: int, radii: Tensor, *place: int | str) -> Balls:
    """A ball for each radius, with a vector like the tensor's in it, START of the way out."""
    vectors = random_vectors(like, unit, START * radii, *place)
    return Balls(vectors=vectors.requires_grad_(), unit=unit, radii=radii)


def random_vectors(like: Tensor, unit: int, lengths: Tensor, *place: int | str) -> Tensor:
    """Vectors like the tensor's, of these lengths, in random directions."""
    shape = list(like.shape)
    shape[unit] = len(lengths)
    vectors = torch.randn(shape, generator=generator(*place)).to(like)
    return vectors * along(lengths / norms_of(vectors, unit), vectors, unit)


def norms_of(tensor: Tensor, unit: int) -> Tensor:
    norms: Tensor = tensor.movedim(unit, 0).flatten(1).norm(dim=1)
    return norms


def along(values: Tensor, tensor: Tensor, unit: int) -> Tensor:
    """A number a unit, in a shape that multiplies the tensor."""
    return values.view([-1 if number == unit else 1 for number in range(tensor.ndim)])
