"""Measure the blocks of a coupled model's weights.

A coupled weight starts block-diagonal. The off-diagonal blocks connect the two branches, so their
size during training shows how much each branch uses the other.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from rbdc.coupling.layout import Layout


@torch.no_grad()
def block_sizes(
    tensors: Mapping[str, Tensor], layout: Layout, blocks: int
) -> dict[str, list[list[float]]]:
    """Return the root mean square of each block of every weight with two scaled axes.

    A weight is divided into `blocks` x `blocks` blocks: 2 for the two parents, 4 for their
    parents. Matrices packed into one tensor (q, k, v) share one value per block.
    """
    sizes = {}
    for name, axes in layout.items():
        if len(axes.scaled) < 2:
            continue
        weight = tensors[name].float()
        size, parts = weight.shape[1] // blocks, axes.unpack(weight, 2)
        cut = (part.reshape(blocks, len(part) // blocks, blocks, size, -1) for part in parts)
        squares = torch.stack([part.square().sum(dim=(1, 3, 4)) for part in cut]).sum(dim=0)
        entries = weight.numel() // blocks**2
        sizes[name] = (squares / entries).sqrt().tolist()
    return sizes
