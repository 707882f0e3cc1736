"""Divide the devices of a cluster among the models of a plan, and simulate the result.

Siblings train at the same time first. If devices are left, several train one model together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf, isfinite
from typing import Any

from rbdc.cluster.timetable import SAME_MOMENT, Demand, Timetable, simulate
from rbdc.errors import PlanError
from rbdc.plan.plan import Plan, Stage
from rbdc.plan.scaling import Scaling

STANDARD = "standard"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterPlan:
    """The timetable of a plan on a cluster, and of standard training on the same devices."""

    plan: Plan
    scaling: Scaling
    tree: Timetable
    standard: Timetable
    """Timetable of the target alone, for the plan's `baseline_epochs`."""

    @property
    def allocation(self) -> tuple[int, ...]:
        """Devices per model, by level, the target first."""
        return tuple(row.devices for row in self.tree.rows)

    @property
    def makespan_ratio(self) -> float:
        return self.tree.makespan_seconds / self.standard.makespan_seconds

    @property
    def device_ratio(self) -> float:
        """Device-seconds of the plan divided by those of standard training, without idle time."""
        return self.tree.device_seconds / self.standard.device_seconds

    def to_json(self) -> dict[str, Any]:
        return {
            "allocation": list(self.allocation),
            "scaling": asdict(self.scaling),
            "tree": self.tree.to_json(),
            "standard": self.standard.to_json(),
            "makespan_ratio": self.makespan_ratio,
            "device_ratio": self.device_ratio,
        }


def plan_cluster(
    plan: Plan, devices: int, scaling: Scaling, *, coupling_seconds: float = 0.0
) -> ClusterPlan:
    """Return the timetables of the plan and of standard training on this many devices.

    Also try the best allocation for every smaller number of devices, so that adding a device never
    makes a plan slower. `coupling_seconds` is the time before each training of a coupled model.
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
    """Return the devices per model, by level, target first, with which each level finishes first.

    Usually as many siblings as possible train at once. It can be faster to train fewer at once, on
    more devices each: 4 leaves on 3 devices finish first if each trains on all 3.
    """
    _check_devices(devices)
    levels = [_Level(stage, plan, devices, scaling, 0.0) for stage in plan.stages]
    return tuple(level.best_size(devices) for level in reversed(levels))


def soonest(models: int, seconds: Mapping[int, float], devices: int) -> int:
    """Return the devices per model with which `models` equal models finish first.

    `seconds` is the time of one model by its number of devices. If several numbers are equally
    fast, return the one with the fewest device-seconds.
    """

    def cost(size: int) -> tuple[float, float]:
        waves = -(-models // (devices // size))
        return waves * seconds[size], size * seconds[size]

    return min((size for size in seconds if size <= devices), key=cost)


def demands_of(
    plan: Plan, allocation: Sequence[int], scaling: Scaling, *, coupling_seconds: float = 0.0
) -> list[Demand]:
    """Return the plan's jobs for `simulate`. `allocation` is devices per model, target first."""
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
                f"a batch of {scaling.batch_size} cannot be divided among {size} devices",
                "Choose a batch size that is a multiple of twice the devices, or fewer devices.",
            )
    return _demands(levels, sizes, "target")


class _Level:
    """The training time of one level's models, by the number of devices per model."""

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
        """Fewest device-seconds in which all models of the level can be trained."""
        return self.stage.models * min(size * s for size, s in self.seconds.items())

    def best_size(self, devices: int) -> int:
        return soonest(self.stage.models, self.seconds, devices)


def _best(levels: Sequence[_Level], devices: int, target: str = "target") -> Timetable:
    """Return the shortest timetable on this number of devices or fewer.

    Everything tried for G devices is also tried for more, so adding a device never makes it slower.
    Only multiples of a group size are tried: between them, no allocation changes.
    """
    models, sizes = max(level.stage.models for level in levels), levels[0].seconds
    counts = {size * side for size in sizes for side in range(1, models + 1)}
    best, shortest = None, inf
    for count in sorted((count for count in counts if count <= devices), reverse=True):
        chosen = [level.best_size(count) for level in levels]
        taken = list(zip(levels, chosen, strict=True))
        path = sum(level.seconds[size] for level, size in taken)
        work = sum(level.stage.models * size * level.seconds[size] for level, size in taken)
        if max(path, work / count) >= shortest:  # its lower bound is not shorter
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
    """Return the jobs with their names in the tree, leaves first. Adjacent pairs are parents."""
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
