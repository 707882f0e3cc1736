"""MixtureGrowth (Pham et al., WACV 2024): new blocks are new mixtures of trained templates.

Two narrow members train as mixtures of templates, each of its own set: W = sum_k c_k T_k. The wide
layer is [[m0, m2], [m3, m1]]: the members on the diagonal; beside them set 0 and set 1 mixed by
new coefficients. The authors' code draws templates too small (Kaiming's fan taken over the whole
set) and sums the members' logits; here templates have their layer's scale, and logits are averaged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor
from torch.nn.functional import normalize

from rbdc.coupling import couple, couple_tensor, layout_of
from rbdc.coupling.layout import heads_of
from rbdc.errors import PlanError
from rbdc.growth.protocol import MEMBER_EPOCHS, WIDE_EPOCHS, Protocol, Setting, Trial
from rbdc.jobs.grow import GrowJob
from rbdc.jobs.job import Node
from rbdc.jobs.method import Grown, GrowthContext, Kept, Method, Parent
from rbdc.jobs.train import TrainJob
from rbdc.models import ModelSpec, build_empty, check_steps
from rbdc.models.templates import Mixed, mixtures_of
from rbdc.settings import Recipe

GROWN_RATE = 0.04  # of the recipe's learning rate, for the wide model: 0.004 of 0.1 on ImageNet


@dataclass(frozen=True, kw_only=True)
class Mixtures(Method):
    """Members on the diagonal, new mixtures of their templates beside it, the rest as coupled."""

    name: ClassVar[str] = "mixture-growth"
    parents: ClassVar[int] = 2
    keeps: ClassVar[Kept] = "templates"
    head: Literal["mean", "sum"] = "mean"
    """Of the members' logits: the sum is the authors'; a mean keeps their scale."""

    def grow(self, parents: Sequence[Parent], wide: ModelSpec, context: GrowthContext) -> Grown:  # noqa: ARG002
        first, second = (parent.model for parent in parents)
        model = couple(first, second, into=build_empty(wide), allow_inexact=True)
        layout, state = layout_of(first, model), model.state_dict()
        sets = [mixtures_of(_kept(parent)) for parent in parents]
        for name, zeroth in sets[0].items():
            axes = layout[name]
            assert axes.input_axis is not None, f"{name} is no layer's weight"
            diagonal = couple_tensor(*new_blocks(zeroth, sets[1][name]), axes)
            # [[m2, 0], [0, m3]], its columns' halves exchanged, falls where the coupling is zero
            state[name] += diagonal.roll(diagonal.shape[axes.input_axis] // 2, axes.input_axis)
        if self.head == "sum":
            for name in heads_of(model):
                for tensor in model.get_submodule(name).state_dict().values():
                    tensor *= 2
        return Grown(model=model)


def _kept(parent: Parent) -> Mapping[str, Tensor]:
    assert parent.kept, "members keep their templates"
    return parent.kept[0]


def new_blocks(first: Mixed, second: Mixed) -> tuple[Tensor, Tensor]:
    """m2, of the first member's templates, and m3, of the second's.

    m2's coefficients were drawn with its member's, orthogonal to them, and never trained. m3's are
    the unit vector farthest from the other three, by squared cosines: orthogonal to them where
    there are four templates or more.
    """
    others = torch.stack([first.coefficients, second.coefficients, first.rows[1]])
    farthest = torch.linalg.svd(normalize(others, dim=1)).Vh[-1]
    return first.weight(first.rows[1]), second.weight(farthest)


@dataclass(frozen=True, kw_only=True)
class MixtureGrowth(Protocol):
    name: ClassVar[str] = "mixture-growth"
    summary: ClassVar[str] = "two narrow models of templates; what is new in the wide mixes them"
    words: ClassVar[str] = "ratio: equal members and a full schedule for the wide model"
    templates: int = 2
    """Of each weight."""
    ratio: bool = False
    """The setting's ratio of epochs and the whole recipe, instead of the published schedule."""

    @classmethod
    def parse(cls, words: Sequence[str]) -> Self:
        if list(words) not in ([], ["ratio"]):
            raise PlanError(
                f"{cls.name} got {':'.join(words)}, expected {cls.words}", f"Say {cls.name}:ratio."
            )
        return cls(ratio=bool(words))

    def check(self, setting: Setting) -> None:
        check_steps(setting.model, 1)

    def trial(self, setting: Setting, budget: float, seed: int) -> Trial:
        shares = (1.0, 1.0, setting.ratio) if self.ratio else (*MEMBER_EPOCHS, WIDE_EPOCHS)
        narrow, wide = setting.forward_flops(0.5), setting.forward_flops()
        cost = narrow * (shares[0] + shares[1]) + wide * shares[2]
        epochs = [share * budget * setting.baseline_cost / cost for share in shares]
        members = self._members(setting, seed, epochs)
        method = Mixtures()
        grown = GrowJob(model=setting.model, parents=members, method=method)
        recipe = setting.recipe if self.ratio else gentle(setting.recipe)
        target = setting.training("target", seed, epochs[2], recipe=recipe, initial=grown)
        return Trial(
            nodes=(
                *(Node(name=f"1.{i}", level=1, job=member) for i, member in enumerate(members)),
                Node(name=f"{method.name} target", level=0, job=grown),
                Node(name="target", level=0, job=target),
            )
        )

    def _members(
        self, setting: Setting, seed: int, epochs: Sequence[float]
    ) -> tuple[TrainJob, TrainJob]:
        """The second follows the first's schedule, and may end before it does."""
        first, second = (
            setting.training(
                f"1.{index}",
                seed,
                epochs[index],
                model=setting.narrow,
                schedule_epochs=epochs[0] if epochs[index] < epochs[0] else None,
                templates=self.templates,
                keeps=Mixtures.keeps,
            )
            for index in (0, 1)
        )
        return first, second


def gentle(recipe: Recipe) -> Recipe:
    """The published training of the wide model: a cosine from a small rate, without warm-up."""
    return replace(
        recipe,
        sched="cosine",
        lr=GROWN_RATE * recipe.learning_rate,
        min_lr=GROWN_RATE * recipe.min_lr,
        warmup_lr=GROWN_RATE * recipe.warmup_lr,
        warmup_epochs=0.0,
    )
