"""Do one job, whatever it is, and leave the result in the store."""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rbdc.disk import write_text
from rbdc.jobs.job import Job
from rbdc.jobs.layout import PROGRESS
from rbdc.jobs.store import Store
from rbdc.jobs.tree import Node
from rbdc.plan import Scaling
from rbdc.settings import Machine
from rbdc.training import Observer, Progress, World

PROGRESS_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class Workshop(ABC):
    """What it takes to do jobs of a kind: those of a tree, or detection's."""

    store: Store
    machine: Machine
    world: World

    @abstractmethod
    def do(self, job: Job, observe: Observer, stopped: Callable[[], bool]) -> dict[str, Any]:
        """Do it, or go on with it, in its folder; its result. Its parents are finished."""

    @abstractmethod
    def flops(self, job: Job) -> float:
        """Of this job alone."""

    @abstractmethod
    def check(self, jobs: Sequence[Job]) -> None:
        """Refuse what can be known to fail, on any machine, before the first step."""

    @abstractmethod
    def check_device(self, jobs: Sequence[Job]) -> None:
        """Refuse what this machine cannot do."""

    @abstractmethod
    def scaling(self, job: Job) -> Scaling:
        """How fast the job's training is on this machine's device, and on several such."""

    @abstractmethod
    def needed_bytes(self, nodes: Sequence[Node], at_a_time: int | None) -> int:
        """Of the disk, for what is still to come of these."""

    @abstractmethod
    def data_record(self) -> dict[str, Any]:
        """The data, for run.json."""

    def decoders(self, jobs: Sequence[Job]) -> int:  # noqa: ARG002
        """Processes that decode images beside a training."""
        return self.machine.workers

    def default_jobs(self, jobs: Sequence[Job], threads: int) -> int:  # noqa: ARG002
        """How many to do side by side with so many threads, if nobody says."""
        return 1

    def work(self, jobs: Iterable[Job]) -> dict[str, float]:
        """FLOPs of each job alone, by its key."""
        return {job.key: self.flops(job) for job in jobs}


def execute(
    job: Job, shop: Workshop, *, observe: Observer, stopped: Callable[[], bool]
) -> dict[str, Any]:
    """Do the job, or find it done; its result. Parents must be finished."""
    result = shop.world.broadcast(lambda: shop.store.result(job))
    if result is not None:
        return result
    shop.world.broadcast(lambda: str(shop.store.begin(job)))
    result = shop.do(job, _noting(observe, shop.store.folder(job)), stopped)
    shop.world.broadcast(lambda: shop.store.finish(job, result))
    return result


def _noting(observe: Observer, folder: Path) -> Observer:
    """The observer, with what it is told written down for others now and then."""
    noted, scores = 0.0, None

    def note(progress: Progress) -> None:
        nonlocal noted, scores
        observe(progress)
        scores = progress.scores or scores  # the last ones stay to be seen
        if progress.scores is not None or time.monotonic() - noted > PROGRESS_SECONDS:
            noted = time.monotonic()
            so_far = replace(progress, scores=scores)
            write_text(folder / PROGRESS, json.dumps(so_far.to_json()))  # may be lost

    return note
