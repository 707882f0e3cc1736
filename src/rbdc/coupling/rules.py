"""The coupling rules: build one wide tensor from two narrow tensors.

Equation numbers are those of the paper and its supplement. The rule follows from the scaled axes
of a tensor (`rbdc.structure.layout`), which also settles cases the paper does not name. A stem or
patch embedding, whose input is the image, has one scaled axis and is concatenated. So are class and
distillation tokens and position embeddings. A distillation head is coupled like any head.
Batch-norm counters are averaged.
"""

from torch import Tensor

from rbdc.structure import Axes


def couple_tensor(
    first: Tensor, second: Tensor, axes: Axes, off_diagonal: Tensor | None = None
) -> Tensor:
    """Return the wide tensor built from two narrow ones. The inputs are not changed."""
    if not axes.scaled:  # Eq. 6, bias of a head
        if not first.is_floating_point():
            return (first + second) // 2
        return first / 2 + second / 2  # halve first: the sum of two fp16 values may overflow
    if off_diagonal is None:
        shape = [2 * size if axis in axes.scaled else size for axis, size in enumerate(first.shape)]
        result = first.new_zeros(shape)
    else:
        result = off_diagonal.to(first, copy=True)
    # One scaled axis: biases of Eq. 3 to 5 and 7; norms, Eq. 8 and 9. Two: Eq. 1; Eq. 3 to 5 and 7.
    for branch, tensor in enumerate((first, second)):
        for narrow, wide in axes.blocks(tensor.shape, branch):
            result[wide] = axes.scaled_entries(tensor[narrow])  # Eq. 6: halved in a head's weight
    return result


def rule_of(axes: Axes) -> str:
    """Name the rule by which a tensor is coupled, in the words of the documentation."""
    if not axes.scaled:
        return "mean"
    packed = ", packed" if axes.packed or axes.packed_second else ""
    if axes.factor == 0.5:
        return f"side by side and halved{packed}"
    times = f", times {axes.factor:.3g}" if axes.factor != 1 else ""
    return ("block-diagonal" if len(axes.scaled) > 1 else "side by side") + times + packed
