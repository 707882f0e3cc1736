"""A plan on a cluster: how many devices each level's models get, and what comes of it.

Siblings stand side by side first, then each training is spread over several devices. Pure: a plan
and its `Scaling` in, a `Timetable` out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Any

from rbdc.cluster.timetable import SAME_MOMENT, Demand, Timetable, simulate
from rbdc.errors import PlanError
from rbdc.plan.plan import Plan, Stage
from rbdc.plan.scaling import Scaling

STANDARD = "standard"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterPlan:
    """A plan on a cluster, beside standard training on the same devices."""

    plan: Plan
    scaling: Scaling
    tree: Timetable
    standard: Timetable
    """The target alone, for the plan's `baseline_epochs`."""

    @property
    def allocation(self) -> tuple[int, ...]:
        """Devices of each model, by level, the target first."""
        return tuple(row.devices for row in self.tree.rows)

    @property
    def makespan_ratio(self) -> float:
        return self.tree.makespan_seconds / self.standard.makespan_seconds

    @property
    def device_ratio(self) -> float:
        """Of device-seconds at work."""
        return self.tree.device_seconds / self.standard.device_seconds

    def to_json(self) -> dict[str, Any]:
        return {
            "allocation": list(self.allocation),
            "scaling": self.scaling.to_json(),
            "tree": self.tree.to_json(),
            "standard": self.standard.to_json(),
            "makespan_ratio": self.makespan_ratio,
            "device_ratio": self.device_ratio,
        }


def plan_cluster(
    plan: Plan, devices: int, scaling: Scaling, *, coupling_seconds: float = 0.0
) -> ClusterPlan:
    """The plan's timetable on so many devices, and standard training's.

    Tried are the allocations that suit every smaller number of devices too: so more devices never
    make it slower. `coupling_seconds` passes before each training that begins with a coupling.
    """
    _check_devices(devices)
    if not (isfinite(coupling_seconds) and coupling_seconds >= 0):
        raise PlanError(f"a coupling takes {coupling_seconds:g} s", "Give 0 seconds or more.")
    levels = [_Level(stage, plan, devices, scaling, coupling_seconds) for stage in plan.stages]
    standard = replace(plan.target, epochs=plan.baseline_epochs)
    alone = _Level(standard, plan, devices, scaling, 0.0)
    return ClusterPlan(
        plan=plan,
        scaling=scaling,
        tree=_best(levels, devices),
        standard=_best([alone], devices, STANDARD),
    )


def allocate(plan: Plan, devices: int, scaling: Scaling) -> tuple[int, ...]:
    """Devices of each model, by level, the target first: what ends soonest level by level.

    Siblings train side by side as far as there are devices. It may still end sooner to spread each
    over more of them and have fewer at a time: 4 leaves on 3 devices, each on all 3, wait for none.
    """
    _check_devices(devices)
    levels = [_Level(stage, plan, devices, scaling, 0.0) for stage in plan.stages]
    return tuple(level.best_size(devices) for level in reversed(levels))


def soonest(models: int, seconds: Mapping[int, float], devices: int) -> int:
    """The number of devices of each model with which so many models end soonest.

    `seconds` are what one takes on each number of devices that can share it. Of equals, that which
    costs fewest device-seconds.
    """

    def cost(size: int) -> tuple[float, float]:
        waves = -(-models // (devices // size))
        return waves * seconds[size], size * seconds[size]

    return min((size for size in seconds if size <= devices), key=cost)


def demands_of(
    plan: Plan, allocation: Sequence[int], scaling: Scaling, *, coupling_seconds: float = 0.0
) -> list[Demand]:
    """The plan's jobs, to `simulate`: so many devices for each model of a level, target first."""
    if len(allocation) != len(plan.stages):
        raise PlanError(
            f"devices are given for {len(allocation)} levels, and the plan has {len(plan.stages)}",
            "Give one number for each level, the target's first.",
        )
    sizes = allocation[::-1]
    levels = [
        _Level(stage, plan, size, scaling, coupling_seconds)
        for stage, size in zip(plan.stages, sizes, strict=True)
    ]
    for level, size in zip(levels, sizes, strict=True):
        if size not in level.seconds:
            raise PlanError(
                f"a batch of {scaling.batch_size} cannot be shared by {size} devices",
                "Choose a batch that is a multiple of twice the devices, or other devices.",
            )
    return _demands(levels, sizes, "target")


class _Level:
    """What one level's models take on every number of devices that can share one of them."""

    def __init__(
        self, stage: Stage, plan: Plan, devices: int, scaling: Scaling, coupling_seconds: float
    ) -> None:
        self.stage = stage
        coupled = coupling_seconds if stage.level < plan.steps else 0.0
        images = stage.epochs * plan.images
        self.seconds = {
            size: coupled + scaling.training_seconds(stage.level, images, size)
            for size in scaling.group_sizes(devices)
        }

    @property
    def least_seconds(self) -> float:
        return min(self.seconds.values())

    @property
    def least_work(self) -> float:
        """Device-seconds of the whole level at least."""
        return self.stage.models * min(size * s for size, s in self.seconds.items())

    def best_size(self, devices: int) -> int:
        return soonest(self.stage.models, self.seconds, devices)


def _best(levels: Sequence[_Level], devices: int, target: str = "target") -> Timetable:
    """The shortest of the timetables by `allocate` on so many devices and on fewer of them.

    What is tried on G devices is also tried on more: that makes it monotone. Only counts that whole
    groups fill are tried; at others no allocation changes.
    """
    models, sizes = max(level.stage.models for level in levels), levels[0].seconds
    counts = {size * side for size in sizes for side in range(1, models + 1)}
    best, shortest = None, inf
    for count in sorted((count for count in counts if count <= devices), reverse=True):
        chosen = [level.best_size(count) for level in levels]
        taken = list(zip(levels, chosen, strict=True))
        path = sum(level.seconds[size] for level, size in taken)
        work = sum(level.stage.models * size * level.seconds[size] for level, size in taken)
        if max(path, work / count) >= shortest:  # it cannot be shorter
            continue
        found = simulate(_demands(levels, chosen, target), count)
        if found.makespan_seconds < shortest:
            best, shortest = found, found.makespan_seconds * (1 - SAME_MOMENT)
    assert best is not None, "one device is always tried"
    return replace(
        best,
        devices=devices,
        critical_path_seconds=sum(level.least_seconds for level in levels),
        work_seconds=sum(level.least_work for level in levels),
    )


def _demands(levels: Sequence[_Level], sizes: Sequence[int], target: str) -> list[Demand]:
    """The tree as tree.nodes names it, leaves first: neighbours in pairs are parents."""
    demands: list[Demand] = []
    below: list[str] = []
    for level, size in zip(levels, sizes, strict=True):
        number = level.stage.level
        here = [f"{number}.{i}" if number else target for i in range(level.stage.models)]
        demands += [
            Demand(
                name=name,
                level=number,
                devices=size,
                seconds=level.seconds[size],
                parents=tuple(below[level.stage.parents * index :][: level.stage.parents]),
            )
            for index, name in enumerate(here)
        ]
        below = here
    return demands


def _check_devices(devices: int) -> None:
    if devices < 1:
        raise PlanError(f"there are {devices} devices", "Give one or more.")
