"""How a tensor of a wide model is built from its parents' tensors: the axes that double, and where.

An axis whose size doubles with the model's width is called scaled, one whose size stays the same is
called shared. Along a scaled axis the entries of the two parents alternate in parts: one part each
for most tensors, several where layers are packed (q, k, v) or concatenated.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

import torch
from torch import Tensor

Index = tuple[slice, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """Describe how one tensor of the wide model is built from its parents' tensors."""

    scaled: tuple[int, ...]
    """Axes whose size doubles when the width doubles: at most two."""
    input_axis: int | None = None
    """Axis contracted with the layer's input; None if the tensor is not a layer's weight."""
    packed: tuple[int, ...] = ()
    """Sizes, in the narrow model, of the parts along the first scaled axis; empty if it has one."""
    packed_second: tuple[int, ...] = ()
    """The same along the second scaled axis."""
    scale: float = 1.0
    """Factor that another tensor leaves to this one, as a tied head does to the norm before it."""
    offset: float = 0.0
    """What the model adds to the tensor before it multiplies with it (Gemma's norms: 1)."""

    @property
    def is_head(self) -> bool:
        """Return whether the tensor is a head's weight: its inputs double, its outputs do not."""
        return self.scaled == (self.input_axis,)

    @property
    def factor(self) -> float:
        """Return what the parents' entries are multiplied by: 1/2 in a head (Eq. 6)."""
        return self.scale / 2 if self.is_head else self.scale

    def scaled_entries(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the parents' entries, multiplied by the factor."""
        if self.factor == 1:
            return tensor
        if not self.offset:
            return tensor * self.factor
        return (tensor + self.offset) * self.factor - self.offset

    def unpack(self, tensor: Tensor, width: int = 1) -> tuple[Tensor, ...]:
        """Split a tensor of a model `width` times as wide as the narrow one into its parts."""
        if not self.packed:
            return (tensor,)
        return tuple(tensor.split([width * size for size in self.packed], dim=self.scaled[0]))

    def narrow_shape(self, shape: Sequence[int]) -> list[int]:
        """Return the shape of the narrow tensor from that of the wide one."""
        return [size // 2 if axis in self.scaled else size for axis, size in enumerate(shape)]

    def parts(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the sizes of the parts along each scaled axis of a narrow tensor."""
        packed = (self.packed, self.packed_second)
        return [own or (shape[axis],) for axis, own in zip(self.scaled, packed, strict=False)]

    def blocks(self, shape: Sequence[int], branch: int) -> Iterator[tuple[Index, Index]]:
        """Yield where each block of a narrow tensor lies in it and, for a branch, in the wide one.

        `shape` is that of the narrow tensor, `branch` 0 or 1.
        """
        along = []
        for parts in self.parts(shape):
            starts = [0, *accumulate(parts)]
            along.append([
                (slice(start, start + size), slice(2 * start + branch * size,
                 2 * start + (branch + 1) * size))
                for start, size in zip(starts, parts, strict=False)
            ])  # fmt: skip
        for block in product(*along):
            narrow, wide_ = [slice(None)] * len(shape), [slice(None)] * len(shape)
            for axis, (own, other) in zip(self.scaled, block, strict=True):
                narrow[axis], wide_[axis] = own, other
            yield tuple(narrow), tuple(wide_)

    def branch_of(self, tensor: Tensor, branch: int) -> Tensor:
        """Return the narrow tensor of a branch, 0 or 1, from the wide one."""
        shape = self.narrow_shape(tensor.shape)
        result = tensor.new_empty(shape)
        for narrow, wide in self.blocks(shape, branch):
            result[narrow] = tensor[wide]
        return result


Layout = Mapping[str, Axes]


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Where the two branches lie in an activation of the wide model."""

    axis: int
    parts: tuple[int, ...]
    """Sizes, in the narrow model, of the parts along the axis; each branch has each part."""

    def branches(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Return the entries of each branch."""
        parts = tensor.split([size for size in self.parts for _ in range(2)], dim=self.axis)
        first, second = torch.cat(parts[::2], self.axis), torch.cat(parts[1::2], self.axis)
        return first, second

    def join(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the activation that has these branches."""
        halves = (tensor.split(list(self.parts), dim=self.axis) for tensor in (first, second))
        return torch.cat([part for pair in zip(*halves, strict=True) for part in pair], self.axis)
