"""Make the plan of a training: solve a budget for the epochs of each level, and count the FLOPs."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import inf
from typing import Any, cast, get_args

from rbdc.coupling import check_conflicts
from rbdc.errors import PlanError, nearest
from rbdc.models import ModelSpec, as_spec, family, halves_structure, image_side
from rbdc.models.language import is_language
from rbdc.plan.flops import CounterName, count_flops
from rbdc.plan.growth import Growth, changes, models_of
from rbdc.plan.plan import Batches, Costs, Plan, Rounding, Stage
from rbdc.plan.schedule import (
    Schedule,
    cost_of_unit,
    data_passes,
    quartered,
    relative_epochs,
    training_flops,
)
from rbdc.plan.speeds import Speeds, check_positive
from rbdc.settings import Request

IMAGENET_IMAGES = 1_281_167
MOST_EPOCHS, MOST_IMAGES = 1e9, 10**15
"""Beyond any training, and small enough for FLOPs to be finite numbers."""


def make_plan(
    model: str | ModelSpec,
    *,
    steps: int = cast(int, Request.steps),
    growth: Growth | None = None,
    shares: Sequence[float] | None = None,
    ratio: float = Request.ratio,
    budget: float | None = None,
    total_flops: float | None = None,
    epochs: float | None = None,
    total_epochs: float | None = None,
    budget_hours: float | None = None,
    budget_time: float | None = None,
    speeds: Speeds | None = None,
    baseline_epochs: float | None = None,
    warmup_epochs: float | None = None,
    images: int = IMAGENET_IMAGES,
    schedule: Schedule = Request.schedule,
    costs: Costs = Request.costs,
    counter: CounterName = Request.counter,
    rounding: Rounding = Request.rounding,
    batches: Batches = Request.batches,
    batch_size: int | None = None,
) -> Plan:
    """Plan the training of `model` by `steps` recursive steps (0 is standard training).

    Give exactly one of these: `budget`, the FLOPs relative to standard training for
    `baseline_epochs` (default: the paper's, 300 for transformers and 90 for ResNets);
    `total_flops`, of all models; `epochs`, of the target; `total_epochs`, of all models together,
    which Algorithm 1 divides among them; `budget_hours`, of all models on one device with these
    `speeds`; or `budget_time`, the same hours relative to standard training's.

    `growth` says what grows from stage to stage, by default the width alone, as in the paper.
    `ratio` is r, the epochs of a wide model divided by those of its parents; `shares` of the FLOPs
    by level, target first, replace it. `costs="quarter"`
    solves for epochs with the paper's approximation that a model of half the width costs a quarter.
    The reported costs are exact in both cases, and computed from the rounded epochs. With a
    `batch_size`, a level that would not take a single step is refused.
    """
    spec = as_spec(model)
    _check(
        steps=steps, ratio=ratio, images=images, schedule=schedule, costs=costs, rounding=rounding
    )
    growth = growth or Growth()
    levels = growth.levels(spec, steps)
    steps = len(levels) - 1
    if costs == "quarter" and any(
        {*changes(narrow, wide)} - {"width"} for wide, narrow in pairwise(levels)
    ):
        raise PlanError(
            "costs quarter holds for growth in width alone", "Leave it out, or use --grow width."
        )
    models = models_of(levels)
    inexact = [
        name
        for wide, narrow in pairwise(levels)
        if wide.width != narrow.width
        for name in _inexact(narrow)
    ]
    counts = [count_flops(level, counter=counter) for level in levels]
    flops = [count.forward_flops for count in counts]
    known = family(spec)
    baseline = known.baseline_epochs if baseline_epochs is None else baseline_epochs
    warmup = known.warmup_epochs if warmup_epochs is None else warmup_epochs
    check_positive("baseline epochs", baseline)
    _check_number("baseline epochs", baseline, at_least=0, at_most=MOST_EPOCHS)
    _check_number("warm-up epochs", warmup, at_least=0, at_most=MOST_EPOCHS)

    shared = batches == "shared"
    shares = shares or growth.shares
    relative = relative_epochs(schedule, steps, ratio)
    if shares:
        parts = zip(shares, models, flops, strict=True)
        relative = [flops[0] * part / (number * cost) for part, number, cost in parts]
    assumed = quartered(flops[0], steps) if costs == "quarter" else flops
    per_image = cost_of_unit(models, relative, assumed)

    def parts_of_unit(hours: float) -> float:
        """Return how often the relative epochs fit into these hours; time is linear in epochs."""
        known = _of_levels(speeds, levels)
        return hours / (known.total_seconds(models, relative, images, shared=shared) / 3600)

    def standard_hours() -> float:
        known = _of_levels(speeds, levels)
        return known.seconds(0, 1, baseline * images, shared=shared) / 3600

    ways = {
        # Eq. 16 (and 18, with quartered costs); Eq. 14; Eq. 12; Algorithm 1
        "budget": (budget, lambda alpha: alpha * baseline * flops[0] / per_image),
        "total FLOPs": (total_flops, lambda total: total / training_flops(per_image, 1, images)),
        "epochs": (epochs, lambda target: target / relative[0]),
        "total epochs": (total_epochs, lambda passes: passes / data_passes(models, relative)),
        "budget hours": (budget_hours, parts_of_unit),
        "budget time": (budget_time, lambda part: parts_of_unit(part * standard_hours())),
    }
    wanted = [_solve(ways) * share for share in relative]
    _check_number("the longest training of the plan, in epochs,", max(wanted), at_most=MOST_EPOCHS)
    return Plan(
        model=spec,
        steps=steps,
        ratio=ratio,
        schedule=schedule,
        costs=costs,
        counter=counts[0].counter,
        uncounted=dict(counts[0].uncounted),
        inexact=tuple(dict.fromkeys(inexact)),
        images=images,
        asked_flops=training_flops(cost_of_unit(models, wanted, flops), 1, images),
        baseline_epochs=baseline,
        warmup_epochs=warmup,
        batches=batches,
        stages=_stages(levels, models, wanted, flops, images, rounding, batch_size),
        sequence_length=image_side(spec) if is_language(spec.name) else None,
    )


def _of_levels(speeds: Speeds | None, levels: Sequence[ModelSpec]) -> Speeds:
    """Return the speeds, or refuse to plan hours without them or with those of other models."""
    if speeds is None:
        raise PlanError(
            "a budget in hours needs the training speed of each level",
            "Give --measure, --speeds FILE or --images-per-second N (in Python: speeds).",
        )
    if [level.model for level in speeds.levels[: len(levels)]] != list(levels):
        raise PlanError(
            f"the speeds are of {', '.join(str(level.model) for level in speeds.levels)}, and the "
            f"plan trains {', '.join(map(str, levels))}",
            "Give the speeds of the plan's own models.",
        )
    return speeds


def _stages(
    levels: Sequence[ModelSpec],
    models: Sequence[int],
    epochs: Sequence[float],
    flops: Sequence[int],
    images: int,
    rounding: Rounding,
    batch_size: int | None,
) -> tuple[Stage, ...]:
    """Return the stages, leaves first, from what each level is, target first."""
    stages = []
    for level, (spec, number, wanted, forward) in enumerate(
        zip(levels, models, epochs, flops, strict=True)
    ):
        run = round(wanted) if rounding == "whole" else wanted
        if run <= 0:
            raise PlanError(
                f"level {level} ({spec}) would train for {wanted:.3g} epochs, which rounds to 0",
                "Use a larger budget, fewer steps, a smaller ratio, or --rounding none.",
            )
        if batch_size is not None and run * images < batch_size <= images:
            raise PlanError(
                f"level {level} ({spec}) would train on {run * images:.3g} images, less than one "
                f"step with a batch of {batch_size}",
                "Use a larger budget, fewer steps, a smaller ratio, or a smaller --batch-size.",
            )
        before = level + 1 < len(levels)
        stages.append(
            Stage(
                level=level,
                model=spec,
                models=number,
                parents=models[level + 1] // number if before else 0,
                grown=changes(levels[level + 1], spec) if before else (),
                epochs=run,
                forward_flops=forward,
                training_flops=number * training_flops(forward, run, images),
                share=0.0,
            )
        )
    total = sum(stage.training_flops for stage in stages)
    return tuple(replace(stage, share=stage.training_flops / total) for stage in reversed(stages))


def _solve(ways: dict[str, tuple[float | None, Any]]) -> float:
    given = [(name, value, solve) for name, (value, solve) in ways.items() if value is not None]
    if len(given) != 1:
        names = ", ".join(name for name, _, _ in given)
        raise PlanError(
            f"the plan was given {names}" if names else "the plan was given no budget",
            f"Give exactly one of {', '.join(ways)}.",
        )
    name, value, solve = given[0]
    check_positive(name, value)
    return float(solve(value))


def _check(**values: Any) -> None:
    if not isinstance(values["steps"], int) or values["steps"] < 0:
        raise PlanError(
            f"steps is {values['steps']}, expected 0 or more", "0 steps is standard training."
        )
    check_positive("ratio", values["ratio"])
    _check_number("ratio", values["ratio"], at_least=1e-6, at_most=1e6)
    if not isinstance(values["images"], int) or not 0 < values["images"] <= MOST_IMAGES:
        raise PlanError(
            f"images is {str(values['images'])[:30]}, expected a whole number from 1 to 10^15",
            f"Give the size of the training set (ImageNet-1K: {IMAGENET_IMAGES}).",
        )
    for key, known in (("schedule", Schedule), ("costs", Costs), ("rounding", Rounding)):
        if values[key] not in get_args(known):
            raise PlanError(
                f"no {key} is called {values[key]!r}",
                nearest(values[key], get_args(known))
                or f"Use one of {', '.join(get_args(known))}.",
            )


def _check_number(name: str, value: float, *, at_least: float = 0, at_most: float = inf) -> None:
    if not at_least <= value <= at_most:
        raise PlanError(
            f"{name} is {value:g}, expected {at_least:g} to {at_most:g}", "Give another amount."
        )


@cache
def _inexact(narrow: ModelSpec) -> tuple[str, ...]:
    """Return the tensors and operations that make the coupling inexact."""
    structure = halves_structure(narrow.scaled(2))
    check_conflicts(structure)
    return tuple(structure.inexact)
