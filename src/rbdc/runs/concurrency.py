"""How many trainings run side by side, with how many threads, by which engine, and for how long."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from rbdc.cluster.ray_engine import RayEngine
from rbdc.jobs.engine import Engine, Event, InProcess, SideBySide
from rbdc.jobs.job import Job, Node, TrainingJob
from rbdc.jobs.store import Store
from rbdc.runs.request import Run, Where
from rbdc.training.machine import default_threads


@dataclass(frozen=True, slots=True)
class Concurrency:
    """How many trainings run side by side on this machine, and with how many threads in all."""

    jobs: int
    threads: int
    reason: str = ""
    """The measurement that decided, for people."""


def choose_concurrency(run: Run, where: Where, old: Mapping[str, Any]) -> Concurrency:
    """Return what was asked for, or used before in this folder, or what is faster."""
    trainings = [node.job for node in run.nodes if isinstance(node.job, TrainingJob)]
    loaders = max(job.loader_processes(where.machine) for job in trainings)
    threads = where.machine.threads or old.get("threads") or default_threads(loaders)
    same_engine = old.get("name") == where.cluster.engine
    jobs = where.jobs or (old["jobs"] if same_engine else 0)
    if where.node or where.world.size > 1 or where.cluster.engine != "local":
        return Concurrency(1, threads)
    if jobs:
        return Concurrency(jobs, threads)
    deepest = max(node.level for node in run.nodes)
    leaves = [
        node.job
        for node in run.nodes
        if node.level == deepest and isinstance(node.job, TrainingJob) and not node.job.parents
    ]
    ways = leaves[0].ways(len(leaves), threads, where.machine)
    mine = [way for way in ways if (way.fused > 1) == bool(leaves[0].fused)]
    if not mine:
        return Concurrency(1, threads)
    others = ", ".join(str(way) for way in ways if way != mine[0])
    reason = f"{len(leaves)} models train in {mine[0]}; measured beside {others or 'nothing'}"
    return Concurrency(mine[0].processes, threads, reason)


def siblings_of(run: Run) -> dict[str, int]:
    """Return how many jobs can run at the same time as each job, itself among them, by key.

    They have the same level and as many generations of parents: the target and the standard
    training beside it have not.
    """

    def group(node: Node) -> tuple[int, int, bool]:
        return node.level, _generation(node.job), node.job.trains

    number = Counter(map(group, run.nodes))
    return {node.job.key: number[group(node)] for node in run.nodes}


def _generation(job: Job) -> int:
    return 1 + max(map(_generation, job.parents), default=0)


def threads_of(run: Run, concurrency: Concurrency) -> dict[str, int]:
    """Return the CPU threads of each job: siblings divide them, and one alone has all."""
    return {
        key: max(1, concurrency.threads // min(concurrency.jobs, siblings))
        for key, siblings in siblings_of(run).items()
    }


def expected_times(
    run: Run, store: Store, concurrency: Concurrency, where: Where
) -> Iterator[Event]:
    """Yield the time of each training that is not finished; of none, if one's is not known.

    Models of a level that train side by side divide the time among them.
    """
    threads, siblings = threads_of(run, concurrency), siblings_of(run)
    events = []
    for node in run.nodes:
        job = node.job
        if isinstance(job, TrainingJob) and store.result(job) is None:
            seconds = job.expected_seconds(replace(where.machine, threads=threads[job.key]))
            if seconds is None:
                return
            side = min(concurrency.jobs, siblings[job.key])
            events.append(Event(kind="expected", key=job.key, seconds=seconds / side))
    yield from events


def make_engine(run: Run, concurrency: Concurrency, where: Where) -> Engine:
    """Return the engine: the cluster's, or one for this machine."""
    if where.cluster.engine == "ray":
        levels = {node.job.key: node.level for node in run.nodes}
        return RayEngine(cluster=where.cluster, levels=levels)
    jobs, threads, each = concurrency.jobs, concurrency.threads, threads_of(run, concurrency)
    if jobs == 1:
        return InProcess(threads=each)
    gpus = torch.cuda.device_count() if where.machine.device in ("auto", "cuda") else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    devices = [visible.split(",")[number % gpus] for number in range(jobs)] if gpus else []
    return SideBySide(workers=jobs, threads=each, all_threads=max(threads, jobs), devices=devices)
