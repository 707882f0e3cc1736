"""The interface of a protocol: one way to spend a training budget on a wide model.

Every protocol takes a setting, a budget and a seed, and returns jobs. The trainings of the narrow
models are among them: every protocol pays for its parents.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

from rbdc.data import DataSet, derive_seed
from rbdc.errors import PlanError
from rbdc.jobs.grow import GrowJob
from rbdc.jobs.job import Job, Node
from rbdc.jobs.method import NOT_IN_KEY, Method, SavedForGrowth
from rbdc.jobs.train import TrainJob
from rbdc.models import ModelSpec, check_steps
from rbdc.plan import CounterName, Growth, Plan, forward_flops, training_flops
from rbdc.settings import Duration, Extent, Length, Recipe, Request, plain
from rbdc.training import Task, images_for, input_format
from rbdc.training.teacher import Teacher

TransitionName = Literal["restart", "carry"]
BatchesName = Literal["shared", "separate"]

# The published comparison on ResNet-50D (0.616 of 90 epochs): MixtureGrowth's members have 90 and
# 74 epochs, the wide model 14. A single parent of 90 leaves 32.7 for the wide model.
MEMBER_EPOCHS, WIDE_EPOCHS, SINGLE_PARENT_EPOCHS = (90, 74), 14, 32.7


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all protocols of a run have in common. The defaults are those of `Request`."""

    model: ModelSpec
    recipe: Recipe
    data: DataSet
    baseline_epochs: float
    """Epochs of standard training, which budgets are relative to."""
    teacher: Teacher | None = None
    growth: Growth = field(default_factory=Growth)
    """What grows from stage to stage, in RBDC."""
    ratio: float = Request.ratio
    """Epochs of a wide model over its parents'."""
    counter: CounterName = Request.counter
    transition: tuple[TransitionName, ...] = Request.transition
    carry_warmup_epochs: Length = Request.carry_warmup_epochs
    batches: BatchesName = Request.batches
    """Whether the models of a level train on the same batches."""
    fused: Mapping[str, int] = field(default_factory=dict)
    """How many models of a level are trained as one, by level; others are trained apart."""
    narrow_lr: float = Request.narrow_lr
    """Learning rate of a narrow model over that of a model of twice its width, in RBDC."""
    allow_inexact: bool = Request.allow_inexact

    @cached_property
    def image(self) -> Any:
        """The images, or the text, that the target takes."""
        return input_format(self.model, self.recipe, self.data)

    @property
    def narrow(self) -> ModelSpec:
        """The model at half its width."""
        return self.model.scaled(0.5)

    def forward_flops(self, width: float = 1.0) -> int:
        """Return the FLOPs of one image through the model at a fraction of its width."""
        return forward_flops(self.model.scaled(width), counter=self.counter)

    @property
    def baseline_cost(self) -> float:
        """Cost of standard training, in forward FLOPs per image times epochs."""
        return self.baseline_epochs * self.forward_flops()

    @property
    def baseline_flops(self) -> float:
        """FLOPs of standard training, which budgets are relative to."""
        return training_flops(self.forward_flops(), self.baseline_epochs, len(self.data.train))

    @property
    def steps_per_epoch(self) -> int:
        """Updates per pass over the training images."""
        return len(self.data.train) // self.recipe.batch_size

    def training(
        self,
        name: str,
        seed: int,
        epochs: float,
        *,
        model: ModelSpec | None = None,
        initial: GrowJob | None = None,
        saved_for_growth: SavedForGrowth = "",
        siblings: int = 1,
        **options: Any,
    ) -> TrainJob:
        """Return the training of a model by its name in the tree, such as 1.0 or target.

        It is one of `siblings` models of its level; `options` are Task's. Equal names with equal
        options give one job, whichever protocol asks for it.
        """
        level, index = (0, 0) if name == "target" else map(int, name.split("."))
        recipe = options.pop("recipe", self.recipe)
        image = images_for(model, self.image) if model else self.image
        if recipe.test_size and image != self.image:  # that of the target
            recipe = replace(recipe, test_size=None)
        own_seed = derive_seed(seed, "node", level, index)
        task = Task(
            model=model or self.model,
            recipe=recipe,
            image=image,
            epochs=epochs,
            seed=own_seed,
            data_seed=derive_seed(seed, "node", level, 0 if self.batches == "shared" else index),
            **{"warmup_epochs": recipe.warmup_epochs, **options},
        )
        return TrainJob(
            task=task,
            data=self.data,
            initial=initial,
            teacher=self.teacher,
            saved_for_growth=saved_for_growth,
            counter=self.counter,
            fused_with=self._fused_with(seed, level, index, siblings),
        )

    def _fused_with(self, seed: int, level: int, index: int, siblings: int) -> tuple[int, ...]:
        """Return the seeds of the siblings that a model is trained as one with, its own among them.

        Siblings train as one only on the same batches.
        """
        size = self.fused.get(str(level), 1) if self.batches == "shared" else 1
        first = index - index % size
        group = range(first, min(first + size, siblings))
        if len(group) < 2:
            return ()
        return tuple(derive_seed(seed, "node", level, number) for number in group)

    def to_json(self) -> dict[str, Any]:
        """Return what decides results, wherever the data lies and whatever it is called there."""
        data = self.data.to_json()
        content = {
            "model": self.model.to_json(),
            "recipe": self.recipe.to_json(),
            "data_set": {k: v for k, v in data.items() if k not in ("name", "skipped", "compared")},
            "baseline_epochs": self.baseline_epochs,
            "baseline_flops": self.baseline_flops,
            "teacher": self.teacher.sha256 if self.teacher else None,
            "growth": asdict(self.growth),
            "ratio": self.ratio,
            "counter": self.counter,
            "transition": list(self.transition),
            "carry_warmup_epochs": plain(self.carry_warmup_epochs),
            "batches": self.batches,
            "fused": dict(self.fused),
            "narrow_lr": self.narrow_lr,
            "allow_inexact": self.allow_inexact,
        }
        return dict(json.loads(json.dumps(content)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The jobs of one protocol, budget and seed, parents first; the last one's model is judged."""

    nodes: tuple[Node, ...]
    plan: Plan | None = None
    """The stages, where the protocol has planned them."""

    @classmethod
    def of(cls, jobs: Mapping[str, Job]) -> Self:
        """Return the trial of jobs by name; those of narrow models are named 1.0, 1.1."""
        levels = {name: int(name.startswith("1.")) for name in jobs}
        return cls(nodes=tuple(Node(name=k, level=levels[k], job=job) for k, job in jobs.items()))

    @property
    def target(self) -> Node:
        """The node of the model that is judged."""
        return self.nodes[-1]


@dataclass(frozen=True, kw_only=True)
class Protocol(ABC):
    """One way to spend a budget. Its options are its fields."""

    name: ClassVar[str]
    summary: ClassVar[str]
    """What the protocol does, in one line."""
    words: ClassVar[str] = ""
    """What may follow the name after colons, in one line; empty for no options."""
    example: ClassVar[str] = ""
    """Such options with their colons, for error messages."""
    halvings: ClassVar[int] = 1
    """How many times the width of the model must be halved."""

    @classmethod
    def parse(cls, words: Sequence[str]) -> Self:
        """Return the protocol with the options that follow its name."""
        options: dict[str, Any] = {}
        for word in words:
            try:
                name, value = cls.option(word)
                if name in options:
                    raise ValueError(f"{name} is given twice")
                options[name] = value
            except (KeyError, ValueError):
                raise PlanError(
                    f"{cls.name} got {word!r}, expected {cls.words or 'no options'}",
                    f"For example {cls.name}{cls.example}.",
                ) from None
        return cls(**options)

    @classmethod
    def option(cls, word: str) -> tuple[str, Any]:
        """Return the field that a word sets, and its value; raise ValueError or KeyError."""
        raise ValueError(f"{word} is no option of {cls.name}")

    def check(self, setting: Setting) -> None:
        """Refuse a model that the protocol does not fit, with the reason."""
        check_steps(setting.model, self.halvings)

    @abstractmethod
    def trial(self, setting: Setting, budget: float, seed: int) -> Trial:
        """Return the jobs that spend `budget`, parents included."""


@dataclass(frozen=True, kw_only=True)
class OneParent(Protocol, Method):
    """Train a model of half the width, widen it, train on: what most growth methods do."""

    words: ClassVar[str] = (
        "the wide model's epochs over its parent's: a number, paper, or single-parent"
    )
    example: ClassVar[str] = ":0.5"
    search: ClassVar[Duration] = Duration(0, "%")
    """How long `grow` looks at training images; a share is of the wide model's training."""
    ratio: float | None = field(default=None, metadata=NOT_IN_KEY)
    """Epochs of the wide model over its parent's; None takes the setting's."""

    @classmethod
    def option(cls, word: str) -> tuple[str, Any]:
        """Read the ratio: a number, or the name of a published one."""
        known = {
            "paper": WIDE_EPOCHS / sum(MEMBER_EPOCHS),
            "single-parent": SINGLE_PARENT_EPOCHS / MEMBER_EPOCHS[0],
        }
        return "ratio", known[word] if word in known else float(word)

    def check(self, setting: Setting) -> None:
        """Refuse a model that has no half width or that the method cannot widen."""
        super().check(setting)
        self.check_model(setting.model)

    def check_model(self, wide: ModelSpec) -> None:
        """Refuse a model that the method cannot widen, by its shapes alone."""

    def trial(self, setting: Setting, budget: float, seed: int) -> Trial:
        """Return the parent's training, the widening and the wide model's training."""
        ratio = self.ratio if self.ratio is not None else setting.ratio
        both = setting.forward_flops(0.5) + ratio * setting.forward_flops()
        epochs = budget * setting.baseline_cost / both  # the same for every one-parent method
        parent = setting.training(
            "1.0", seed, epochs, model=setting.narrow, saved_for_growth=self.saved_for_growth
        )
        wide_steps = ratio * epochs * setting.steps_per_epoch
        extent = Extent(
            steps_per_epoch=setting.steps_per_epoch,
            batch_size=setting.recipe.batch_size,
            total=wide_steps,
        )
        steps = max(1, extent.updates(self.search)) if self.search.amount else 0
        wide_epochs = (wide_steps - steps * self.cost) / setting.steps_per_epoch
        grown = GrowJob(
            model=setting.model,
            parents=(parent,),
            method=self,
            seed=derive_seed(seed, "grow", 0, 0),
            images=steps * setting.recipe.batch_size,
        )
        target = setting.training("target", seed, wide_epochs, initial=grown)
        return Trial.of({"1.0": parent, f"{self.name} target": grown, "target": target})
