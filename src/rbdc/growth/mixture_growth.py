"""MixtureGrowth (Pham et al., WACV 2024): new blocks are new mixtures of trained templates.

Two narrow members train as mixtures of templates, each with a set of its own: W = sum_k c_k T_k.
The wide layer is [[m0, m2], [m3, m1]]: the members m0 and m1 on the diagonal, and new mixtures of
set 0 (m2) and set 1 (m3) beside them. Two differences from the authors' code: they draw templates
too small (Kaiming's fan over the whole set), and sum the members' logits. Here templates have their
layer's scale, and logits are averaged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.nn.utils.parametrize import register_parametrization

from rbdc.coupling import couple, couple_tensor, layout_of
from rbdc.coupling.layout import heads_of
from rbdc.growth.protocol import MEMBER_EPOCHS, WIDE_EPOCHS, Protocol, Setting, Trial
from rbdc.jobs.grow import GrowJob
from rbdc.jobs.method import NOT_IN_KEY, Grown, GrowthContext, Method, Parent, SavedForGrowth
from rbdc.models import ModelSpec, build_empty, halves_layout, spec_of
from rbdc.models.build import PARAMETRIZATIONS
from rbdc.settings import Recipe
from rbdc.training.task import Parametrization

GROWN_LR = 0.04
"""Learning rate of the wide model, relative to the recipe's: 0.004 of 0.1 on ImageNet."""


@dataclass(frozen=True, kw_only=True)
class MixtureGrowth(Protocol, Method):
    """Train two members as mixtures, put them on the diagonal and new mixtures beside them."""

    name: ClassVar[str] = "mixture-growth"
    summary: ClassVar[str] = "two narrow models of templates; what is new in the wide mixes them"
    words: ClassVar[str] = "ratio: equal members and a full schedule for the wide model"
    example: ClassVar[str] = ":ratio"
    saved_for_growth: ClassVar[SavedForGrowth] = "model"
    templates: int = 2
    """Templates per weight."""
    head: Literal["mean", "sum"] = "mean"
    """How the members' logits are combined: the authors sum them; a mean preserves their scale."""
    ratio: bool = field(default=False, metadata=NOT_IN_KEY)
    """Use the setting's ratio of epochs and the whole recipe, not the published schedule."""

    @classmethod
    def option(cls, word: str) -> tuple[str, Any]:
        """Read the only option: take the setting's ratio."""
        if word != "ratio":
            raise ValueError(word)
        return "ratio", True

    def trial(self, setting: Setting, budget: float, seed: int) -> Trial:
        """Return the members' trainings, the growth and the wide model's training."""
        setting = replace(setting, batches="separate")  # as in its authors' code
        shares = (1.0, 1.0, setting.ratio) if self.ratio else (*MEMBER_EPOCHS, WIDE_EPOCHS)
        narrow, wide = setting.forward_flops(0.5), setting.forward_flops()
        cost = narrow * (shares[0] + shares[1]) + wide * shares[2]
        epochs = [share * budget * setting.baseline_cost / cost for share in shares]
        members = {
            f"1.{index}": setting.training(
                f"1.{index}",
                seed,
                own,
                model=setting.narrow,
                # a shorter second member truncates the first's schedule
                schedule_epochs=epochs[0] if own < epochs[0] else None,
                parametrization=Templates(count=self.templates),
                saved_for_growth=self.saved_for_growth,
            )
            for index, own in enumerate(epochs[:2])
        }
        grown = GrowJob(model=setting.model, parents=tuple(members.values()), method=self)
        recipe = setting.recipe if self.ratio else published_recipe(setting.recipe)
        target = setting.training("target", seed, epochs[2], recipe=recipe, initial=grown)
        return Trial.of({**members, f"{self.name} target": grown, "target": target})

    def grow(self, parents: Sequence[Parent], wide: ModelSpec, context: GrowthContext) -> Grown:  # noqa: ARG002
        """Couple the members, then fill the off-diagonal blocks of layers that have templates."""
        first, second = (parent.model for parent in parents)
        model = couple(first, second, into=build_empty(wide), allow_inexact=True)
        layout, state = layout_of(first, model), model.state_dict()
        sets = [mixtures_of(saved[0]) for parent in parents if (saved := parent.saved_for_growth)]
        assert len(sets) == 2, "members save their templates"
        for name, zeroth in sets[0].items():
            axes = layout[name]
            assert axes.input_axis is not None, f"{name} is no layer's weight"
            diagonal = couple_tensor(*new_blocks(zeroth, sets[1][name]), axes)
            # [[m2, 0], [0, m3]] with the halves of its columns exchanged: there the coupling is 0
            columns = axes.scaled.index(axes.input_axis)
            sizes = axes.parts(first.state_dict()[name].shape)[columns]
            state[name] += torch.cat(
                [
                    part.roll(part.shape[axes.input_axis] // 2, axes.input_axis)
                    for part in diagonal.split([2 * size for size in sizes], axes.input_axis)
                ],
                axes.input_axis,
            )
        if self.head == "sum":
            for name in heads_of(model):
                for tensor in model.get_submodule(name).state_dict().values():
                    tensor *= 2
        return Grown(model=model)


def published_recipe(recipe: Recipe) -> Recipe:
    """Return the published recipe of the wide model: a cosine from a small rate, no warm-up."""
    return replace(
        recipe,
        sched="cosine",
        lr=GROWN_LR * recipe.learning_rate,
        min_lr=GROWN_LR * recipe.min_lr,
        warmup_lr=GROWN_LR * recipe.warmup_lr,
        warmup_epochs=0.0,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """A weight in its parts."""

    templates: tuple[Tensor, ...]
    coefficients: Tensor
    rows: Tensor
    """An orthogonal matrix; the coefficients started as its first row."""

    def weight(self, coefficients: Tensor | None = None) -> Tensor:
        """Return the mixture by its own coefficients, or by others."""
        return _mix(self.coefficients if coefficients is None else coefficients, self.templates)


def new_blocks(first: Mixture, second: Mixture) -> tuple[Tensor, Tensor]:
    """Return m2, of the first member's templates, and m3, of the second's.

    m2's coefficients were drawn with its member's, orthogonal to them, and never trained. m3's are
    the unit vector farthest from the other three by squared cosines: orthogonal to them if there
    are four templates or more.
    """
    others = torch.stack([first.coefficients, second.coefficients, first.rows[1]])
    farthest = torch.linalg.svd(normalize(others, dim=1)).Vh[-1]
    return first.weight(first.rows[1]), second.weight(farthest)


def mixtures_of(state: Mapping[str, Tensor]) -> dict[str, Mixture]:
    """Return the mixtures in a model's state, by the names of their weights in the plain model."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in state.items():
        if PARAMETRIZATIONS in key:
            path, _, rest = key.partition(PARAMETRIZATIONS)
            attribute, _, part = rest.partition(".")
            found.setdefault(f"{path}.{attribute}", {})[part] = tensor
    return {
        name: Mixture(
            templates=tuple(parts[f"original{k}"] for k in range(len(parts["0.rows"]))),
            coefficients=parts["0.coefficients"],
            rows=parts["0.rows"],
        )
        for name, parts in found.items()
    }


@dataclass(frozen=True, kw_only=True)
class Templates(Parametrization):
    """Make each weight a mixture of `count` templates with a trainable coefficient each.

    Only layers whose inputs and outputs both scale with the width have templates: all but the first
    convolution or patch embedding, and the heads. Templates are drawn Kaiming-normal; coefficients
    have no weight decay.
    """

    name: ClassVar[str] = "templates"

    def apply(self, model: nn.Module) -> nn.Module:
        """Replace the weights of a plain model by mixtures of new templates, in place."""
        assert self.count > 1, "growth needs a second row of coefficients"
        for name, axes in halves_layout(spec_of(model).scaled(2)).items():
            if axes.input_axis is not None and len(axes.scaled) == 2:
                path, _, attribute = name.rpartition(".")
                register_parametrization(model.get_submodule(path), attribute, _Mix(self.count))
        owner: Any = model
        free = {name for name, _ in model.named_parameters() if name.endswith(".0.coefficients")}
        free |= set(owner.no_weight_decay()) if hasattr(model, "no_weight_decay") else set()
        owner.no_weight_decay = lambda: free  # for timm: not every recipe excludes all vectors
        return model


class _Mix(nn.Module):
    """torch's parametrization of a weight as a mixture."""

    rows: Tensor

    def __init__(self, count: int) -> None:
        super().__init__()
        self.register_buffer("rows", nn.init.orthogonal_(torch.empty(count, count)))
        self.coefficients = nn.Parameter(self.rows[0].clone())

    def forward(self, *templates: Tensor) -> Tensor:
        return _mix(self.coefficients, templates)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, ...]:
        """Return new templates. torch asks for parts of `weight`, whose values are not used."""
        return tuple(nn.init.kaiming_normal_(torch.empty_like(weight)) for _ in self.rows)


def _mix(coefficients: Tensor, templates: Sequence[Tensor]) -> Tensor:
    terms = (c * t for c, t in zip(coefficients, templates, strict=True))
    mixed: Tensor = reduce(torch.add, terms)
    return mixed
