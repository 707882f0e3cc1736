"""Couple the optimizer's moments: what they would be if the wide model had had its parents' past.

A moment is a running mean of gradients, or of their squares, in the shape of its weight, so it is
coupled along the same axes. Its size follows the gradient of the wide model. The wide head is
halved (Eq. 6), so half of the gradient flows back from it: in the body first moments are halved and
second moments quartered. The gradient of the head itself is its input times the gradient of the
logits, which stay about the same, so its moments are put side by side as they are.

An off-diagonal block has had no gradient, and its first moment is zero. Its second moment is not:
the gradient of a weight is the product of what comes in and what flows back, and both are as large
there as in the diagonal blocks. It is Adafactor's rank-one estimate from the rows of the one block
and the columns of the other. (Zeros with the parents' number of steps would make the first steps
of these weights several times too large.)

Measured on trained pairs, ResNet and ViT, carried second moments are within a factor of two of
those of the coupled model (`tests/coupling/test_gradients.py`).
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from rbdc.coupling.layout import Axes, Layout
from rbdc.coupling.rules import couple_tensor
from rbdc.errors import CouplingError

FIRST = frozenset({"exp_avg", "momentum_buffer"})
SECOND = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg"})
COUNTERS = frozenset({"step", "mu_product"})
FLAGS = frozenset({"use_muon"})  # numbers that choose the rule of a weight, and stay


def check_slots(slots: set[str]) -> None:
    """Refuse optimizer state that is neither a moment nor a step counter, by its name."""
    unknown = slots - FIRST - SECOND - COUNTERS - FLAGS
    if unknown:
        raise CouplingError(
            f"the optimizer keeps {', '.join(sorted(unknown))}, which has no coupling rule",
            "Start the wide model with a new optimizer (the restart transition), or use one "
            "such as adamw, sgd, lion or muon.",
        )


def degree_of(slot: str) -> int:
    """Return the power of the gradient that a slot is a mean of: 1, 2, or 0 for a counter."""
    return 1 if slot in FIRST else 2 if slot in SECOND else 0


@torch.no_grad()
def couple_moments(
    first: Mapping[str, Tensor], second: Mapping[str, Tensor], layout: Layout
) -> dict[str, Tensor]:
    """Return the wide model's moments, by 'parameter/slot', from those of its parents."""
    check_slots({name.rpartition("/")[2] for name in first})
    coupled: dict[str, Tensor] = {}
    for name, left in first.items():
        parameter, _, slot = name.rpartition("/")
        right = second[name]
        if slot in COUNTERS:
            coupled[name] = torch.maximum(left, right)  # siblings take equally many steps
        else:
            coupled[name] = _couple_moment(left, right, layout[parameter], squares=slot in SECOND)
    return coupled


def _couple_moment(first: Tensor, second: Tensor, axes: Axes, *, squares: bool) -> Tensor:
    """Return a wide moment: of gradients, or of their squares."""
    if not axes.scaled:  # a head's bias: the mean
        return couple_tensor(first, second, axes)
    # A weight that the coupling multiplies by f has 1/f of the gradient: a head's is as before.
    gradient = 0.5 / axes.factor
    plain = replace(axes, input_axis=None, scale=1.0, offset=0.0)
    between = _squares_between(first, second, plain) if squares and len(axes.scaled) > 1 else None
    return couple_tensor(first, second, plain, between) * (gradient**2 if squares else gradient)


def _squares_between(first: Tensor, second: Tensor, axes: Axes) -> Tensor:
    """Return the wide second moment by the rank-one estimate; its diagonal blocks do not matter.

    Entry (i, j) of the block whose rows are the first parent's and whose columns are the second's
    is row mean i of the first parent times column mean j of the second, over the geometric mean of
    both parents' means. Positions of a convolution's kernel have estimates of their own.
    """
    if axes.packed:
        parts = zip(axes.unpack(first), axes.unpack(second), strict=True)
        found = [_squares_between(a, b, replace(axes, packed=())) for a, b in parts]
        return torch.cat(found, dim=axes.scaled[0])
    rows, columns = axes.scaled
    means = [t.mean(dim=(rows, columns), keepdim=True) for t in (first, second)]
    scale = (means[0] * means[1]).sqrt().clamp_min(torch.finfo(first.dtype).tiny)
    along_row, along_column = (
        [t.mean(dim=axis, keepdim=True) for t in (first, second)] for axis in (columns, rows)
    )
    by_row = couple_tensor(along_row[0], along_row[1], Axes(scaled=(rows,)))
    second_axis = Axes(scaled=(columns,), packed=axes.packed_second)
    by_column = couple_tensor(along_column[0], along_column[1], second_axis)
    return by_row * by_column / scale
