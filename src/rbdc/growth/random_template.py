"""Random template: one trained parent in a wide model that is otherwise as it begins."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rbdc.coupling import Axes, layout_of
from rbdc.data import derive_seed
from rbdc.growth.protocol import OneParent
from rbdc.jobs.method import Grown, GrowthContext, Method, Parent
from rbdc.models import ModelSpec, build, halves_layout


@dataclass(frozen=True, kw_only=True)
class FilledBlock(Method):
    """The parent fills the first half of every wide axis, norm statistics included; the rest has
    the architecture's own initialisation, drawn from the seed. What is not wide is the parent's."""

    name: ClassVar[str] = "random"

    def check(self, narrow: ModelSpec, wide: ModelSpec) -> None:  # noqa: ARG002
        halves_layout(wide)

    def grow(self, parents: Sequence[Parent], wide: ModelSpec, context: GrowthContext) -> Grown:
        (parent,) = (parent.model for parent in parents)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(context.seed, "weights"))
            model = build(wide)
        state, narrow = model.state_dict(), parent.state_dict()
        for name, axes in layout_of(parent, model).items():
            fill(state[name], narrow[name], axes)
        return Grown(model=model)


@torch.no_grad()
def fill(wide: Tensor, narrow: Tensor, axes: Axes) -> None:
    """Put the narrow tensor where the wide one begins; each of q, k, v where its part begins."""
    parts = [(wide, narrow)]
    if axes.packed:
        halves = narrow.split(axes.packed)
        parts = list(zip(wide.split([2 * len(half) for half in halves]), halves, strict=True))
    for part, block in parts:
        part[tuple(slice(size) for size in block.shape)].copy_(block)


@dataclass(frozen=True, kw_only=True)
class RandomTemplate(OneParent):
    name: ClassVar[str] = "random"
    summary: ClassVar[str] = "one narrow model, in a wide one that is otherwise random"

    def method(self) -> FilledBlock:
        return FilledBlock()
