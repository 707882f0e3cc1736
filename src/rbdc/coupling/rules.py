"""The coupling rules: build one wide tensor from two narrow tensors.

Equation numbers are those of the paper and its supplement. The rule follows from the scaled axes
of a tensor (see `layout`), which also settles cases the paper does not name. A stem or patch
embedding, whose input is the image, has one scaled axis and is concatenated. So are class and
distillation tokens and position embeddings. A distillation head is coupled like any head.
Batch-norm counters are averaged.
"""

from dataclasses import replace
from itertools import zip_longest

import torch
from torch import Tensor

from rbdc.coupling.layout import Axes


def couple_tensor(
    first: Tensor, second: Tensor, axes: Axes, off_diagonal: Tensor | None = None
) -> Tensor:
    """Return the wide tensor built from two narrow ones. The inputs are not changed."""
    if axes.packed:  # Eq. 3: couple q, k and v separately, then pack them again
        background = axes.unpack(off_diagonal, 2) if off_diagonal is not None else ()
        parts = zip_longest(axes.unpack(first), axes.unpack(second), background)
        return torch.cat([couple_tensor(a, b, replace(axes, packed=()), c) for a, b, c in parts])
    match axes.scaled:
        case () if first.is_floating_point():  # Eq. 6, bias of a head
            return first / 2 + second / 2  # halve first: the sum of two fp16 values may overflow
        case ():
            return (first + second) // 2
        case (axis,) if axis == axes.input_axis:  # Eq. 6, weight of a head
            return torch.cat([first, second], dim=axis) / 2
        case (axis,):  # biases of Eq. 3 to 5 and 7; norms, Eq. 8 and 9
            return torch.cat([first, second], dim=axis)
        case _:  # Eq. 1; Eq. 3 to 5 and 7
            return _block_diagonal(first, second, axes.scaled, off_diagonal)


def _block_diagonal(
    first: Tensor, second: Tensor, scaled: tuple[int, ...], off_diagonal: Tensor | None
) -> Tensor:
    if off_diagonal is None:
        shape = [2 * size if axis in scaled else size for axis, size in enumerate(first.shape)]
        result = first.new_zeros(shape)
    else:
        result = off_diagonal.to(first, copy=True)
    for branch, block in enumerate((first, second)):
        corner = result
        for axis in scaled:
            corner = corner.narrow(axis, branch * block.shape[axis], block.shape[axis])
        corner.copy_(block)
    return result
