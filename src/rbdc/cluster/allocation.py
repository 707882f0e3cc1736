"""Divide the devices of a cluster among the models of a plan, and simulate the result.

Siblings train at the same time first. If devices are left, several train one model together.
"""

from collections.abc import Iterable, Mapping, Sequence
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
    if devices < 1:
        raise PlanError(f"there are {devices} devices", "Give one or more.")
    if not (isfinite(coupling_seconds) and coupling_seconds >= 0):
        raise PlanError(f"a coupling takes {coupling_seconds:g} s", "Give 0 seconds or more.")
    levels = [
        (stage, _seconds(stage, plan, devices, scaling, coupling_seconds)) for stage in plan.stages
    ]
    standard = replace(plan.target, epochs=plan.baseline_epochs)
    alone = (standard, _seconds(standard, plan, devices, scaling, 0.0))
    tree, baseline = _best(levels, devices), _best([alone], devices, STANDARD)
    return ClusterPlan(plan=plan, scaling=scaling, tree=tree, standard=baseline)


def soonest(models: int, seconds: Mapping[int, float], devices: int) -> int:
    """Return the devices per model with which `models` equal models finish first.

    Usually as many as possible train at once. It can be faster to train fewer at once, on more
    devices each: 4 leaves on 3 devices finish first if each trains on all 3. `seconds` is the time
    of one model by its number of devices. If several numbers are equally fast, return the one with
    the fewest device-seconds.
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
    levels = []
    for stage, size in zip(plan.stages, allocation[::-1], strict=True):
        seconds = _seconds(stage, plan, size, scaling, coupling_seconds)
        if size not in seconds:
            raise PlanError(
                f"a batch of {scaling.batch_size} cannot be divided among {size} devices",
                "Choose a batch size that is a multiple of twice the devices, or fewer devices.",
            )
        levels.append((stage, size, seconds[size]))
    return _demands(levels, "target")


def _seconds(
    stage: Stage, plan: Plan, devices: int, scaling: Scaling, coupling_seconds: float
) -> dict[int, float]:
    """Return the training time of one of the stage's models, by its number of devices."""
    coupled = coupling_seconds if stage.level < plan.steps else 0.0
    images = stage.epochs * plan.images
    return {
        size: coupled + scaling.training_seconds(stage.level, images, size)
        for size in scaling.group_sizes(devices)
    }


def _best(
    levels: Sequence[tuple[Stage, dict[int, float]]], devices: int, target: str = "target"
) -> Timetable:
    """Return the shortest timetable on this number of devices or fewer.

    Everything tried for G devices is also tried for more, so adding a device never makes it slower.
    Only multiples of a group size are tried: between them, no allocation changes.
    """
    models = max(stage.models for stage, _ in levels)
    counts = {size * side for size in levels[0][1] for side in range(1, models + 1)}
    best, shortest = None, inf
    for count in sorted((count for count in counts if count <= devices), reverse=True):
        taken = []
        for stage, seconds in levels:
            size = soonest(stage.models, seconds, count)
            taken.append((stage, size, seconds[size]))
        path = sum(each for _, _, each in taken)
        work = sum(stage.models * size * each for stage, size, each in taken)
        if max(path, work / count) >= shortest:  # its lower bound is not shorter
            continue
        found = simulate(_demands(taken, target), count)
        if found.makespan_seconds < shortest:
            best, shortest = found, found.makespan_seconds * (1 - SAME_MOMENT)
    assert best is not None, "one device is always tried"
    return replace(
        best,
        devices=devices,
        critical_path_seconds=sum(min(seconds.values()) for _, seconds in levels),
        work_seconds=sum(
            stage.models * min(size * each for size, each in seconds.items())
            for stage, seconds in levels
        ),
    )


def _demands(levels: Iterable[tuple[Stage, int, float]], target: str) -> list[Demand]:
    """Return the jobs, named as in the tree, leaves first. Adjacent pairs are parents.

    Each level is given with the devices and seconds of one model.
    """
    demands: list[Demand] = []
    below: list[str] = []
    for stage, size, seconds in levels:
        level, count = stage.level, stage.parents
        here = [f"{level}.{i}" if level else target for i in range(stage.models)]
        for index, name in enumerate(here):
            parents = tuple(below[count * index :][:count])
            job = Demand(name=name, level=level, devices=size, seconds=seconds, parents=parents)
            demands.append(job)
        below = here
    return demands
