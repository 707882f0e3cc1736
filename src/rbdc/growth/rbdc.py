"""RBDC itself: narrow models coupled in pairs and trained on, by any number of recursive steps.

A coupling can treat the trainings on its two sides in two ways. `restart` is the paper's: each
model is trained through its whole annealed schedule, the optimizer state is dropped, and the wide
model's schedule starts again with its warm-up. `carry` is ours: narrow models stay at their peak
learning rate, their optimizer moments are coupled by the rules of the weights, the wide model
continues after a short warm-up, and only the target anneals.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from rbdc.coupling import OffDiagonal, couple_moments, layout_of
from rbdc.data import derive_seed
from rbdc.errors import RecipeError
from rbdc.growth.protocol import BatchesName, Protocol, Setting, TransitionName, Trial
from rbdc.jobs.grow import GrowJob
from rbdc.jobs.job import Node
from rbdc.jobs.method import Grown, GrowthContext, Method, Parent, SavedForGrowth
from rbdc.jobs.train import TrainJob
from rbdc.models import ModelSpec, check_steps
from rbdc.models.coupled import couple_verified
from rbdc.plan import Plan, make_plan
from rbdc.settings import Extent


@dataclass(frozen=True, kw_only=True)
class Coupling(Method):
    """Block-diagonal coupling of two models of half the width (Eq. 1)."""

    name: ClassVar[str] = "coupling"
    transition: TransitionName
    off_diagonal: OffDiagonal = "zero"
    allow_inexact: bool = False

    @property
    def carries(self) -> bool:
        """Return whether the wide model gets the optimizer state, and its parents do not anneal."""
        return self.transition == "carry"

    @property
    def saved_for_growth(self) -> SavedForGrowth:  # type: ignore[override]
        """Name what the parents save: the optimizer state, where it is carried over."""
        return "optimizer" if self.carries else ""

    def grow(self, parents: Sequence[Parent], wide: ModelSpec, context: GrowthContext) -> Grown:
        """Couple the parents, and prove that the wide model is their mean."""
        first, second = (parent.model for parent in parents)
        options = {"seed": context.seed, "allow_inexact": self.allow_inexact}
        model, record = couple_verified(first, second, wide, self.off_diagonal, **options)
        optimizer = None
        if self.carries:
            left, right = (parent.saved_for_growth for parent in parents)
            assert left and right, "parents of a carrying coupling save their optimizer state"
            own = ("lr", "initial_lr")  # the rate is the wide model's own
            groups = [{k: v for k, v in one.items() if k not in own} for one in left[1]["groups"]]
            moments = couple_moments(left[0], right[0], layout_of(first, model))
            optimizer = moments, {**left[1], "groups": groups}
        return Grown(model=model, optimizer=optimizer, record=record)


@dataclass(frozen=True, kw_only=True)
class Rbdc(Protocol):
    """Train 2^S narrow models, couple them in pairs and train on, S times."""

    name: ClassVar[str] = "rbdc"
    summary: ClassVar[str] = "2^S narrow models, coupled in pairs and trained on, S times"
    words: ClassVar[str] = (
        "the number of steps; restart or carry; shared or separate batches; random for random "
        "off-diagonal blocks; r=RATIO; "
        "lr=FACTOR for narrow models' learning rate over that of twice their width"
    )
    example: ClassVar[str] = ":2:carry"
    steps: int = 1
    transition: tuple[TransitionName, ...] = ()
    """One for all couplings, or one per level from the leaves up; empty: the setting's."""
    off_diagonal: OffDiagonal = "zero"
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
        """Read one option, such as 2, carry or r=0.5."""
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

    def check(self, setting: Setting) -> None:
        """Refuse a model that cannot be halved so often."""
        check_steps(setting.model, self.steps)

    def plan(self, setting: Setting, budget: float | None) -> Plan:
        """Return the stages of the tree; a `budget` of None is said otherwise in `planning`."""
        return make_plan(
            setting.model,
            steps=self.steps,
            ratio=self.ratio if self.ratio is not None else setting.ratio,
            budget=budget,
            baseline_epochs=setting.baseline_epochs,
            warmup_epochs=setting.recipe.planned_warmup(len(setting.data.train)),
            images=len(setting.data.train),
            counter=setting.counter,
            batches=self.batches or setting.batches,
            **self.planning,
        )

    def trial(self, setting: Setting, budget: float | None, seed: int) -> Trial:
        """Return the jobs of the plan's stages: leaves from distinct seeds, couplings, target."""
        return self.tree(setting, self.plan(setting, budget), seed)

    def tree(self, setting: Setting, plan: Plan, seed: int) -> Trial:
        """Return the jobs of a plan, narrow models first."""
        setting = replace(setting, batches=plan.batches)
        couplings = self._couplings(setting, len(plan.stages) - 1)
        nodes: list[Node] = []
        narrower: list[TrainJob] = []
        for number, stage in enumerate(plan.stages):  # leaves first
            into = couplings[number - 1] if stage.parents else None
            out_of = couplings[number] if number < len(couplings) else None
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
                    starts.append(Node(name=f"coupling {name}", level=stage.level, job=initial))
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

    def _couplings(self, setting: Setting, steps: int) -> list[Coupling]:
        """Return the coupling of each level, from the leaves up."""
        names = self.transition or setting.transition
        if steps and len(names) not in (1, steps):
            raise RecipeError(
                f"{len(names)} transitions are given for {steps} couplings on the way to the "
                "target",
                "Give one for all, or one for each level, the leaves' first.",
            )
        return [
            Coupling(
                transition=name, off_diagonal=self.off_diagonal, allow_inexact=setting.allow_inexact
            )
            for name in (names * steps if len(names) == 1 else names[:steps])
        ]

    def _options(
        self, setting: Setting, level: int, epochs: float, into: Coupling | None
    ) -> dict[str, Any]:
        """Return the recipe of a level and the warm-up of a model coupled by `into`."""
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
