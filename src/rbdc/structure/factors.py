"""Find the factors that a coupling moves from one tensor to another.

A head returns the mean of both branches, so its weight is halved (Eq. 6). A weight that is the
input embedding as well (tied) must not be: the half goes into the scale and bias of the norm before
the head. A constant that depends on the width, as the square root by which Gemma multiplies its
embedding, is made up for in the tensor that it multiplies.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rbdc.structure.layout import Axes
from rbdc.structure.tape import Op, Ref, Tape
from rbdc.structure.units import Units

_TIED = (
    "it is the input embedding and the head in one, and no norm before the head has a weight that "
    "could take the half"
)


@dataclass(slots=True)
class Moved:
    """The tensors whose entries are multiplied, and what cannot be made up for."""

    layout: dict[str, Axes] = field(default_factory=dict)
    conflicts: dict[str, str] = field(default_factory=dict)
    undone: list[Op] = field(default_factory=list)
    """Operations whose constants depend on the width and are made up for."""


def move_factors(
    tape: Tape, twin: Tape, units: Units, layout: Mapping[str, Axes], first: Mapping[str, str]
) -> Moved:
    """Return the tensors that are coupled with a factor; `first` has the first of tied names."""
    reader = _Reader(tape, units)
    moved = Moved()
    scales = _embedding_scales(tape, twin, reader, moved)
    changed: dict[str, Axes] = {n: replace(layout[n], scale=s) for n, s in scales.items()}
    for op in tape.ops:
        for name in reader.heads(op, layout):
            if name not in reader.embeddings:
                continue
            found = reader.affine_before(op)
            changed[name] = replace(layout[name], input_axis=None, scale=scales.get(name, 1.0))
            if not found or any(layout[n].scaled != (0,) for n in found):
                moved.conflicts[name] = _TIED
            for tensor, offset in found.items():
                half = 0.5 / scales.get(name, 1.0)
                changed[tensor] = replace(layout[tensor], scale=half, offset=offset)
    moved.layout = {n: changed[one] for n, one in first.items() if one in changed}
    return moved


def _embedding_scales(tape: Tape, twin: Tape, reader: "_Reader", moved: Moved) -> dict[str, float]:
    """Return by what each embedding is multiplied, where a constant after it follows the width."""
    scales = {}
    for op, other in zip(tape.ops, twin.ops, strict=True):
        if op.name != "mul" or op.constants == other.constants or len(op.constants) != 1:
            continue
        made_by = [reader.made[ref.number] for ref in op.inputs if ref.number in reader.made]
        for source in made_by:
            for name in reader.weights(source) if source.name == "embedding" else ():
                scales[name] = other.constants[0] / op.constants[0]
                moved.undone.append(op)
    return scales


class _Reader:
    """Follow the operations of a tape backwards."""

    def __init__(self, tape: Tape, units: Units) -> None:
        self.units, self.tensors = units, tape.tensors
        self.made = {ref.number: op for op in tape.ops for ref in op.outputs}
        embeds = (op for op in tape.ops if op.name == "embedding")
        self.embeddings = {name for op in embeds for name in self.weights(op)}

    def weights(self, op: Op) -> list[str]:
        """Return the names of the weights that an operation uses."""
        return [name for ref in op.inputs for name in self.units.of(ref).weights]

    def heads(self, op: Op, layout: Mapping[str, Axes]) -> list[str]:
        """Return the weights that an operation uses as heads."""
        return [n for n in self.weights(op) if layout[n].is_head] if op.name in _PRODUCTS else []

    def affine_before(self, head: Op) -> dict[str, float]:
        """Return the scale and bias of the norm before a head, each with its offset, if any."""
        found: dict[str, float] = {}
        ref = self._activation(head)
        while ref is not None and (op := self.made.get(ref.number)) is not None:
            own = [r for r in op.inputs if self.units.of(r).weights]
            if op.name in ("add", "mul") and len(own) == 1:
                name, offset = self._weight(own[0])
                if name is None:
                    return {}
                found[name] = offset
                if op.name == "mul":
                    return found
            elif not (op.func is not None and op.func.is_view) and op.name not in _THROUGH:
                return {}
            ref = self._activation(op)
        return {}

    def _activation(self, op: Op) -> Ref | None:
        """Return the only input that is an activation."""
        inputs = [ref for ref in op.inputs if self.units.of(ref).units is not None]
        return inputs[0] if len(inputs) == 1 else None

    def _weight(self, ref: Ref) -> tuple[str | None, float]:
        """Return the weight that a tensor is, and what was added to it."""
        offset = 0.0
        while (name := self.tensors.get(ref.number)) is None:
            op = self.made.get(ref.number)
            if op is None or len(op.inputs) != 1:
                return None, 0.0
            if op.name == "add" and len(op.constants) == 1:
                offset += op.constants[0]
            elif not (op.func is not None and op.func.is_view):
                return None, 0.0
            ref = op.inputs[0]
        return name, offset


_PRODUCTS = frozenset({"mm", "bmm"})
_THROUGH = frozenset({"_unsafe_view", "reshape", "index", "slice"})
"""Operations besides views that move values and change none."""
