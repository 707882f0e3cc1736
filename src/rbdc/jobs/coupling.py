"""RBDC's own way to widen: couple two models; and what happens to their trainings there.

`restart` is the paper's: each model is trained through its whole annealed schedule; at the
coupling the optimizer's state is dropped, and the schedule starts again with its warm-up.

`carry` is ours: narrow models stay at their peak learning rate, their optimizer's moments are
coupled by the rules of the weights, the wide model goes on after a short warm-up, and only the
target anneals. Models on the way are by-products then, not finished ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from rbdc.coupling import Layout, OffDiagonal, couple, couple_moments, layout_of, verify_coupling
from rbdc.errors import CouplingError, RecipeError
from rbdc.jobs.method import Grown, GrowthContext, Kept, Method, Parent, State
from rbdc.models import ModelSpec, build, build_empty
from rbdc.models.coupled import noise_image
from rbdc.settings import Recipe

TransitionName = Literal["restart", "carry"]


@dataclass(frozen=True, kw_only=True)
class Coupling(Method):
    """Block-diagonal coupling of two models of half the width (Eq. 1)."""

    name: ClassVar[str] = "coupling"
    parents: ClassVar[int] = 2
    transition: TransitionName = "restart"
    off_diagonal: OffDiagonal = "zero"
    allow_inexact: bool = False

    @property
    def carries(self) -> bool:
        """The optimizer's state, over to the wide model; its parents are not annealed then."""
        return self.transition == "carry"

    @property
    def keeps(self) -> Kept:  # type: ignore[override]
        return "optimizer" if self.carries else ""

    def warmup_epochs(self, recipe: Recipe, carry_warmup_epochs: float) -> float:
        """Of the wide model."""
        if self.carries:
            return min(recipe.warmup_epochs, carry_warmup_epochs)
        return recipe.warmup_epochs

    def grow(self, parents: Sequence[Parent], wide: ModelSpec, context: GrowthContext) -> Grown:
        """Couple, and prove it: the wide model is the mean of its parents."""
        first, second = (parent.model for parent in parents)
        into = build(wide) if self.off_diagonal == "random" else build_empty(wide)
        model = couple(
            first,
            second,
            into=into,
            off_diagonal=self.off_diagonal,
            seed=context.seed,
            allow_inexact=self.allow_inexact,
        )
        proof = verify_coupling(first, second, model, noise_image(model))
        if not (proof.holds or self.allow_inexact or self.off_diagonal == "random"):
            raise CouplingError(
                f"the coupled {wide} is {proof.error:.1e} off the mean of its parents",
                "Its layers cannot be kept apart by width; allow an inexact coupling to go on.",
            )
        optimizer = None
        if self.carries:
            left, right = (parent.kept for parent in parents)
            assert left and right, "parents of a carrying coupling keep their optimizer"
            optimizer = carried_optimizer(left, right, layout_of(first, model))
        record = {"proof_error": proof.error, "norm_drift": proof.drift, "exact": proof.holds}
        return Grown(model=model, optimizer=optimizer, record=record)


def carried_optimizer(first: State, second: State, layout: Layout) -> State:
    """The state that a wide model's optimizer starts with, of its parents'."""
    groups = [  # the rate is the wide model's own
        {key: value for key, value in group.items() if key not in ("lr", "initial_lr")}
        for group in first[1]["groups"]
    ]
    return couple_moments(first[0], second[0], layout), {**first[1], "groups": groups}


def transitions(names: tuple[TransitionName, ...], steps: int) -> tuple[TransitionName, ...]:
    """One for each coupling, from the leaves up; a single name stands for all."""
    if len(names) not in (1, steps):
        raise RecipeError(
            f"{len(names)} transitions are given for {steps} couplings on the way to the target",
            "Give one for all, or one for each level, the leaves' first.",
        )
    return names * steps if len(names) == 1 else names
