"""Find how a model couples by running it at two widths, side by side.

`find_structure` records the operations of both models (`tape`), follows units through them
(`units`, `rules`), decides which unit lies in which branch (`solve`), and reads off how each tensor
is built from its parents'. What cannot be coupled, or not exactly, is named with its cause.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from rbdc.errors import CouplingError
from rbdc.structure.exact import inexact_uses
from rbdc.structure.factors import move_factors
from rbdc.structure.layout import Axes, Split
from rbdc.structure.rules import apply_rule
from rbdc.structure.solve import UNKNOWN, Branches, Conflict, match, runs_of
from rbdc.structure.tape import Op, Ref, Tape, record
from rbdc.structure.units import Units, pairs, thin

EntryUnits = tuple[Tensor | None, ...]
"""The unit of each entry along each axis of a tensor; None for axes that do not double."""
_SAME_NAMES = {"_unsafe_view": "view", "reshape": "view", "flatten": "view"}
"""Names of reshaping, of which torch chooses one by sizes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Structure:
    """How a wide model is built from two models of half its width."""

    layout: Mapping[str, Axes]
    """How each tensor of the state dict is built from its parents'."""
    joint: Mapping[str, tuple[Split, Split]] = field(default_factory=dict)
    """Modules that mix the branches (norms), with the branches of their input and output."""
    outputs: tuple[Split | None, ...] = ()
    """Branches of the model's outputs; None if both branches share an output, as logits."""
    inexact: Mapping[str, str] = field(default_factory=dict)
    """Tensors and operations that make the coupling inexact, each with its cause."""
    conflicts: Mapping[str, str] = field(default_factory=dict)
    """Tensors and operations that prevent the coupling, each with its cause."""
    unused: tuple[str, ...] = ()
    """Tensors that no operation uses. They are coupled in halves."""

    def to_json(self) -> dict[str, Any]:
        """Return the structure as JSON values."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "Structure":
        """Return the structure that `to_json` described."""
        splits = {name: [_split(one) for one in both] for name, both in data["joint"].items()}
        return Structure(
            layout={name: Axes(**_tuples(axes)) for name, axes in data["layout"].items()},
            joint={name: (a, b) for name, (a, b) in splits.items() if a and b},
            outputs=tuple(map(_split, data["outputs"])),
            inexact=data["inexact"],
            conflicts=data["conflicts"],
            unused=tuple(data["unused"]),
        )


def _split(data: Any) -> Split | None:
    return None if data is None else Split(**_tuples(data))


def _tuples(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(v) if isinstance(v, list) else v for key, v in data.items()}


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DDP, torch.compile or an average of weights."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ in _WRAPPERS:
            inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


_WRAPPERS = {
    "DistributedDataParallel", "DataParallel", "AveragedModel", "ModelEma", "ModelEmaV2",
    "ModelEmaV3",
}  # fmt: skip


@torch.no_grad()
def find_structure(narrow: nn.Module, wide: nn.Module, example: Any) -> Structure:
    """Return how `wide` couples from two models like `narrow`, of half its width.

    Both run `example` once: a tensor, or a tuple or dict of arguments.
    """
    return _Reader(*_followed(narrow, wide, example)).structure(wide)


@torch.no_grad()
def find_units(narrow: nn.Module, wide: nn.Module, example: Any) -> dict[str, EntryUnits]:
    """Return the units that the entries of the narrow model's tensors belong to.

    A unit is a channel, an attention head or a group of channels: what has to lie in one branch.
    """
    _tapes, (units, _), (shapes, wide_shapes) = _followed(narrow, wide, example)
    first, found = _first_names(narrow), dict[str, EntryUnits]()
    for name, shape in shapes.items():
        grows = (size != wide_shapes[name][axis] for axis, size in enumerate(shape))
        found[name] = tuple(
            units.along(first[name], axis) if grow else None for axis, grow in enumerate(grows)
        )
    return {  # what was united later has one number now
        name: tuple(None if axis is None else units.find(axis) for axis in axes)
        for name, axes in found.items()
    }


def _followed(
    narrow: nn.Module, wide: nn.Module, example: Any
) -> tuple[list[Tape], list[Units], list[dict[str, tuple[int, ...]]]]:
    """Run both models on the example; return their operations, units and tensors' shapes."""
    shapes = [_shapes(model) for model in (narrow, wide)]
    _check_names(*shapes)
    tapes = [record(model, example) for model in (narrow, wide)]
    _check_twins(*tapes)
    units = [Units(tapes[i], tapes[1 - i], shapes[i], shapes[1 - i]) for i in (0, 1)]
    units[0].choices = units[1].choices  # the wide model decides: a narrow one may have one head
    for own, (tape, twin) in ((units[1], tapes[::-1]), (units[0], tapes)):
        for number, (op, other) in enumerate(zip(tape.ops, twin.ops, strict=True)):
            own.step = number
            apply_rule(op, other, own)
    return tapes, units, shapes


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _check_names(narrow: Mapping[str, Any], wide: Mapping[str, Any]) -> None:
    if lacking := sorted(narrow.keys() ^ wide.keys()):
        have, lack = ("narrow", "wide") if lacking[0] in narrow else ("wide", "narrow")
        raise CouplingError(
            f"the {have} model has a tensor {lacking[0]} that the {lack} model lacks",
            "Parents and wide model must be the same architecture at widths w and 2w.",
        )
    for name, shape in wide.items():
        ratios = {w / n for n, w in zip(narrow[name], shape, strict=False) if n}
        if len(shape) != len(narrow[name]) or not ratios <= {1, 2}:
            raise CouplingError(
                f"{name} is {narrow[name]} in the narrow model and {shape} in the wide one: every "
                "axis must keep its size or double it",
                "Build the wide model at exactly twice the width of its parents.",
            )


def _check_twins(narrow: Tape, wide: Tape) -> None:
    """Refuse models that do not run the same operations; name the first that differs."""

    def look(op: Op | None) -> object:
        if op is None:
            return None
        ranks = [len(ref.shape) for ref in (*op.inputs, *op.outputs)]
        return (_SAME_NAMES.get(op.name, op.name), op.module, ranks)

    for one, other in zip_longest(narrow.ops, wide.ops):
        if look(one) != look(other):
            raise CouplingError(
                f"the models do not run the same operations: {one or 'the end'} at the narrow "
                f"width, {other or 'the end'} at the wide one",
                "The forward pass must not depend on the width or on the data.",
            )


class _Reader:
    """Read the structure off the units of both twins."""

    def __init__(
        self, tapes: list[Tape], units: list[Units], shapes: list[dict[str, tuple[int, ...]]]
    ) -> None:
        self.twin, self.tape = tapes
        self.twin_ref = {wide.number: narrow for narrow, wide in pairs(*tapes)}
        self.narrow, self.wide = units
        self.shapes = shapes
        self.branches: Branches = match(*units)
        self.shared = {note.tensor: note.op for note in self.wide.notes if note.kind == "shared"}
        self.conflicts: dict[str, str] = {}

    def structure(self, model: nn.Module) -> Structure:
        """Return the structure of the wide model."""
        used = {ref.number for op in self.tape.ops for ref in op.inputs}
        numbers = {name: number for number, name in self.tape.tensors.items()}
        first = _first_names(model)
        unused = tuple(n for n, one in first.items() if one in numbers and numbers[one] not in used)
        layout = {name: self.axes(name, first[name], name in unused) for name in self.shapes[1]}
        for note in self.wide.notes:
            if note.kind == "unknown":
                self.conflicts[str(note.op)] = "no rule says what the operation does to branches"
        inexact = {} if self.conflicts else inexact_uses(self.tape, self.wide, layout)
        joint = self.joint(layout, inexact)
        moved = move_factors(self.tape, self.twin, self.wide, layout, first)
        self.conflicts |= moved.conflicts
        layout |= moved.layout
        self.add_causes(joint, inexact, moved.undone)
        outputs = tuple(self.split(ref) for ref in self.tape.outputs)
        return Structure(
            layout=layout,
            joint=joint,
            outputs=outputs,
            inexact=inexact,
            conflicts=self.conflicts,
            unused=unused,
        )

    def axes(self, name: str, first_name: str, unused: bool) -> Axes:
        """Return how a tensor is coupled, and collect the cause if that cannot be found."""
        narrow, wide = (shapes[name] for shapes in self.shapes)
        scaled = tuple(a for a, size in enumerate(wide) if size != narrow[a])
        halves: list[tuple[int, ...]] = [(narrow[axis],) for axis in scaled]
        try:
            if len(scaled) > 2:
                raise Conflict(f"{len(scaled)} of its axes double")
            if not unused and first_name in self.wide.shapes and scaled:
                halves = [self.parts(first_name, axis) for axis in scaled]
        except Conflict as conflict:
            self.conflicts[name] = str(conflict)
        packed = [parts if len(parts) > 1 else () for parts in (*halves, (), ())]
        return Axes(
            scaled=scaled,
            input_axis=self.wide.input_axis.get(first_name),
            packed=packed[0],
            packed_second=packed[1],
        )

    def parts(self, name: str, axis: int) -> tuple[int, ...]:
        """Return the sizes of the parts along a scaled axis of a tensor."""
        found = torch.full((self.wide.shapes[name][axis],), UNKNOWN)
        where = ""
        if name in self.shared:
            raise Conflict(f"axis {axis} doubles, but both branches use it ({self.shared[name]})")
        for key, units in self.wide.bound.get(name, {}).items():
            branches = self.branches.branch[units].where(units != 0, torch.tensor(UNKNOWN))
            seen = thin(branches)
            if units.shape[axis] == 1 or (seen.shape[axis] == 1 and seen.numel() > 1):
                continue  # it says nothing of this axis, but of another
            where = f" ({self.tape.ops[key[0]]})"
            twin = self.narrow.bound.get(name, {}).get(key)
            if twin is None:
                raise Conflict(f"the narrow model uses it otherwise{where}")
            branch, ordered = self.branches.parts(twin, units, axis)
            clash = (branch != found) & (branch != UNKNOWN) & (found != UNKNOWN)
            if not ordered or bool(clash.any()):
                raise Conflict(f"the entries along axis {axis} have another order{where}")
            found = torch.where(found == UNKNOWN, branch, found)
        try:
            return runs_of(found, axis)
        except Conflict as conflict:
            raise Conflict(f"{conflict}{where}") from None

    def split(self, ref: Ref) -> Split | None:
        """Return where the branches lie in an activation, or None."""
        twin, grows = self.twin_ref.get(ref.number), self.wide.grows(ref)
        wide = self.wide.of(ref).units
        narrow = None if twin is None else self.narrow.of(twin).units
        if wide is None or narrow is None or sum(grows) != 1:
            return None
        axis = grows.index(True)
        try:
            branch, ordered = self.branches.parts(narrow, wide, axis)
            return Split(axis=axis, parts=runs_of(branch, axis)) if ordered else None
        except Conflict:
            return None

    def joint(
        self, layout: Mapping[str, Axes], inexact: dict[str, str]
    ) -> dict[str, tuple[Split, Split]]:
        """Return the modules that mix the branches and can be run for each branch alone."""
        found = {}
        for note in self.wide.notes:
            path = note.op.module
            if note.kind != "joint" or path in found:
                continue
            mixes = [n for n, axes in layout.items() if len(axes.scaled) > 1]
            call = self.tape.calls.get(path)
            splits = [self.split(ref) for ref in call or ()]
            first, last = splits if splits else (None, None)
            if first and last and not any(n.startswith(f"{path}.") for n in mixes):
                found[path] = (first, last)
            else:
                inexact[str(note.op)] = "it mixes the branches, and cannot be run for each alone"
        return found

    def add_causes(
        self, joint: Mapping[str, Any], inexact: dict[str, str], undone: Sequence[Op]
    ) -> None:
        """Add what is noted of operations, except of those in modules that run per branch.

        Constants of the operations `undone` are made up for by a factor in a tensor.
        """
        for note in self.wide.notes:
            if note.op.module in joint or any(note.op is op for op in undone):
                continue
            if note.kind == "standardised":
                inexact[note.tensor] = f"it is normalised over an axis that doubles ({note.op})"
            elif note.kind == "constant":
                inexact[str(note.op)] = "a constant of it depends on the width"


def _first_names(model: nn.Module) -> dict[str, str]:
    """Return the first name of each tensor of the state dict: tied tensors have several."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}
