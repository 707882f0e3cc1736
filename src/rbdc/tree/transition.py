"""What happens where two narrow models become a wide one: one small piece, replaceable.

`restart` is the paper's: each model is trained through its whole annealed schedule; at the
coupling the optimizer's state is dropped, and the schedule starts again with its warm-up.

`carry` is ours: narrow models stay at their peak learning rate, their optimizer's moments are
coupled by the rules of the weights, the wide model goes on after a short warm-up, and only the
target anneals. Models on the way are by-products then, not finished ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from rbdc.coupling import Layout, couple_moments
from rbdc.errors import RecipeError
from rbdc.recipes import Recipe

TransitionName = Literal["restart", "carry"]
Moments = tuple[Mapping[str, Tensor], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Transition:
    """How a coupling treats the trainings on its two sides."""

    name: TransitionName
    anneals: bool
    """Whether the narrow models' learning rate is annealed before they are coupled."""
    carries: bool
    """Whether the optimizer's state goes over to the wide model."""

    def warmup_epochs(self, recipe: Recipe, carry_warmup_epochs: float) -> float:
        """Of the wide model."""
        if self.carries:
            return min(recipe.warmup_epochs, carry_warmup_epochs)
        return recipe.warmup_epochs


def carried_optimizer(first: Moments, second: Moments, layout: Layout) -> Moments:
    """The state that a wide model's optimizer starts with, of its parents'."""
    groups = [  # the rate is the wide model's own
        {key: value for key, value in group.items() if key not in ("lr", "initial_lr")}
        for group in first[1]["groups"]
    ]
    return couple_moments(first[0], second[0], layout), {**first[1], "groups": groups}


TRANSITIONS: Mapping[str, Transition] = {
    "restart": Transition(name="restart", anneals=True, carries=False),
    "carry": Transition(name="carry", anneals=False, carries=True),
}


def transitions(names: tuple[TransitionName, ...], steps: int) -> tuple[Transition, ...]:
    """One for each coupling, from the leaves up; a single name stands for all."""
    if len(names) not in (1, steps):
        raise RecipeError(
            f"{len(names)} transitions are given for {steps} couplings on the way to the target",
            "Give one for all, or one for each level, the leaves' first.",
        )
    return tuple(TRANSITIONS[name] for name in (names * steps if len(names) == 1 else names))
