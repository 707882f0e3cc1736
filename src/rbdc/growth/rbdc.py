"""RBDC itself, by any number of recursive steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from rbdc.coupling import OffDiagonal
from rbdc.errors import PlanError
from rbdc.growth.protocol import Protocol, Setting, Trial
from rbdc.jobs.coupling import TransitionName
from rbdc.jobs.tree import grow_tree
from rbdc.models import check_steps
from rbdc.plan import Plan, make_plan


@dataclass(frozen=True, kw_only=True)
class Rbdc(Protocol):
    name: ClassVar[str] = "rbdc"
    summary: ClassVar[str] = "2^S narrow models, coupled in pairs and trained on, S times"
    words: ClassVar[str] = (
        "the number of steps; restart or carry; random for random off-diagonal blocks; r=RATIO; "
        "lr=FACTOR for narrow models' learning rate over that of twice their width"
    )
    steps: int = 1
    transition: TransitionName | None = None
    """By default the setting's."""
    off_diagonal: OffDiagonal = "zero"
    ratio: float | None = None
    """By default the setting's."""
    narrow_lr: float | None = None
    """By default the setting's."""

    @classmethod
    def parse(cls, words: Sequence[str]) -> Self:
        options: dict[str, Any] = {}
        for word in words:
            if word in ("restart", "carry"):
                options["transition"] = word
            elif word == "random":
                options["off_diagonal"] = "random"
            elif word.startswith("r="):
                options["ratio"] = _number(cls, word, word.removeprefix("r="))
            elif word.startswith("lr="):
                options["narrow_lr"] = _number(cls, word, word.removeprefix("lr="))
            else:
                options["steps"] = int(_number(cls, word, word if word.isdigit() else ""))
        return cls(**options)

    def check(self, setting: Setting) -> None:
        check_steps(setting.model, self.steps)

    def trial(self, setting: Setting, budget: float, seed: int) -> Trial:
        tree = grow_tree(
            self.plan(setting, budget),
            setting.recipe,
            setting.data,
            seed=seed,
            transition=(self.transition,) if self.transition else setting.transition,
            carry_warmup_epochs=setting.carry_warmup_epochs,
            narrow_lr=self.narrow_lr if self.narrow_lr is not None else setting.narrow_lr,
            allow_inexact=setting.allow_inexact,
            off_diagonal=self.off_diagonal,
        )
        return Trial(nodes=tree.nodes)

    def plan(self, setting: Setting, budget: float) -> Plan:
        return make_plan(
            setting.model,
            steps=self.steps,
            ratio=self.ratio if self.ratio is not None else setting.ratio,
            budget=budget,
            baseline_epochs=setting.baseline_epochs,
            warmup_epochs=setting.recipe.warmup_epochs,
            images=len(setting.data.train),
            counter=setting.counter,
            rounding="none",
        )


def _number(cls: type[Rbdc], word: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise PlanError(
            f"{cls.name} got {word!r}, expected {cls.words}", "For example rbdc:2:carry."
        ) from None
