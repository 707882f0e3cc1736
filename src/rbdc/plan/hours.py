"""The hours and the money that a plan takes on one device, and the steps that take the fewest."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rbdc.errors import PlanError
from rbdc.plan.plan import Plan, Rounding, Stage
from rbdc.plan.speeds import LevelSpeed, Speeds, check_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class Hours:
    """A plan at the speeds of one device, beside standard training at the same speeds."""

    plan: Plan
    speeds: Speeds
    """Speeds of the plan's levels, target first, and perhaps of narrower ones."""
    price: float | None = None
    """Price of a device-hour, in any currency; None if unknown."""

    def __post_init__(self) -> None:
        if self.price is not None:
            check_positive("price", self.price)

    def speed(self, stage: Stage) -> LevelSpeed:
        """Return the speed of a stage's models."""
        return self.speeds.levels[stage.level]

    def hours(self, stage: Stage) -> float:
        """Return the hours of training all models of a stage on one device."""
        return self.speeds.seconds(*self._work(stage), shared=self._shared) / 3600

    def loader_bound(self, stage: Stage) -> bool:
        """Return whether the loader, not the device, decides the hours of a stage."""
        return self.speeds.loader_bound(*self._work(stage), shared=self._shared)

    def peak_share(self, stage: Stage) -> float | None:
        """Return the FLOP/s of a stage over the device's peak; None if the peak is unknown."""
        return self.speeds.peak_share(stage.level, stage.forward_flops)

    @property
    def total(self) -> float:
        """Hours of all stages."""
        return sum(self.hours(stage) for stage in self.plan.stages)

    @property
    def standard(self) -> float:
        """Hours of standard training: the target alone, for `baseline_epochs`."""
        images = self.plan.baseline_epochs * self.plan.images
        return self.speeds.seconds(0, 1, images, shared=True) / 3600

    @property
    def ratio(self) -> float:
        """Hours of the plan, relative to standard training's."""
        return self.total / self.standard

    def money(self, hours: float) -> float | None:
        """Return the price of so many hours; None if no price is known."""
        return None if self.price is None else hours * self.price

    @property
    def _shared(self) -> bool:
        return self.plan.batches == "shared"

    def _work(self, stage: Stage) -> tuple[int, int, float]:
        return stage.level, stage.models, stage.epochs * self.plan.images

    def to_json(self) -> dict[str, Any]:
        """Return the hours of each stage, leaves first, and in all."""
        return {
            "stages": [
                {
                    "level": stage.level,
                    "images_per_second": self.speed(stage).images_per_second,
                    "hours": self.hours(stage),
                    "loader_bound": self.loader_bound(stage),
                    "memory_bytes": self.speed(stage).memory_bytes,
                    "peak_share": self.peak_share(stage),
                    "money": self.money(self.hours(stage)),
                }
                for stage in self.plan.stages
            ],
            "total": self.total,
            "standard": self.standard,
            "ratio": self.ratio,
            "price": self.price,
            "money": self.money(self.total),
            "standard_money": self.money(self.standard),
            "speeds": self.speeds.to_json(),
        }


def check_equal_flops(budget: float | None, total_flops: float | None) -> None:
    """Refuse to compare numbers of steps by hours if their FLOPs are not the same."""
    if budget is None and total_flops is None:
        raise PlanError(
            "steps auto compares numbers of steps at the same FLOPs, and no FLOPs are given",
            "Give --budget or --total-flops, or a number of steps.",
        )


def hours_by_steps(
    plan_of: Callable[[int, Rounding], Plan], speeds: Speeds, rounding: Rounding
) -> tuple[Hours, ...]:
    """Return the hours of 0, 1, ... steps for exactly the same FLOPs, epochs not rounded.

    `plan_of` makes the plan of a number of steps. Numbers of steps that leave a level no epoch,
    where epochs are rounded, or less than one update are left out.
    """
    found: list[Hours] = []
    for steps in range(len(speeds.levels)):
        try:
            plan_of(steps, rounding)
        except PlanError:
            if not found:
                raise
            break
        found.append(Hours(plan=plan_of(steps, "none"), speeds=speeds))
    return tuple(found)


def fewest_hours(candidates: Sequence[Hours]) -> int:
    """Return the number of steps that takes the fewest hours; of equals, the smallest."""
    return min(candidates, key=lambda hours: hours.total).plan.steps
