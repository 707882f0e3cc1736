"""How far the two halves of a coupled model have grown together.

A coupled weight starts block-diagonal. What training writes into the off-diagonal blocks is what
each half has learnt from the other.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from rbdc.coupling.layout import Layout


@torch.no_grad()
def block_sizes(
    tensors: Mapping[str, Tensor], layout: Layout, blocks: int
) -> dict[str, list[list[float]]]:
    """Root mean square of each block of every weight that is wide on both sides.

    A weight has `blocks` x `blocks` of them: 2 for the two parents, 4 for their parents. Matrices
    packed into one (q, k, v) are looked at together, block by block.
    """
    sizes = {}
    for name, axes in layout.items():
        if len(axes.scaled) < 2:
            continue
        weight = tensors[name].float()
        parts = weight.split([2 * rows for rows in axes.packed]) if axes.packed else (weight,)
        rows, columns = weight.shape[:2]
        squares = torch.stack([_squares(part, blocks) for part in parts]).sum(dim=0)
        entries = rows // blocks * (columns // blocks) * weight[0, 0].numel()
        sizes[name] = (squares / entries).sqrt().tolist()
    return sizes


def _squares(weight: Tensor, blocks: int) -> Tensor:
    """The sum of squares of each block."""
    rows, columns = weight.shape[:2]
    cut = weight.reshape(blocks, rows // blocks, blocks, columns // blocks, -1)
    return cut.square().sum(dim=(1, 3, 4))
