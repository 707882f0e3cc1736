"""What each job gets of a cluster's CPUs and GPUs."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from rbdc.cluster import soonest
from rbdc.errors import RunError
from rbdc.jobs.job import Job
from rbdc.plan import Scaling
from rbdc.settings import Cluster

Nodes = Sequence[Mapping[str, Any]]  # as Ray describes them


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one process of a job may use."""

    workers: int
    """Processes of the job."""
    cpus: float
    gpus: float

    def __str__(self) -> str:
        """Of all of them."""
        count, kind = (self.gpus, "GPU") if self.gpus else (self.cpus, "CPU")
        return f"{self.workers * count:g} {kind}{'s' if self.workers * count > 1 else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What all nodes have together."""

    cpus: float
    gpus: float

    @classmethod
    def of(cls, nodes: Nodes) -> Self:
        return cls(cpus=sum(_each(nodes, "CPU")), gpus=sum(_each(nodes, "GPU")))

    def first_of(
        self, jobs: Sequence[Job], shares: Mapping[str, Share], given: Sequence[Share]
    ) -> list[Job]:
        """Those of them, in their order, that find room beside what is given; one does always."""
        taken, first = list(given), []
        for job in jobs:
            if taken and not self.holds([*taken, shares[job.key]]):
                break
            taken.append(shares[job.key])
            first.append(job)
        return first

    def holds(self, shares: Sequence[Share]) -> bool:
        """Whether there is enough for all of them; on which nodes is for Ray to find out."""
        return self.cpus >= sum(share.workers * share.cpus for share in shares) and (
            self.gpus >= sum(share.workers * share.gpus for share in shares)
        )


def shares_of(
    jobs: Sequence[Job],
    levels: Mapping[str, int],
    cluster: Cluster,
    nodes: Nodes,
    speeds: Mapping[int, Scaling],
) -> dict[str, Share]:
    """Of each job, by key: what is asked for; of the rest, all that there is.

    A level's models divide it, as many of them side by side as end soonest. GPUs are given where
    `speeds` (by level) says how fast they are.
    """
    siblings = Counter(levels[job.key] for job in jobs if job.trains)
    cpus = _each(nodes, "CPU")
    shares = {}
    for job in jobs:
        level = levels[job.key]
        chosen = _gpus(siblings[level], speeds[level], nodes) if level in speeds else 0
        gpu = _at(cluster.gpus_per_job, level, float(chosen))
        even = min(max(cpus), max(1.0, sum(cpus) // max(1, siblings[level])))
        cpu = _at(cluster.cpus_per_job, level, 1.0 if gpu else even)
        workers = _at(cluster.workers_per_job, level, max(1, int(gpu)))
        if not job.trains:  # made by one process, in no time
            gpu, cpu, workers = min(1.0, gpu / workers), cpu / workers, 1
        shares[job.key] = Share(workers=workers, cpus=cpu / workers, gpus=gpu / workers)
    return shares


def _gpus(models: int, speed: Scaling, nodes: Nodes) -> int:
    """Of each of so many models."""
    gpus = [int(count) for count in _each(nodes, "GPU")]
    scaling = replace(speed, hardware=replace(speed.hardware, devices_per_node=max(gpus)))
    seconds = {size: scaling.step_seconds(0, size) for size in scaling.group_sizes(sum(gpus))}
    return soonest(max(1, models), seconds, sum(gpus))


def _at(values: Sequence[Any], level: int, otherwise: Any) -> Any:
    return values[min(level, len(values) - 1)] if values else otherwise


def check_resources(nodes: Nodes, shares: Mapping[str, Share]) -> None:
    """Refuse what the cluster can never give. `shares` are by what they are for."""
    for kind in ("GPU", "CPU"):
        have = _each(nodes, kind)
        for name, share in shares.items():
            each = share.gpus if kind == "GPU" else share.cpus
            if each * share.workers > sum(have):
                raise RunError(
                    f"{name} is to have {each * share.workers:g} {kind}s, and the cluster has "
                    f"{sum(have):g}",
                    f"Ask for fewer (--{kind.lower()}s-per-job), or add nodes.",
                )
            if sum(int(count // each) for count in have if each) < share.workers and each:
                raise RunError(
                    f"{name} is to have {share.workers} workers with {each:g} {kind}s each, and "
                    f"the nodes have {json.dumps(have)}",
                    "Give it more workers (--workers-per-job), or fewer of them.",
                )


def _each(nodes: Nodes, kind: str) -> list[float]:
    """What each node that is there has of it."""
    return [node["Resources"].get(kind, 0) for node in nodes if node["Alive"]]
