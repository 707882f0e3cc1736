"""Units: what the entries of activations and weights belong to.

Every entry of an activation carries the number of a unit, and 0 if it has none. Units that must lie
in one branch of a coupled model are united. A weight's entries are bound to the units of its inputs
and outputs. Numbers are stored once along axes on which they are constant ("thin": size 1 there).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from rbdc.structure.tape import Op, Ref, Tape


@dataclass(frozen=True, slots=True)
class Ids:
    """What the entries of a tensor are: units of an activation, or entries of weights.

    A tensor made of weights alone (a transposed weight, a gain times a weight) has no units yet. It
    has the positions of its entries in each weight: a tensor per axis of the weight, counted from
    1, and 0 for entries that are not of this weight.
    """

    units: Tensor | None = None
    weights: Mapping[str, tuple[Tensor, ...]] = field(default_factory=dict)


class Note(NamedTuple):
    """Something about an operation that the coupling has to respect, or that prevents it."""

    kind: str
    """joint: mixes the branches; shared: one weight for both; constant: depends on the width."""
    op: Op
    tensor: str = ""


NOTHING = Ids()


class Units:
    """The units of one model: `grows` says which axes have another size in its twin."""

    def __init__(
        self,
        tape: Tape,
        twin: Tape,
        shapes: Mapping[str, tuple[int, ...]],
        twin_shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self.shapes, self.twin_shapes = shapes, twin_shapes
        self.twin_shape = {a.number: b.shape for a, b in pairs(tape, twin)}
        self.ids: dict[int, Ids] = {
            number: Ids(weights={name: positions(shapes[name])})
            for number, name in tape.tensors.items()
        }
        self.computed = set(self.ids)
        """Tensors that depend on weights."""
        self.parent = torch.zeros(1, dtype=torch.int64)
        self.seen: list[tuple[Tensor, Tensor]] = []
        self.bound: dict[str, dict[tuple[int, str], Tensor]] = {}
        self.input_axis: dict[str, int] = {}
        self.notes: list[Note] = []
        self.step = 0
        self.choices: dict[int, str] = {}
        self._own: dict[str, Tensor] = {}
        self.constants, self.twin_constants = tape.constants, twin.constants

    def grows(self, ref: Ref) -> tuple[bool, ...]:
        """Return for each axis of a tensor whether its twin has another size there."""
        twin = self.twin_shape.get(ref.number, ref.shape)
        return tuple(a != b for a, b in zip(ref.shape, twin, strict=True))

    def scaled(self, name: str) -> tuple[bool, ...]:
        """Return for each axis of a weight whether its twin has another size there."""
        sizes = zip(self.shapes[name], self.twin_shapes[name], strict=True)
        return tuple(a != b for a, b in sizes)

    def of(self, ref: Ref) -> Ids:
        """Return what a tensor's entries are, with united units under one number."""
        ids = self.ids.get(ref.number, NOTHING)
        return ids if ids.units is None else Ids(units=thin(self.find(ids.units)))

    def fresh(self, *shape: int) -> Tensor:
        """Return new units."""
        count = torch.Size(shape).numel()
        new = torch.arange(len(self.parent), len(self.parent) + count)
        self.parent = torch.cat([self.parent, new])
        return new.view(shape)

    def find(self, units: Tensor) -> Tensor:
        """Return the smallest unit that each of these is united with."""
        while not torch.equal(above := self.parent[units], units):
            units = above
        return units

    def unite(self, left: Tensor, right: Tensor) -> Tensor:
        """Unite two tensors of units, entry by entry, and return the result."""
        left, right = torch.broadcast_tensors(left, right)
        both = (left != 0) & (right != 0) & (left != right)
        a, b = left[both], right[both]
        while True:
            a, b = self.find(a), self.find(b)
            if torch.equal(a, b):
                break
            low, high = torch.minimum(a, b), torch.maximum(a, b)
            self.parent.scatter_reduce_(0, high, low, "amin")
        return thin(self.find(torch.where(left == 0, right, left)))

    def unite_along(self, units: Tensor, *axes: int) -> Tensor:
        """Unite all units along these axes, and return them with size 1 there."""
        for axis in axes:
            if units.shape[axis] > 1:
                units = self.unite(units, units.amax(axis, keepdim=True)).narrow(axis, 0, 1)
        return units

    def bind(self, name: str, at: Sequence[Tensor], units: Tensor, role: str = "") -> None:
        """Bind the entries of a weight to units: `at` are their positions, as in `Ids`.

        Units that vary only where the weight does not are another weight's concern.
        """
        vary = [a for a in range(units.ndim) if units.shape[a] > 1]
        axes = [d for d, index in enumerate(at) if any(index.shape[a] > 1 for a in vary)]
        if vary and not axes:
            return
        shape = self.shapes[name]
        found = torch.zeros(
            [size if d in axes else 1 for d, size in enumerate(shape)], dtype=torch.int64
        )
        units, *index = torch.broadcast_tensors(units, *(at[d] for d in axes))
        valid = units != 0
        for positions_ in index:
            valid = valid & (positions_ > 0)
        place = [torch.zeros((), dtype=torch.int64)] * len(shape)
        for d, positions_ in zip(axes, index, strict=True):
            place[d] = positions_[valid] - 1
        if shape:
            found[tuple(place)] = units[valid]
            self.unite(found[tuple(place)], units[valid])  # an entry that meets several units
        if any(grows := self.scaled(name)):  # a scaled axis has one order, at all other positions
            found = self.unite_along(found, *(d for d, grow in enumerate(grows) if not grow))
        known = self.bound.setdefault(name, {})
        known.setdefault((self.step, role), found)

    def along(self, name: str, axis: int) -> Tensor:
        """Return the unit of each entry along an axis of a weight; 0 where nothing tells."""
        size, read = self.shapes[name][axis], self.input_axis.get(name)
        if name not in self.bound:  # nothing uses the weight
            return self.fresh(size)
        found = torch.zeros(size, dtype=torch.int64)
        for (_, role), units in self.bound[name].items():
            rows = self.find(units).movedim(axis, 0)
            rows = rows.reshape(len(rows), -1)
            single = read is None or (role == "in") == (axis == read)  # or of the other axis
            if len(rows) == 1 and rows.numel() == 1 and single:
                rows = rows.expand(size, 1)  # a single unit has all of them
            one = rows.amax(dim=1, keepdim=True)
            if len(rows) == size and bool(((rows == one) | (rows == 0)).all()):
                found = self.unite(found, one[:, 0]).expand(size)
        return found

    def own(self, ids: Ids) -> Tensor | None:
        """Return units for weights that are used as an activation: each is one of its own."""
        result: Tensor | None = ids.units
        for name, at in ids.weights.items():
            if name not in self._own:
                grows, shape = self.scaled(name), self.shapes[name]
                sizes = [n if g or not any(grows) else 1 for n, g in zip(shape, grows, strict=True)]
                new = self.fresh(*sizes)
                self.bound.setdefault(name, {})[(self.step, "own")] = new
                self.see(new, grows, -1 - len(self._own))
                self._own[name] = new.expand(shape)
            ones = torch.ones((), dtype=torch.int64)
            index = torch.broadcast_tensors(*at) if at else (ones,)
            valid = torch.stack([i > 0 for i in index]).all(dim=0)
            places = tuple((i - 1).clamp_min(0) for i in index) if at else ...
            units = self.find(self._own[name][places]) * valid
            result = units if result is None else self.unite(result, units)
        return result if result is None else thin(result)

    def see(self, units: Tensor, grows: Sequence[bool], *tag: int) -> None:
        """Remember in which slices of a tensor each unit appears: twins have the same slices."""
        for axis in (-1, *(a for a, grow in enumerate(grows) if not grow)):
            size = units.shape[axis] if axis >= 0 else 1
            if axis >= 0 and size == 1:
                continue
            index = torch.arange(size)
            if axis >= 0:
                index = index.view([-1 if a == axis else 1 for a in range(units.ndim)])
            keys = index + hash((self.step, axis, *tag)) % 2**62
            self.seen.append((units.flatten(), keys.expand(units.shape).flatten()))


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of a model, the same operation of its twin, and the model's units."""

    op: Op
    twin: Op
    units: Units

    def set(self, ids: Tensor | None, output: int = 0, *, see: bool = False) -> None:
        """Set the units of an output; `see` remembers in which slices of it they are."""
        ref = self.op.outputs[output]
        if ids is not None and bool((ids != 0).any()):
            self.units.ids[ref.number] = Ids(units=ids)
            if see:
                self.units.see(ids, self.units.grows(ref), output)

    def choose(self, choice: str) -> str:
        """Return what was chosen for this step: the twin that is read first decides for both."""
        return self.units.choices.setdefault(self.units.step, choice)

    def note(self, kind: str, tensor: str = "") -> None:
        """Remember what the coupling has to respect about this operation."""
        self.units.notes.append(Note(kind, self.op, tensor))


def positions(shape: Sequence[int]) -> tuple[Tensor, ...]:
    """Return the position of each entry along each axis, counted from 1, thin."""
    return tuple(
        torch.arange(1, size + 1).view([-1 if a == axis else 1 for a in range(len(shape))])
        for axis, size in enumerate(shape)
    )


def thin(ids: Tensor) -> Tensor:
    """Keep index 0 of every axis along which the numbers are constant."""
    for axis in range(ids.ndim):
        if ids.shape[axis] > 1 and ids.stride(axis) == 0:
            ids = ids.narrow(axis, 0, 1)
    for axis in range(ids.ndim):
        if ids.shape[axis] > 1:
            first = ids.narrow(axis, 0, 1)
            if bool((ids == first).all()):
                ids = first
    return ids


def pairs(tape: Tape, twin: Tape) -> list[tuple[Ref, Ref]]:
    """Return the tensors of both tapes, side by side."""
    return [
        pair
        for mine, other in zip(tape.ops, twin.ops, strict=True)
        for pair in (
            *zip(mine.inputs, other.inputs, strict=True),
            *zip(mine.outputs, other.outputs, strict=True),
        )
    ]
