"""Simulate when each job starts and ends on the devices of a cluster."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from graphlib import TopologicalSorter
from heapq import heappop, heappush
from math import isfinite
from typing import Any

from rbdc.errors import PlanError

SAME_MOMENT = 1e-9  # relative: jobs that end this close together end at the same time

# Runs of adjacent devices: (first device, number of devices).
DeviceRuns = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """A job to be scheduled."""

    name: str
    """Name in the tree: 2.3, 1.0, target or standard."""
    level: int
    devices: int
    seconds: float
    parents: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """The time and devices of a job."""

    name: str
    level: int
    devices: int
    start_seconds: float
    end_seconds: float
    places: DeviceRuns
    """Devices of the job, as runs of adjacent devices."""

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Summary of the jobs of one level."""

    level: int
    models: int
    devices: int
    """Devices per model."""
    waves: int
    """Rounds in which the level's models train, if all devices are used."""
    start_seconds: float
    end_seconds: float
    device_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Timetable:
    """The schedule of jobs on a cluster, with lower bounds of its length."""

    devices: int
    slots: tuple[Slot, ...]
    """Slots of all jobs, in the order of their start."""
    critical_path_seconds: float
    """Length of the longest chain of jobs: a lower bound for any number of devices."""
    work_seconds: float
    """Device-seconds of all jobs: the time on one device."""

    @property
    def makespan_seconds(self) -> float:
        return max(slot.end_seconds for slot in self.slots)

    @property
    def device_seconds(self) -> float:
        """Device-seconds of all jobs, without idle time."""
        return sum(slot.devices * slot.seconds for slot in self.slots)

    @property
    def bound_seconds(self) -> float:
        """Lower bound of the makespan: the critical path, or the work divided by the devices."""
        return max(self.critical_path_seconds, self.work_seconds / self.devices)

    @property
    def gap(self) -> float:
        """Makespan relative to the bound, minus 1: 0.1 means 10 % longer."""
        return self.makespan_seconds / self.bound_seconds - 1

    @property
    def idle_share(self) -> float:
        """Fraction of all device-seconds that are idle, from the first start to the last end."""
        return 1 - self.device_seconds / (self.devices * self.makespan_seconds)

    @property
    def rows(self) -> tuple[Row, ...]:
        """Return one row per level, the target first."""
        found = []
        for level in sorted({slot.level for slot in self.slots}):
            here = [slot for slot in self.slots if slot.level == level]
            each = max(slot.devices for slot in here)
            found.append(
                Row(
                    level=level,
                    models=len(here),
                    devices=each,
                    waves=-(-len(here) // (self.devices // each)),
                    start_seconds=min(slot.start_seconds for slot in here),
                    end_seconds=max(slot.end_seconds for slot in here),
                    device_seconds=sum(slot.devices * slot.seconds for slot in here),
                )
            )
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        times = ("makespan", "device", "critical_path", "work", "bound")
        names = ("devices", *(f"{time}_seconds" for time in times), "gap", "idle_share")
        return {name: getattr(self, name) for name in names} | {
            "levels": [asdict(row) for row in self.rows],
            "slots": [asdict(slot) for slot in self.slots],
        }


def simulate(demands: Sequence[Demand], devices: int) -> Timetable:
    """Simulate an engine that starts each job once its parents are done and devices are free.

    Jobs that are ready start in the given order. None starts before an earlier one that waits for
    devices.
    """
    _check(demands, devices)
    by_name = {demand.name: (order, demand) for order, demand in enumerate(demands)}
    parents = TopologicalSorter({demand.name: demand.parents for demand in demands})
    parents.prepare()
    now, free = 0.0, [(0, devices)]
    ready: list[tuple[int, Demand]] = []
    running: list[tuple[float, int, Slot]] = []
    slots: list[Slot] = []
    while parents.is_active():
        for name in parents.get_ready():
            heappush(ready, by_name[name])
        while ready and sum(count for _, count in free) >= ready[0][1].devices:
            order, demand = heappop(ready)
            slot = Slot(
                name=demand.name,
                level=demand.level,
                devices=demand.devices,
                start_seconds=now,
                end_seconds=now + demand.seconds,
                places=_take(free, demand.devices),
            )
            slots.append(slot)
            heappush(running, (slot.end_seconds, order, slot))
        moment = running[0][0] * (1 + SAME_MOMENT)
        while running and running[0][0] <= moment:  # all jobs that end at that time
            now, _, slot = heappop(running)
            free = _merged([*free, *slot.places])
            parents.done(slot.name)
    ends: dict[str, float] = {}  # on any number of devices
    for demand in demands:
        ends[demand.name] = demand.seconds + max((ends[p] for p in demand.parents), default=0.0)
    return Timetable(
        devices=devices,
        slots=tuple(slots),
        critical_path_seconds=max(ends.values()),
        work_seconds=sum(demand.devices * demand.seconds for demand in demands),
    )


def _take(free: list[tuple[int, int]], devices: int) -> DeviceRuns:
    """Take adjacent devices if enough are free, else the first free ones."""
    adjacent = [run for run in free if run[1] >= devices][:1]
    taken: list[tuple[int, int]] = []
    for first, count in adjacent or list(free):
        part = min(count, devices)
        free.remove((first, count))
        if part < count:
            free.append((first + part, count - part))
        taken.append((first, part))
        devices -= part
        if not devices:
            break
    free.sort()
    return tuple(taken)


def _merged(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the same devices in as few runs as possible."""
    merged: list[tuple[int, int]] = []
    for first, count in sorted(runs):
        if merged and sum(merged[-1]) == first:
            first, count = merged[-1][0], merged.pop()[1] + count
        merged.append((first, count))
    return merged


def _check(demands: Sequence[Demand], devices: int) -> None:
    known: set[str] = set()
    if not demands:
        raise PlanError("there are no jobs", "Give one or more.")
    for demand in demands:
        name, size, seconds = demand.name, demand.devices, demand.seconds
        problem = remedy = ""
        if size > devices:
            problem = f"{name} asks for {size} devices, and there are {devices}"
            remedy = "Give it fewer devices, or use more."
        elif not (isfinite(seconds) and seconds > 0 and size > 0):
            problem = f"{name} takes {seconds:g} s on {size} devices"
            remedy = "Both must be positive."
        elif strange := set(demand.parents) - known:
            problem = f"the parent {min(strange)} of {name} comes after it, or does not exist"
            remedy = "Give parents before their children."
        elif name in known:
            problem, remedy = f"two jobs are called {name}", "Use unique names."
        if problem:
            raise PlanError(problem, remedy)
        known.add(name)
