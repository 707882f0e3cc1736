"""Firefly as a protocol: the search, the scores of the candidates and the choice of the best."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from timm.layers import Attention
from torch import Tensor, nn

from rbdc.errors import ModelError, PlanError
from rbdc.growth.firefly.candidates import Enlarged
from rbdc.growth.protocol import OneParent
from rbdc.growth.units import units_of
from rbdc.jobs.method import Grown, GrowthContext, Parent
from rbdc.models import ModelSpec, build_empty, build_meta


@dataclass(frozen=True, kw_only=True)
class Firefly(OneParent):
    """Split units and add new ones between the layers of a block, and keep what helps most.

    Each group of units gets a split of every unit and as many new units as candidates. A short
    search trains them with everything else frozen. Each group then keeps those that lower the loss
    most, until it has doubled. In a residual stream every unit is split, without a search.

    The wide model computes its parent's function, except for what its candidates have learnt and
    the noise between the copies of a stream. Batch norms of new units are the identity until
    training gives them statistics.
    """

    name: ClassVar[str] = "firefly"
    summary: ClassVar[str] = "one narrow model; its units split, or new ones, whichever help most"
    search: ClassVar[float] = 0.01
    surplus: float = 2.0
    """Candidates per unit that is added: a split of every unit, the rest new units."""
    radius: float = 0.1
    """Largest norm of a candidate, relative to the norm of existing units."""
    rate: float = 0.1
    """Approximate distance that one step moves a candidate, relative to its radius."""
    noise: float = 1e-2
    """Difference of a stream unit's two copies from the original, relative to its norm."""

    def __post_init__(self) -> None:
        """Refuse a surplus that is too small to double the width."""
        if self.surplus < 1:
            raise PlanError(
                f"firefly has {self.surplus:g} candidates for each that it keeps",
                "Give it a surplus of 1 or more.",
            )

    @property
    def cost(self) -> float:  # type: ignore[override]
        """Return the FLOPs of the search per image, relative to training the wide model.

        Groups are (1 + surplus) / 2 times as large as the wide model's. A layer with such a group
        on one side costs as many times more; with groups on both sides (the middle of a
        bottleneck), the square of that. Counted over whole models it is 1.41 (ResNet-18), 1.49
        (DeiT) and 1.77 (ResNet-50D): all pay the same, a little more than the most expensive.
        """
        return float(((1 + self.surplus) / 2) ** 1.5)

    def check_model(self, wide: ModelSpec) -> None:
        """Refuse a model with layers that cannot take more channels or heads than it has."""
        norms = {name for inner in units_of(wide.scaled(0.5)).inner if (name := inner.norm)}
        for name, module in build_meta(wide).named_modules():
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
        """Train candidates on the context's batches, and keep the best."""
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
    """Train the candidates; return the scores of each group, and the losses.

    A score is the first-order decrease of the loss by a candidate: minus the slope of the loss
    along its gate, averaged over the second half of the search. It is signed, as in the authors'
    code: candidates that would raise the loss come last.
    """
    groups, balls = enlarged.candidates, enlarged.balls
    gates = [candidates.gates for candidates in groups.values()]
    learning = [each.vectors for each in balls]
    optimizer = torch.optim.Adam(
        [{"params": [each.vectors], "lr": rate * each.step_size} for each in balls],
        eps=1e-16,  # the gradient of a split is of second order and may be tiny
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
            slopes.popleft()  # leaves the second half, without knowing how many batches come
    assert slopes, "a search has batches"
    scores = -torch.stack([*slopes]).mean(0)
    parts = scores.split([len(gate) for gate in gates])
    return dict(zip(groups, parts, strict=True)), [float(loss) for loss in losses]


def best(scores: Tensor, count: int) -> Tensor:
    """Return a mask of the `count` candidates with the highest scores."""
    chosen = torch.zeros(len(scores), dtype=torch.bool)
    chosen[scores.argsort(descending=True, stable=True)[:count]] = True
    return chosen
