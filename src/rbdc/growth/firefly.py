"""Firefly (Wu et al., 2020): try more new units than are wanted, for a while, and keep the best."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from timm.layers import Attention
from torch import Tensor, nn

from rbdc.errors import ModelError, PlanError
from rbdc.growth.candidates import Enlarged
from rbdc.growth.protocol import OneParent
from rbdc.growth.units import units_of
from rbdc.jobs.method import Grown, GrowthContext, Method, Parent
from rbdc.models import ModelSpec, build_empty, build_meta


@dataclass(frozen=True, kw_only=True)
class Search(Method):
    """Between the layers of a block every unit is tried split, and as many new ones beside it; a
    short search teaches these candidates, all else frozen; each group keeps those that lower the
    loss most, until it has doubled. A residual stream's units are all split, and learn nothing yet.

    The wide model is its parent's function, but for what its candidates have learnt and the noise
    between the copies of a stream. New units' batch norms are the identity, until training gives
    them statistics.
    """

    name: ClassVar[str] = "firefly"
    surplus: float = 2.0
    """Candidates for each that is kept: a split of every unit, the rest new ones."""
    radius: float = 0.1
    """How far a candidate may go, relative to the norm of the units that are there."""
    rate: float = 0.1
    """How far a step moves a candidate, about, relative to its radius."""
    noise: float = 1e-2
    """How much the two copies of a stream's unit differ from the parent's, relative to its norm."""

    def __post_init__(self) -> None:
        if self.surplus < 1:
            raise PlanError(
                f"firefly has {self.surplus:g} candidates for each that it keeps",
                "Give it a surplus of 1 or more.",
            )

    @property
    def cost(self) -> float:  # type: ignore[override]
        """Groups are (1 + surplus) / 2 as large as the wide model's, and so is what a layer with a
        group on one side costs; with groups on both, the middle of a bottleneck, it is the square.
        Counted over whole models, 1.41 (ResNet-18), 1.49 (DeiT) and 1.77 (ResNet-50D): all pay
        the same, a little more than the dearest."""
        return float(((1 + self.surplus) / 2) ** 1.5)

    def check(self, narrow: ModelSpec, wide: ModelSpec) -> None:
        units, model = units_of(narrow), build_meta(wide)
        norms = {name for inner in units.inner if (name := inner.norm)}
        for name, module in model.named_modules():
            if name in norms and not isinstance(module, nn.BatchNorm2d):
                trouble = "normalises several channels together"
            elif module._non_persistent_buffers_set:
                trouble = "has filters for a fixed number of channels"
            elif isinstance(module, Attention) and not hasattr(module, "attn_dim"):
                trouble = "takes as many heads as its input is wide: this timm is too old"
            else:
                continue
            raise ModelError(
                f"{wide} has {name}, which {trouble}",
                "Firefly tries more channels and heads than it keeps; other protocols do not.",
            )

    def grow(self, parents: Sequence[Parent], wide: ModelSpec, context: GrowthContext) -> Grown:
        (parent,) = (parent.model for parent in parents)
        enlarged = Enlarged(
            parent,
            wide,
            units_of(wide.scaled(0.5)),
            surplus=self.surplus,
            radius=self.radius,
            noise=self.noise,
            seed=context.seed,
            device=context.device,
        )
        sizes = {name: each.splits for name, each in enlarged.candidates.items()}
        scores, losses = search(enlarged, context, self.rate)
        chosen = {name: best(scores[name], n) for name, n in sizes.items()}
        model = build_empty(wide)
        model.load_state_dict(enlarged.restricted(chosen))
        splits = sum(int(chosen[name][:n].sum()) for name, n in sizes.items())
        record = {
            "search_losses": [losses[0], losses[-1]],
            "kept_splits": splits / sum(sizes.values()),
        }
        return Grown(model=model, record=record)


def search(
    enlarged: Enlarged, context: GrowthContext, rate: float
) -> tuple[dict[str, Tensor], list[float]]:
    """Teach the candidates; how much each of them lowers the loss, to first order; the losses.

    A score is the slope of the loss along a candidate's gate, downwards, as it is in the second
    half of the search. Signed, as in the authors' code: what would raise the loss is kept last.
    """
    groups, balls = enlarged.candidates, enlarged.balls
    gates = [candidates.gates for candidates in groups.values()]
    learning = [each.vectors for each in balls]
    optimizer = torch.optim.Adam(
        [{"params": [each.vectors], "lr": rate * each.step_size} for each in balls],
        eps=1e-16,  # the gradient of a split is of second order: it may be tiny
    )
    slopes: deque[Tensor] = deque()
    losses = []
    for number, batch in enumerate(context.batches(), start=1):
        loss = context.loss(enlarged, batch)
        gradients = torch.autograd.grad(loss, [*learning, *gates])
        for vectors, gradient in zip(learning, gradients, strict=False):
            vectors.grad = gradient
        optimizer.step()
        for each in balls:
            each.project()
        losses.append(loss.detach())
        slopes.append(torch.cat(gradients[len(learning) :]).cpu())
        if number % 2 == 0:
            slopes.popleft()  # so that the second half is left, however many there will be
    assert slopes, "a search has batches"
    scores = -torch.stack([*slopes]).mean(0)
    parts = scores.split([len(gate) for gate in gates])
    return dict(zip(groups, parts, strict=True)), [float(loss) for loss in losses]


def best(scores: Tensor, count: int) -> Tensor:
    """Which candidates are kept: so many, those of the highest scores."""
    chosen = torch.zeros(len(scores), dtype=torch.bool)
    chosen[scores.argsort(descending=True, stable=True)[:count]] = True
    return chosen


@dataclass(frozen=True, kw_only=True)
class Firefly(OneParent):
    name: ClassVar[str] = "firefly"
    summary: ClassVar[str] = "one narrow model; its units split, or new ones, whichever help most"
    search: ClassVar[float] = 0.01

    def method(self) -> Search:
        return Search()
