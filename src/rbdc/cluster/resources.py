"""The CPUs and GPUs of each job on a cluster."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rbdc.cluster.allocation import soonest
from rbdc.errors import RunError
from rbdc.jobs.job import Job
from rbdc.plan import Scaling
from rbdc.settings import Cluster

Nodes = Sequence[Mapping[str, Any]]  # as returned by ray.nodes()


@dataclass(frozen=True, kw_only=True, slots=True)
class JobResources:
    """The resources of one job: its processes, and the CPUs and GPUs of each."""

    workers: int
    cpus: float
    gpus: float

    @property
    def per_worker(self) -> dict[str, float]:
        """The GPUs and CPUs of each process, by Ray's names."""
        return {"GPU": self.gpus, "CPU": self.cpus}

    def __str__(self) -> str:
        """Return the GPUs, or else the CPUs, of all processes together."""
        kind = "GPU" if self.gpus else "CPU"
        count = self.workers * self.per_worker[kind]
        return f"{count:g} {kind}{'s' if count > 1 else ''}"


def on_each(nodes: Nodes, kind: str) -> list[float]:
    """Return how many CPUs or GPUs each living node has."""
    return [node["Resources"].get(kind, 0) for node in nodes if node["Alive"]]


def fit(resources: Sequence[JobResources], nodes: Nodes) -> bool:
    """Return whether the nodes together have enough for all. Ray chooses the nodes."""
    return all(
        sum(one.workers * one.per_worker[kind] for one in resources) <= sum(on_each(nodes, kind))
        for kind in ("GPU", "CPU")
    )


def fitting(
    jobs: Sequence[Job],
    resources: Mapping[str, JobResources],
    given: Sequence[JobResources],
    nodes: Nodes,
) -> list[Job]:
    """Return the longest prefix that fits, and at least one job if nothing is running."""
    taken = list(given)
    for number, job in enumerate(jobs):
        taken.append(resources[job.key])
        if len(taken) > 1 and not fit(taken, nodes):
            return list(jobs[:number])
    return list(jobs)


def job_resources(
    jobs: Sequence[Job],
    levels: Mapping[str, int],
    cluster: Cluster,
    nodes: Nodes,
    speeds: Mapping[int, Scaling],
) -> dict[str, JobResources]:
    """Return the resources of each job by key: what the user gave, else a split of the cluster.

    A level's models divide the cluster so that the level finishes first. GPUs are divided only if
    `speeds` has the level's measured speed.
    """
    siblings = Counter(levels[job.key] for job in jobs if job.trains)
    cpus = on_each(nodes, "CPU")
    resources = {}
    for job in jobs:
        level = levels[job.key]
        chosen = _gpus(siblings[level], speeds[level], nodes) if level in speeds else 0
        gpu = _at(cluster.gpus_per_job, level, float(chosen))
        even = min(max(cpus), max(1.0, sum(cpus) // max(1, siblings[level])))
        cpu = _at(cluster.cpus_per_job, level, 1.0 if gpu else even)
        workers = _at(cluster.workers_per_job, level, max(1, int(gpu)))
        if not job.trains:  # growing a model is fast and takes one process
            gpu, cpu, workers = min(1.0, gpu / workers), cpu / workers, 1
        resources[job.key] = JobResources(workers=workers, cpus=cpu / workers, gpus=gpu / workers)
    return resources


def _gpus(models: int, speed: Scaling, nodes: Nodes) -> int:
    """Return the GPUs per model when `models` siblings train at once."""
    gpus = [int(count) for count in on_each(nodes, "GPU")]
    scaling = replace(speed, hardware=replace(speed.hardware, devices_per_node=max(gpus)))
    seconds = {size: scaling.step_seconds(0, size) for size in scaling.group_sizes(sum(gpus))}
    return soonest(max(1, models), seconds, sum(gpus))


def _at(values: Sequence[Any], level: int, otherwise: Any) -> Any:
    return values[min(level, len(values) - 1)] if values else otherwise


def check_resources(nodes: Nodes, resources: Mapping[str, JobResources]) -> None:
    """Refuse resources that the cluster does not have. `resources` are by a name for messages."""
    for kind in ("GPU", "CPU"):
        have = on_each(nodes, kind)
        for name, one in resources.items():
            each = one.per_worker[kind]
            needed = each * one.workers
            if needed > sum(have):
                raise RunError(
                    f"{name} needs {needed:g} {kind}s, and the cluster has {sum(have):g}",
                    f"Use fewer (--{kind.lower()}s-per-job), or add nodes.",
                )
            if each and sum(int(count // each) for count in have) < one.workers:
                raise RunError(
                    f"{name} needs {one.workers} workers with {each:g} {kind}s each, and "
                    f"the nodes have {json.dumps(have)}",
                    f"Use more workers (--workers-per-job), or fewer {kind}s.",
                )
