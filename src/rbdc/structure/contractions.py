"""What contractions do to units: matrix products, convolutions, embeddings.

A contraction with a weight makes a new unit of every output row, and binds the weight's entries to
the units of its inputs and outputs. A product of two activations unites units instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from rbdc.structure.units import Ids, Step, Units, thin


@dataclass(frozen=True, slots=True)
class _Grows:
    """Which axes of out[b, i, j] = sum over k of x[b, i, k] y[b, k, j] grow with the width."""

    b: bool
    i: bool
    j: bool
    k: bool

    def transposed(self) -> "_Grows":
        return _Grows(self.b, self.j, self.i, self.k)


Weights = Mapping[str, tuple[Tensor, ...]]


def matrix_product(step: Step) -> None:
    """Set the units of a matrix product, or of a batch of them."""
    units, (x, y) = step.units, step.op.inputs
    left, right = units.of(x), units.of(y)
    if left.weights and right.weights:
        left = Ids(units=units.own(left))
    (_, i, k), (b, _, j) = ((False, *units.grows(ref))[-3:] for ref in (x, y))
    grows = _Grows(b, i, j, k)
    if right.weights:
        found = _linear(step, _cube(left.units), _cubes(right), grows)
    elif left.weights:
        turned = {name: tuple(index.mT for index in at) for name, at in _cubes(left).items()}
        activation = None if right.units is None else right.units.mT
        found = _linear(step, _cube(activation), turned, grows.transposed()).mT
    else:
        product = _product(step, _cube(left.units), _cube(right.units), grows)
        if product is None:
            return
        found = product
    step.set(found[(0,) * (3 - len(x.shape))], see=True)


def _cube(ids: Tensor | None) -> Tensor | None:
    return None if ids is None else ids.view((1,) * (3 - ids.ndim) + tuple(ids.shape))


def _cubes(ids: Ids) -> Weights:
    return {
        name: tuple(index.view((1,) * (3 - index.ndim) + tuple(index.shape)) for index in at)
        for name, at in ids.weights.items()
    }


def _linear(step: Step, x: Tensor | None, weights: Weights, grows: _Grows) -> Tensor:
    """Return the units of a product of an activation x[b, i, k] with weights[b, k, j]."""
    units = step.units
    positions = [index for at in weights.values() for index in at]
    batches, columns = (max(index.shape[axis] for index in positions) for axis in (0, 2))
    if x is not None and (x.shape[2] == 1 or not grows.k):
        rows = grows.i and x.shape[1] > 1
        if rows or (grows.b and x.shape[0] > 1 and batches == 1):
            for name in weights:  # rows are channels or heads: one weight for those of both halves
                step.note("shared", name)
            return units.unite_along(x, 2)
    if x is not None:
        x = units.unite_along(x, 1) if batches > 1 else units.unite_along(x, 0, 1)
    out = units.fresh(batches, 1, columns)
    for name, at in weights.items():
        units.bind(name, at, out, "out")
        if x is not None:
            units.bind(name, at, x.mT, "in")
        _set_input_axis(units, name, at, 1)
    return out


def _set_input_axis(units: Units, name: str, at: tuple[Tensor, ...], axis: int) -> None:
    """Remember which axis of a weight is contracted with the layer's input."""
    along = [d for d, index in enumerate(at) if index.shape[axis] > 1]
    single = [d for d, size in enumerate(units.shapes[name]) if size == 1]  # a grey image
    if len(along) == 1 or (single and not along):
        units.input_axis.setdefault(name, (along or single)[0])


def _product(step: Step, x: Tensor | None, y: Tensor | None, grows: _Grows) -> Tensor | None:
    """Return the units of a product of activations, as in attention; a constant has None."""
    units = step.units
    varies = (x is not None and x.shape[2] > 1) or (y is not None and y.shape[1] > 1)
    if grows.k and varies:
        step.note("joint")
        return None
    x = None if x is None else units.unite_along(x, 2)
    y = None if y is None else units.unite_along(y, 1)
    if x is None or y is None:
        return y if x is None else x
    x_varies, y_varies = x.shape[0] > 1, y.shape[0] > 1
    one_sided = grows.b and x_varies != y_varies  # one key or value for the heads of both branches
    if choice := step.choose(("x" if x_varies else "y") if one_sided else ""):
        return units.unite_along(x, 1) if choice == "x" else units.unite_along(y, 2)
    rows, columns = grows.i and x.shape[1] > 1, grows.j and y.shape[2] > 1
    if rows and columns:
        step.note("joint")
    if rows or columns:
        return x if rows else y
    return units.unite(units.unite_along(x, 1), units.unite_along(y, 2))


def convolve(step: Step) -> None:
    """Set the units of a convolution without bias."""
    units, (x, weight) = step.units, step.op.inputs
    kernel, found, grows = units.of(weight), units.own(units.of(x)), units.grows(x)
    positions = [axis for axis in range(len(x.shape)) if axis != 1]
    if kernel.units is not None:
        step.note("unknown")  # a kernel that is computed from the input
    elif found is not None and any(grows[a] and found.shape[a] > 1 for a in positions):
        for name in kernel.weights:  # channels or heads lie along the batch, or along the space
            step.note("shared", name)
        if grows[0]:
            step.set(units.unite_along(found, *range(1, found.ndim)))
        else:
            step.note("joint")
    else:
        if found is not None:
            found = units.unite_along(found, *positions).flatten().expand(x.shape[1])
        _convolve(step, found, kernel.weights)


def _convolve(step: Step, x: Tensor | None, weights: Weights) -> None:
    """Convolve x[channel] in groups; a weight is [row, channel of a group, ...]."""
    units, out, (_, weight) = step.units, step.op.outputs[0], step.op.inputs
    transposed, groups = step.op.args[6], step.op.args[8]
    shape = (weight.shape[0], weight.shape[1], *[1] * (len(weight.shape) - 2))
    per_group = out.shape[1] // groups
    channels = None if x is None else x.view(groups, 1, -1)
    if channels is not None and (groups != step.twin.args[8] or not weights):
        if not weights and channels.shape[2] > 1:
            step.note("unknown")  # a constant kernel that mixes channels
            return
        group = units.unite_along(channels, 2)  # more groups for a wider model: each is a unit
        for name, at in weights.items():
            rows = group.expand(groups, 1, weight.shape[0] // groups)
            units.bind(name, at, rows.reshape(-1, 1, *shape[2:]))
        step.set(_along_channels(group.expand(groups, 1, per_group), out.shape), see=True)
        return
    rows = units.fresh(groups, per_group, 1)
    step.set(_along_channels(rows, out.shape), see=True)
    sides = {"out": rows, "in": channels}
    for role, ids in sides.items():
        if ids is None:
            continue
        if groups > 1:  # groups get wider: units stay in their group
            units.see(ids.view(groups, -1), (False, True), len(role))
        ids = ids.mT if transposed else ids
        full = ids.expand(groups, shape[0] // groups, shape[1]).reshape(shape)
        for name, at in weights.items():
            units.bind(name, at, thin(full), role)
    for name, at in weights.items():
        _set_input_axis(units, name, at, 0 if transposed else 1)


def _along_channels(ids: Tensor, shape: tuple[int, ...]) -> Tensor:
    return ids.reshape(1, shape[1], *[1] * (len(shape) - 2))


def embed(step: Step) -> None:
    """Set the units of rows looked up in a weight: each column is one."""
    units, out = step.units, step.op.outputs[0]
    weight = units.of(step.op.inputs[0])
    if weight.units is not None:
        step.note("unknown")
        return
    columns = units.fresh(*[1] * (len(out.shape) - 1), out.shape[-1])
    for name, at in weight.weights.items():
        units.bind(name, at, columns.view(1, -1), "out")
    step.set(columns, see=True)
