"""What each operation does to units: data movement, pointwise operations and reductions.

A rule sets the ids of an operation's outputs. `rbdc.structure.contractions` has the other rules.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rbdc.structure.contractions import convolve, embed, matrix_product
from rbdc.structure.tape import Op, Ref, aten, replaced
from rbdc.structure.units import Ids, Step, Units, thin

_RULES: dict[str, Callable[[Step], None]] = {
    "mm": matrix_product,
    "bmm": matrix_product,
    "convolution": convolve,
    "embedding": embed,
    "col2im": lambda step: fold(step),
    "cumsum": lambda step: mix(step, [step.op.argument("dim")]),
    "_fft_r2c": lambda step: mix(step, step.op.argument("dim")),
    "_fft_c2c": lambda step: mix(step, step.op.argument("dim")),
    "_fft_c2r": lambda step: mix(step, step.op.argument("dim")),
}
_READS_VALUES = frozenset({"_local_scalar_dense", "nonzero", "argmax", "argmin"})
"""Operations after which a forward pass may depend on its data."""


def apply_rule(op: Op, twin: Op, units: Units) -> None:
    """Set the ids of an operation's outputs; note an operation that no rule covers."""
    step = Step(op, twin, units)
    if units.computed.isdisjoint(ref.number for ref in op.inputs):
        return
    units.computed.update(ref.number for ref in op.outputs)
    if not op.outputs:  # booleans and integers have no units
        if op.name in _READS_VALUES:
            step.note("unknown")
        return
    found = [units.of(ref) for ref in op.inputs]
    if not any(ids.units is not None or ids.weights for ids in found):
        return
    if op.constants != twin.constants or _has_other_constants(step):
        step.note("constant")
    if op.name in _RULES:
        _RULES[op.name](step)
    elif op.name in _MOVES or (op.func is not None and op.func.is_view):
        move(step)
    elif op.name in _REDUCTIONS:
        reduce(step)
    elif "pool" in op.name or "upsample" in op.name or op.name.startswith("grid_sampler"):
        axes = 1 if "1d" in op.name else 3 if "3d" in op.name else 2
        mix(step, range(-axes, 0))
    elif op.name in _POINTWISE or _is_tagged_pointwise(op.name):
        pointwise(step)
    elif not op.name.startswith("new_") and not op.name.endswith(("_like", "fill", "zero")):
        step.note("unknown")


def _has_other_constants(step: Step) -> bool:
    """Return whether a constant tensor of the wider twin has other values than the narrower's.

    Slopes by head (ALiBi) depend on the number of heads. The same values twice are no difference.
    """
    arithmetic = step.op.name in ("add", "sub", "mul", "div")  # what is copied into may be anything
    for ref, other in zip(step.op.inputs, step.twin.inputs, strict=True) if arithmetic else ():
        own = step.units.constants.get(ref.number)
        theirs = step.units.twin_constants.get(other.number)
        if own is not None and theirs is not None and own.numel() != theirs.numel():
            small, large = sorted((own.flatten(), theirs.flatten()), key=len)
            times = len(large) // len(small)
            if not torch.equal(small.repeat(times).sort().values, large.sort().values):
                return True
    return False


# Pointwise operations

_POINTWISE = frozenset({"hardswish", "_prelu_kernel", "complex", "polar", "log_sigmoid_forward"})
"""Pointwise operations that torch does not tag as such."""


@cache
def _is_tagged_pointwise(name: str) -> bool:
    """Return whether torch tags an operation as pointwise; of in-place ones it tags only some."""
    packet = getattr(aten, name)
    return any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())


def pointwise(step: Step) -> None:
    """Unite the inputs' units; bind weights to the units they are multiplied with or added to."""
    units, out = step.units, step.op.outputs[0]
    grows, rank = units.grows(out), len(out.shape)
    found = [units.of(ref) for ref in step.op.inputs]
    refs = [ref for ref, ids in zip(step.op.inputs, found, strict=True) if ids.units is not None]
    active = [_lift(ids.units, rank) for ids in found if ids.units is not None]
    sizes = [(*[1] * (rank - len(ref.shape)), *ref.shape) for ref in refs]
    weights = {
        name: tuple(_lift(index, rank) for index in at)
        for ids in found
        for name, at in ids.weights.items()
    }
    if not active:
        units.ids[out.number] = Ids(weights=weights)
        return
    # One value for channels of both branches, as a gate, is of none of their units.
    across = [a for a in range(rank) if grows[a] and any(size[a] > 1 for size in sizes)]
    full = (all(size[a] > 1 for a in across) for size in sizes)
    own = [ids for ids, is_full in zip(active, full, strict=True) if is_full] or active[:1]
    total = own[0]
    for ids in own[1:]:
        total = units.unite(total, ids)
    for name, at in weights.items():
        _bind_each(step, name, at, total, grows)
    step.set(total)


def _bind_each(
    step: Step, name: str, at: tuple[Tensor, ...], total: Tensor, grows: tuple[bool, ...]
) -> None:
    """Bind a weight's entries to the units beside them, or note that both branches share it."""
    for axis in range(total.ndim):
        if total.shape[axis] > 1 and all(index.shape[axis] == 1 for index in at):
            if grows[axis]:
                step.note("shared", name)
                return
            total = step.units.unite_along(total, axis)
    step.units.bind(name, at, total)


def _lift(ids: Tensor, rank: int) -> Tensor:
    return ids.view([1] * (rank - ids.ndim) + list(ids.shape))


# Data movement: do to the ids what is done to the values


def move(step: Step) -> None:
    """Apply the operation to the ids themselves."""
    units, refs = step.units, step.op.inputs
    every = {ref.number: units.of(ref) for ref in refs}
    if any(ids.units is not None for ids in every.values()):
        results = _moved(step.op, {n: units.own(ids) for n, ids in every.items()})
        for output, result in enumerate(results):
            step.set(thin(result), output, see=True)
        return
    found: list[dict[str, tuple[Tensor, ...]]] = [{} for _ in step.op.outputs]
    for name in {name: 0 for ids in every.values() for name in ids.weights}:
        axes = [
            _moved(step.op, {n: ids.weights[name][axis] for n, ids in every.items() if name in
                             ids.weights})
            for axis in range(len(units.shapes[name]))
        ]  # fmt: skip
        for output, into in enumerate(found):
            at = tuple(thin(axis[output]) for axis in axes)
            if all(bool((index > 0).any()) for index in at):
                into[name] = at
    for ref, weights in zip(step.op.outputs, found, strict=True):
        units.ids[ref.number] = Ids(weights=weights)


def _moved(op: Op, ids: Mapping[int, Tensor | None]) -> list[Tensor]:
    """Return the outputs of the operation on ids in place of values."""

    def full(argument: Any) -> Any:
        if not isinstance(argument, Ref):
            return argument
        found = ids.get(argument.number)
        zero = torch.zeros((), dtype=torch.int64)
        return (zero if found is None else found).expand(argument.shape)

    args, kwargs = replaced((op.args, op.kwargs), full)
    result = _MOVES.get(op.name, op.func)(*args, **kwargs)
    results = [result] if isinstance(result, Tensor) else result
    return [t.reshape(ref.shape) for t, ref in zip(results, op.outputs, strict=False)]


def _write_back(base: Tensor, view: Tensor, geometry: tuple[Any, ...]) -> Tensor:
    base = base.contiguous().clone()
    base.as_strided(*geometry).copy_(view)
    return base


def _as_floats(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the operation for integers, where torch has it only for floating-point numbers."""
    return lambda ids, *args: func(ids.double(), *args).long()


_MOVES: dict[str, Callable[..., Any]] = {
    **{
        name: getattr(aten, name)
        for name in (
            "cat", "stack", "index", "index_select", "gather", "roll", "flip", "repeat", "tril",
            "triu", "slice_scatter", "select_scatter", "_unsafe_index", "rot90",
        )
    },
    "view": lambda ids, size: ids.reshape(size),
    "_unsafe_view": lambda ids, size: ids.reshape(size),
    "reshape": lambda ids, size: ids.reshape(size),
    "repeat_interleave": lambda ids, *args, **kwargs: ids.repeat_interleave(*args, **kwargs),
    "as_strided": lambda ids, *geometry: ids.contiguous().as_strided(*geometry),
    "constant_pad_nd": lambda ids, pad, *_: aten.constant_pad_nd(ids, pad, 0),
    "copy": lambda old, new, *_: new.expand(old.shape),
    "write_back": _write_back,
    "view_as_complex": lambda ids: ids[..., 0],
    "view_as_real": lambda ids: ids.unsqueeze(-1).expand(*ids.shape, 2),
    **{
        name: _as_floats(getattr(aten, name))
        for name in ("reflection_pad1d", "reflection_pad2d", "replication_pad2d")
    },
}  # fmt: skip


def fold(step: Step) -> None:
    """Unite the entries of a channel's patches, which are added up where they overlap."""
    units, ref, out = step.units, step.op.inputs[0], step.op.outputs[0]
    found = units.own(units.of(ref))
    if found is None:
        return
    rows, channels = ref.shape[-2], out.shape[-3]
    patches = found.expand(*found.shape[:-2], rows, found.shape[-1]).unflatten(-2, (channels, -1))
    step.set(units.unite_along(patches, -2, -1), see=True)


# Reductions


def reduce(step: Step) -> None:
    """Unite along the reduced axes; one that grows mixes the branches and leaves no unit."""
    op, units = step.op, step.units
    ref = op.inputs[0]
    if len(op.inputs) > 1:  # max and min of two tensors
        pointwise(step)
        return
    rank, ids, grows = len(ref.shape), units.of(ref), units.grows(ref)
    dims = op.argument("dim")
    dims = range(rank) if dims in (None, []) else [dims] if isinstance(dims, int) else dims
    axes = sorted({axis % rank for axis in dims})
    if ids.units is None:  # the statistics of a weight are of none of its entries
        at = [index for all_of in ids.weights.values() for index in all_of]
        if any(grows[a] and index.shape[a] > 1 for a in axes for index in at):
            for name in ids.weights:
                step.note("standardised", name)
        return
    if any(grows[a] and ids.units.shape[a] > 1 for a in axes):
        step.note("joint")
        return
    left = units.unite_along(ids.units, *axes)
    for output, out in enumerate(op.outputs):
        if len(out.shape) < rank:
            step.set(left.reshape([n for a, n in enumerate(left.shape) if a not in axes]), output)
        else:
            step.set(left, output)


_REDUCTIONS = frozenset({
    "mean", "sum", "amax", "amin", "var", "std", "var_mean", "std_mean", "max", "min", "norm",
    "linalg_vector_norm", "logsumexp", "prod",
})  # fmt: skip


def mix(step: Step, axes: Iterable[int]) -> None:
    """Unite along axes that the operation mixes but keeps: pooling, resizing, transforms."""
    units, ref = step.units, step.op.inputs[0]
    found = units.own(units.of(ref))
    if found is None:
        return
    grows = units.grows(ref)
    axes = [axis % len(ref.shape) for axis in axes]
    if any(grows[a] and found.shape[a] > 1 for a in axes):
        step.note("joint")
        return
    step.set(units.unite_along(found, *axes))
