"""RBDC itself: narrow models coupled in pairs and trained on, by any number of recursive steps.

A transition can treat the trainings on its two sides in two ways. `restart` is the paper's: each
model is trained through its whole annealed schedule, the optimizer state is dropped, and the wide
model's schedule starts again with its warm-up. `carry` is ours: narrow models stay at their peak
learning rate, their optimizer moments are coupled by the rules of the weights, the wide model
continues after a short warm-up, and only the target anneals.

Stages may also grow in depth and in resolution: first two models are coupled, then blocks that
start as the identity are inserted, then the model is resampled for larger images.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any, ClassVar, get_args

import torch
from torch import nn

from rbdc.coupling import OffDiagonal, couple_moments
from rbdc.data import derive_seed
from rbdc.errors import RecipeError
from rbdc.growth.protocol import BatchesName, Protocol, Setting, TransitionName, Trial
from rbdc.jobs.grow import GrowJob
from rbdc.jobs.job import Node
from rbdc.jobs.method import Grown, GrowthContext, Method, Parent, SavedForGrowth, State
from rbdc.jobs.train import TrainJob
from rbdc.models import ModelSpec, NewBlocks, build, extend, halves_layout, spec_of
from rbdc.models.coupled import couple_verified
from rbdc.plan import Growth, Plan, make_plan
from rbdc.settings import Axis, Extent
from rbdc.training import images_for
from rbdc.training.optimizer import GROUP
from rbdc.training.teacher import check_images


@dataclass(frozen=True, kw_only=True)
class Transition(Method):
    """What happens between two stages."""

    transition: TransitionName
    new_blocks: NewBlocks = "identity"
    """What inserted blocks start as."""

    @property
    def carries(self) -> bool:
        """Return whether the next stage gets the optimizer state, and this one does not anneal."""
        return self.transition == "carry"

    @property
    def saved_for_growth(self) -> SavedForGrowth:  # type: ignore[override]
        """Name what the parents save: the optimizer state, where it is carried over."""
        return "optimizer" if self.carries else ""

    def extended(
        self,
        model: nn.Module,
        moments: State | None,
        spec: ModelSpec,
        seed: int,
        record: Mapping[str, Any],
    ) -> Grown:
        """Return the model at the depth and resolution of the next stage, with its moments."""
        if spec_of(model) != spec:
            found = extend(model, spec, seed=seed, blocks=self.new_blocks)
            model = found.model
            if found.error is not None:
                error = max(found.error, record.get("proof_error", 0.0))
                record = {**record, "proof_error": error}
            if moments:
                tensors, facts = moments
                numbers = _renamed(facts["numbers"], found.origin)
                moments = _renamed(tensors, found.origin), {**facts, "numbers": numbers}
        if moments:
            tensors, facts = moments
            own = ("lr", "initial_lr")  # the rate is the next stage's own
            groups = [{k: v for k, v in one.items() if k not in own} for one in facts["groups"]]
            moments = tensors, {**facts, "groups": groups}
        return Grown(model=model, optimizer=moments, record=record)


def _renamed(state: Mapping[str, Any], origin: Mapping[str, str]) -> dict[str, Any]:
    """Return the state of tensors that have a past, by their new names; a group's state stays."""
    names: dict[str, list[str]] = {}
    for new, old in origin.items():
        names.setdefault(old, []).append(new)
    found: dict[str, Any] = {}
    for key, value in state.items():
        parameter, _, slot = key.rpartition("/")
        if parameter.startswith(GROUP):
            found[key] = value
        found |= {f"{new}/{slot}": deepcopy(value) for new in names.get(parameter, ())}
    return found


@dataclass(frozen=True, kw_only=True)
class Coupling(Transition):
    """Block-diagonal coupling of two models of half the width (Eq. 1), then growth in depth."""

    name: ClassVar[str] = "coupling"
    off_diagonal: OffDiagonal = "zero"
    allow_inexact: bool = False

    def grow(self, parents: Sequence[Parent], wide: ModelSpec, context: GrowthContext) -> Grown:
        """Couple the parents, and prove that the wide model is their mean."""
        first, second = (parent.model for parent in parents)
        options = {"seed": context.seed, "allow_inexact": self.allow_inexact}
        coupled = spec_of(first).scaled(2)
        model, record = couple_verified(first, second, coupled, self.off_diagonal, **options)
        moments = None
        if self.carries:
            left, right = (parent.saved_for_growth for parent in parents)
            assert left and right, "parents of a carrying coupling save their optimizer state"
            moments = couple_moments(left[0], right[0], halves_layout(coupled)), left[1]
        return self.extended(model, moments, wide, context.seed, record)


@dataclass(frozen=True, kw_only=True)
class Extension(Transition):
    """Growth of one model in depth and resolution."""

    name: ClassVar[str] = "extension"

    def grow(self, parents: Sequence[Parent], wide: ModelSpec, context: GrowthContext) -> Grown:
        """Insert blocks and resample for the image size; prove that new blocks change nothing."""
        (parent,) = parents
        return self.extended(parent.model, parent.saved_for_growth, wide, context.seed, {})


@cache
def _check_extension(before: ModelSpec, after: ModelSpec, blocks: NewBlocks) -> None:
    """Refuse growth in depth or in resolution that would fail, by growing an untrained model."""
    with torch.random.fork_rng(devices=[]):
        extend(build(before), after, seed=0, blocks=blocks)


@dataclass(frozen=True, kw_only=True)
class Rbdc(Protocol):
    """Train 2^S narrow models, couple them in pairs and train on, S times."""

    name: ClassVar[str] = "rbdc"
    summary: ClassVar[str] = "2^S narrow models, coupled in pairs and trained on, S times"
    words: ClassVar[str] = (
        "the number of steps; what grows: width, width+depth, width+depth+resolution, ...; restart "
        "or carry; shared or separate batches; random for random off-diagonal blocks; r=RATIO; "
        "lr=FACTOR for narrow models' learning rate over that of twice their width"
    )
    example: ClassVar[str] = ":2:carry"
    steps: int = 1
    transition: tuple[TransitionName, ...] = ()
    """One for all couplings, or one per level from the leaves up; empty: the setting's."""
    off_diagonal: OffDiagonal = "zero"
    axes: tuple[Axis, ...] | None = None
    """What grows from stage to stage; None: the setting's."""
    new_blocks: ClassVar[NewBlocks] = "identity"
    ratio: float | None = None
    """Epochs of a wide model over its parents'; None: the setting's."""
    batches: BatchesName | None = None
    """Whether the models of a level train on the same batches; None: the setting's."""
    narrow_lr: float | None = None
    """Learning rate of a level over that of the next wider one; None: the setting's."""
    planning: Mapping[str, Any] = field(default_factory=lambda: {"rounding": "none"})
    """Further arguments of `make_plan`. Protocols are compared at equal FLOPs, so epochs are not
    rounded to whole ones there."""

    @classmethod
    def option(cls, word: str) -> tuple[str, Any]:
        """Read one option, such as 2, width+depth, carry or r=0.5."""
        axes = tuple(word.split("+"))
        if {*axes} <= {*get_args(Axis)}:
            return "axes", axes
        if word in ("restart", "carry"):
            return "transition", (word,)
        if word in ("shared", "separate"):
            return "batches", word
        if word == "random":
            return "off_diagonal", word
        if word.isdigit():
            return "steps", int(word)
        name, _, number = word.partition("=")
        return {"r": "ratio", "lr": "narrow_lr"}[name], float(number)

    def growth(self, setting: Setting) -> Growth:
        """Return what grows from stage to stage."""
        return replace(setting.growth, axes=self.axes, stages=()) if self.axes else setting.growth

    def check(self, setting: Setting) -> None:
        """Refuse a model that cannot be grown so often, or a teacher that low resolutions break."""
        levels = self.growth(setting).levels(setting.model, self.steps)
        for model in levels if setting.teacher else ():
            assert setting.teacher
            check_images(setting.teacher.model, images_for(model, setting.image))
        for wide, narrow in pairwise(levels):
            after = wide.scaled(narrow.width / wide.width)
            if after != narrow:
                _check_extension(narrow, after, self.new_blocks)

    def plan(self, setting: Setting, budget: float | None, **options: Any) -> Plan:
        """Return the stages of the tree; a `budget` of None is said otherwise in `planning`."""
        return make_plan(
            setting.model,
            steps=self.steps,
            growth=self.growth(setting),
            ratio=self.ratio if self.ratio is not None else setting.ratio,
            budget=budget,
            baseline_epochs=setting.baseline_epochs,
            warmup_epochs=setting.recipe.planned_warmup(len(setting.data.train)),
            images=len(setting.data.train),
            counter=setting.counter,
            batches=self.batches or setting.batches,
            **self.planning,
            **options,
        )

    def trial(self, setting: Setting, budget: float | None, seed: int) -> Trial:
        """Return the jobs of the plan's stages: leaves from distinct seeds, couplings, target."""
        return self.tree(setting, self.plan(setting, budget), seed)

    def tree(self, setting: Setting, plan: Plan, seed: int) -> Trial:
        """Return the jobs of a plan, narrow models first."""
        setting = replace(setting, batches=plan.batches)
        transitions = self._transitions(setting, plan)
        nodes: list[Node] = []
        narrower: list[TrainJob] = []
        for number, stage in enumerate(plan.stages):  # leaves first
            into = transitions[number - 1] if stage.parents else None
            out_of = transitions[number] if number < len(transitions) else None
            own = self._options(setting, stage.level, stage.epochs, into)
            starts: list[Node] = []
            trained: list[Node] = []
            for index in range(stage.models):
                name = f"{stage.level}.{index}" if stage.level else "target"
                initial = None
                if into is not None:
                    initial = GrowJob(
                        model=stage.model,
                        parents=tuple(narrower[stage.parents * index :][: stage.parents]),
                        method=into,
                        seed=derive_seed(seed, "coupling", stage.level, index),
                    )
                    starts.append(Node(name=f"{into.name} {name}", level=stage.level, job=initial))
                job = setting.training(
                    name,
                    seed,
                    stage.epochs,
                    model=stage.model,
                    anneal=out_of is None or not out_of.carries,
                    initial=initial,
                    saved_for_growth=out_of.saved_for_growth if out_of else "",
                    siblings=stage.models,
                    **own,
                )
                trained.append(Node(name=name, level=stage.level, job=job))
            nodes += [*starts, *trained]
            narrower = [node.job for node in trained if isinstance(node.job, TrainJob)]
        return Trial(nodes=tuple(nodes), plan=plan)

    def _transitions(self, setting: Setting, plan: Plan) -> list[Transition]:
        """Return what happens between the stages, from the leaves up."""
        names, grown = self.transition or setting.transition, plan.stages[1:]
        if grown and len(names) not in (1, len(grown)):
            raise RecipeError(
                f"{len(names)} transitions are given for {len(grown)} between the stages of the "
                "plan",
                "Give one for all, or one for each level, the leaves' first.",
            )
        return [
            Coupling(
                transition=name,
                new_blocks=self.new_blocks,
                off_diagonal=self.off_diagonal,
                allow_inexact=setting.allow_inexact,
            )
            if "width" in stage.grown
            else Extension(transition=name, new_blocks=self.new_blocks)
            for name, stage in zip(names * len(grown), grown, strict=False)
        ]

    def _options(
        self, setting: Setting, level: int, epochs: float, into: Transition | None
    ) -> dict[str, Any]:
        """Return the recipe of a level and the warm-up of a model grown by `into`."""
        recipe = setting.recipe
        factor = self.narrow_lr if self.narrow_lr is not None else setting.narrow_lr
        rate = recipe.learning_rate * factor**level
        warmup = recipe.warmup_epochs
        if into is not None and into.carries:
            extent = Extent(
                steps_per_epoch=setting.steps_per_epoch,
                batch_size=recipe.batch_size,
                total=round(epochs * setting.steps_per_epoch),
            )
            warmup = extent.shorter(warmup, setting.carry_warmup_epochs)
        own = replace(recipe, lr=rate) if rate != recipe.learning_rate else recipe
        return {"recipe": own, "warmup_epochs": warmup}
