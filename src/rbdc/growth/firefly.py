"""Firefly (Wu et al., NeurIPS 2020): train a surplus of new units briefly, and keep the best.

Between two layers, a group of n units gets n splits and some new units as candidates. A split
replaces a unit w by w + v and w - v, and halves its outgoing weights; a new unit has small incoming
and outgoing weights. A gate of 1 leaves a candidate as it is; a gate of 0 undoes it (w twice, or
nothing). So a model whose gates are all 0 or 1 equals a smaller one without the undone candidates.

In a residual stream every unit is split: many layers share it, so there is no choice.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from timm.layers import Attention
from torch import Tensor, nn
from torch.func import functional_call

from rbdc.data.randomness import generator
from rbdc.errors import ModelError, PlanError
from rbdc.growth.protocol import OneParent
from rbdc.growth.units import Inner, along, check_plain, units_of
from rbdc.jobs.method import Grown, GrowthContext, Parent
from rbdc.models import ModelSpec, build_empty, build_meta
from rbdc.settings import Duration

START = 0.5
"""Initial norm of a candidate, relative to its radius. With much less, w + v and w - v are on the
same side of a ReLU's kink for every image, and the split has no effect and no gradient."""


@dataclass(frozen=True, kw_only=True)
class Firefly(OneParent):
    """Split units and add new ones between the layers of a block, and keep what helps most.

    A short search trains the candidates with everything else frozen. Each group then keeps those
    that lower the loss most, until it has doubled.

    The wide model computes its parent's function, except for what its candidates have learnt and
    the noise between the copies of a stream. Batch norms of new units are the identity until
    training gives them statistics.
    """

    name: ClassVar[str] = "firefly"
    summary: ClassVar[str] = "one narrow model; its units split, or new ones, whichever help most"
    search: ClassVar[Duration] = Duration(1, "%")
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
        check_plain(wide.scaled(0.5), "Firefly")
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
        enlarged = Enlarged(self, parents[0].model, wide, context)
        sizes = {name: each.splits for name, each in enlarged.candidates.items()}
        scores, losses = search(enlarged, context, self.rate)
        chosen = {name: best(scores[name], n) for name, n in sizes.items()}
        model = build_empty(wide)
        model.load_state_dict(enlarged.restricted(chosen))
        splits = sum(int(chosen[name][:n].sum()) for name, n in sizes.items())
        kept = splits / sum(sizes.values())
        record = {"search_losses": [losses[0], losses[-1]], "kept_splits": kept}
        return Grown(model=model, record=record)


@dataclass(frozen=True, kw_only=True, slots=True)
class Balls:
    """One trainable vector per unit, each within a ball of its own radius."""

    vectors: Tensor
    unit: int
    """The axis of the units; the other axes are those of a vector."""
    radii: Tensor

    @property
    def step_size(self) -> float:
        """Return the step per element that moves a vector by about its radius."""
        return float(self.radii.mean() / (self.vectors.numel() / len(self.radii)) ** 0.5)

    def gated(self, gates: Tensor) -> Tensor:
        """Return the vectors, each multiplied by its gate."""
        return self.vectors * along(gates, self.vectors, self.unit)

    @torch.no_grad()
    def project(self) -> None:
        """Scale vectors outside their balls back to the surface, in place."""
        norms = norms_of(self.vectors, self.unit).clamp_min(torch.finfo(torch.float32).tiny)
        self.vectors.mul_(along((self.radii / norms).clamp_max(1), self.vectors, self.unit))


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidates:
    """What may be added to one group of units."""

    split: Balls
    """The direction v in which each unit is split."""
    fresh_in: Balls
    """Incoming weights of new units."""
    fresh_out: Balls
    """Outgoing weights of new units."""
    gates: Tensor
    """Gates of the splits, then of the new units."""

    @property
    def splits(self) -> int:
        """Return the number of splits: one per unit of the group."""
        return len(self.split.radii)

    @property
    def fresh(self) -> int:
        """Return the number of new units."""
        return len(self.fresh_in.radii)


class Enlarged(nn.Module):
    """The parent with its streams doubled and all candidates added.

    It computes the parent's function, except for what the candidates change. Only candidates are
    trainable: the parent's tensors, norm statistics included, stay as they are.

    The norm of a split is at most `radius` times its unit's, that of a new unit at most `radius`
    times the mean of existing units, for incoming and outgoing weights. The incoming weights of
    the two copies of a stream unit are the parent's plus and minus a random vector of `noise` times
    their norm: equal copies would stay equal forever.
    """

    def __init__(
        self, method: Firefly, parent: nn.Module, wide: ModelSpec, context: GrowthContext
    ) -> None:
        """Draw the candidates from the context's seed and put all tensors on its device."""
        super().__init__()
        self.method, self.seed, self.units = method, context.seed, units_of(wide.scaled(0.5))
        self.parent = {k: tensor.to(context.device) for k, tensor in parent.state_dict().items()}
        self.candidates = {inner.group: self._candidates(inner) for inner in self.units.inner}
        self.apart = {}  # what separates the copies of a stream, by the weight that writes them
        for name, tensor in self.parent.items():
            if (group := self.units.written(name)) and group not in self.candidates:
                rows = self.units.by_unit(tensor, name, 0)
                lengths = method.noise * norms_of(rows, 1)
                self.apart[name] = random_vectors(rows, 1, lengths, self.seed, name)
        self.shell = self._shell(wide).eval()

    @property
    def balls(self) -> list[Balls]:
        """Return all trainable vectors; there may be no new units."""
        groups = self.candidates.values()
        all_balls = (ball for one in groups for ball in (one.split, one.fresh_in, one.fresh_out))
        return [ball for ball in all_balls if len(ball.radii)]

    def forward(self, images: Tensor) -> Any:
        """Return the output of the model with all candidates."""
        return functional_call(self.shell, self.enlarged(), (images,), strict=True)

    def enlarged(self) -> dict[str, Tensor]:
        """Return the state of the model with all candidates, multiplied by their gates."""
        return {name: self._enlarge(name, tensor) for name, tensor in self.parent.items()}

    @torch.no_grad()
    def restricted(self, chosen: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Set the gates to what is chosen; return the state without the other candidates."""
        for name, mask in chosen.items():
            self.candidates[name].gates.copy_(mask)
        state = self.enlarged()
        for name in state:
            for number, group in enumerate(self.units.axes[name]):
                if group is not None and group in chosen:
                    mask = chosen[group].to(state[name].device)
                    state[name] = self._restrict(state[name], name, number, mask)
        return state

    def _candidates(self, inner: Inner) -> Candidates:
        method, count = self.method, self.units.groups[inner.group].units
        fresh = round((method.surplus - 1) * count)
        rows, columns = (
            self.units.by_unit(self.parent[f"{path}.weight"], f"{path}.weight", axis)
            for axis, path in enumerate((inner.first, inner.second))
        )
        sizes, place = method.radius * norms_of(rows, 1), (self.seed, "candidates", inner.group)
        reaches = (method.radius * norms_of(columns, 2).mean()).expand(fresh)
        return Candidates(
            split=random_balls(rows, 1, sizes, *place, "split"),
            fresh_in=random_balls(rows, 1, sizes.mean().expand(fresh), *place, "in"),
            fresh_out=random_balls(columns, 2, reaches, *place, "out"),
            gates=rows.new_ones(count + fresh).requires_grad_(),
        )

    def _shell(self, wide: ModelSpec) -> nn.Module:
        """Return a model that takes the enlarged state.

        Layers read their sizes off their weights, except for attention's number of heads.
        """
        shell = build_meta(wide)
        for inner in self.units.inner:
            owner: Any = shell.get_submodule(inner.first.rpartition(".")[0])
            if isinstance(owner, Attention):
                candidates = self.candidates[inner.group]
                owner.num_heads = 2 * candidates.splits + candidates.fresh
                owner.attn_dim = owner.num_heads * owner.head_dim
        return shell

    def _enlarge(self, name: str, tensor: Tensor) -> Tensor:
        axes = self.units.axes[name]
        if self.units.layout[name].input_axis is None:
            fill = 1.0 if name.endswith(("weight", "running_var")) else 0.0  # an identity norm
            for number in range(len(axes)):
                tensor = self._copies(tensor, name, number, fill=fill)
            return tensor
        if written := self.candidates.get(axes[0] or ""):
            split = written.split.gated(written.gates[: written.splits])
            rows = self._copies(tensor, name, 0, split, written.fresh_in.vectors)
        else:
            rows = self._copies(tensor, name, 0, self.apart.get(name, 0.0))
        if axes[1] is None:
            return rows
        fresh = None
        if read := self.candidates.get(axes[1]):
            gated = read.fresh_out.gated(read.gates[read.splits :])
            fresh = self._copies(gated, name, 0)
        return self._copies(rows / 2, name, 1, 0.0, fresh)

    def _copies(
        self,
        tensor: Tensor,
        name: str,
        number: int,
        split: Tensor | float = 0.0,
        fresh: Tensor | None = None,
        fill: float = 0.0,
    ) -> Tensor:
        """Return every unit along an axis plus and minus `split`, followed by the new units."""
        group = self.units.axes[name][number]
        if group is None:
            return tensor
        units = self.units.by_unit(tensor, name, number)
        blocks = [units + split, units - split]
        if group in self.candidates:
            shape = list(units.shape)
            shape[number + 1] = self.candidates[group].fresh
            blocks.append(fresh if fresh is not None else units.new_full(shape, fill))
        return torch.cat(blocks, number + 1).flatten(number, number + 2)

    def _restrict(self, tensor: Tensor, name: str, number: int, chosen: Tensor) -> Tensor:
        """Drop second copies that equal the first, and new units that are not chosen."""
        units, axis = self.units.by_unit(tensor, name, number), number + 1
        count = units.shape[axis] - len(chosen)
        first, added = units.split((count, len(chosen)), axis)
        if number == self.units.layout[name].input_axis:  # add the halved columns of undone splits
            second = added.narrow(axis, 0, count)
            first = first + second * along(~chosen[:count], second, axis)
        kept = added.index_select(axis, chosen.nonzero()[:, 0])
        return torch.cat((first, kept), axis).flatten(number, number + 2)


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


def random_balls(like: Tensor, unit: int, radii: Tensor, *place: int | str) -> Balls:
    """Return a ball per radius, each with a random vector of START times the radius."""
    vectors = random_vectors(like, unit, START * radii, *place)
    return Balls(vectors=vectors.requires_grad_(), unit=unit, radii=radii)


def random_vectors(like: Tensor, unit: int, lengths: Tensor, *place: int | str) -> Tensor:
    """Return random vectors of these lengths, shaped like the units of a tensor."""
    shape = list(like.shape)
    shape[unit] = len(lengths)
    vectors = torch.randn(shape, generator=generator(*place)).to(like)
    return vectors * along(lengths / norms_of(vectors, unit), vectors, unit)


def norms_of(tensor: Tensor, unit: int) -> Tensor:
    """Return the norm of each unit along an axis."""
    norms: Tensor = tensor.movedim(unit, 0).flatten(1).norm(dim=1)
    return norms
