"""Random template: one trained parent inside a wide model that is otherwise random."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rbdc.coupling import Axes, layout_of
from rbdc.data import derive_seed
from rbdc.growth.protocol import OneParent
from rbdc.jobs.method import Grown, GrowthContext, Parent
from rbdc.models import ModelSpec, build, halves_layout


@dataclass(frozen=True, kw_only=True)
class RandomTemplate(OneParent):
    """Put the parent into the first half of every scaled axis, norm statistics included.

    The rest has the architecture's own initialisation. Tensors without a scaled axis are the
    parent's. In MixtureGrowth's terms, the second member is never trained.
    """

    name: ClassVar[str] = "random"
    summary: ClassVar[str] = "one narrow model, in a wide one that is otherwise random"

    def check_model(self, wide: ModelSpec) -> None:
        """Refuse a model whose tensors have no known halves."""
        halves_layout(wide)

    def grow(self, parents: Sequence[Parent], wide: ModelSpec, context: GrowthContext) -> Grown:
        """Return a fresh wide model, drawn from the seed, with the parent's block filled in."""
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
    """Copy `narrow` into the first parent's blocks of `wide`; packed matrices have several."""
    for own, block in axes.blocks(narrow.shape, 0):
        wide[block] = narrow[own]
