"""Measure the blocks of a coupled model's weights.

A coupled weight starts block-diagonal. The off-diagonal blocks connect the two branches, so their
size during training shows how much each branch uses the other.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from rbdc.structure import Layout


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
        narrow = axes.narrow_shape(weight.shape)
        rows, columns = ([2 * size for size in parts] for parts in axes.parts(narrow))
        weight = weight.movedim(axes.scaled, (0, 1))
        weight = weight.reshape(*weight.shape[:2], -1)
        cut = [part for band in weight.split(rows) for part in band.split(columns, dim=1)]
        cut = [part.unflatten(1, (blocks, -1)).unflatten(0, (blocks, -1)) for part in cut]
        squares = torch.stack([part.square().sum(dim=(1, 3, 4)) for part in cut]).sum(dim=0)
        entries = weight.numel() // blocks**2
        sizes[name] = (squares / entries).sqrt().tolist()
    return sizes
