"""Jobs: what has to be computed. A job declares its parents and runs itself.

A job's key is the hash of everything that decides its result: model, recipe, seeds, length, the
data's fingerprint and the keys of its parents. So a finished job is never computed again, whoever
needs it. Engines know this interface and nothing else.
"""

import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from rbdc.disk import json_text, write_text
from rbdc.errors import RbdcError, RunError
from rbdc.jobs.layout import CHECKPOINTS, PROGRESS
from rbdc.jobs.store import Store
from rbdc.plan import Scaling
from rbdc.settings import Machine
from rbdc.training import Observer, Progress, Session, Trained, World, train_together
from rbdc.training.checkpoint import common_step

if TYPE_CHECKING:
    from rbdc.jobs.ways import Way

FORMAT = 5  # of what jobs leave in their folders; another number makes other keys
PROGRESS_SECONDS = 2.0  # between two writes of progress.json


@dataclass(frozen=True, kw_only=True)
class Context:
    """Where a job runs: the store, this process's machine, the processes that train together."""

    store: Store
    machine: Machine
    world: World
    share: float = 1.0
    """The part of the machine that the job has: others beside it have the rest."""

    def with_threads(self, threads: int, share: float = 1.0) -> "Context":
        """Return the same context with another number of CPU threads, and its part of them all."""
        return replace(self, machine=replace(self.machine, threads=threads), share=share)

    def costs(self, result: dict[str, Any]) -> dict[str, Any]:
        """Return the result with the time that the job had the machine, or a device, to itself."""
        return {**result, "device_seconds": self.share * result["seconds"]}


class Job(ABC):
    """Something to compute once its parents are computed."""

    trains: ClassVar[bool] = False
    """Whether it is a training: it takes long and reports progress."""
    compiles: ClassVar[bool] = False
    """Whether torch.compile may pay: a training whose batches have one shape."""
    parents: "tuple[Job, ...]"
    """Jobs that must be finished first."""
    metrics: ClassVar[tuple[str, ...]] = ("top1",)
    """Names of the metrics shown to people, the primary one first."""

    @abstractmethod
    def content(self) -> dict[str, Any]:
        """Return everything that decides the result."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return what run.json says about the job: its kind at least."""

    @property
    @abstractmethod
    def label(self) -> str:
        """The name of its folder, before the key."""

    @property
    def size(self) -> str:
        """The size of its model, for people."""
        return ""

    @property
    @abstractmethod
    def flops(self) -> float:
        """FLOPs of this job alone."""

    @property
    @abstractmethod
    def model_bytes(self) -> int:
        """Bytes of the model's weights."""

    @abstractmethod
    def result_bytes(self) -> int:
        """Return the bytes that the finished job leaves on disk."""

    def checkpoint_bytes(self, machine: Machine) -> int:  # noqa: ARG002
        """Return the bytes of checkpoints on disk while the job runs."""
        return 0

    def check(self, machine: Machine, processes: int) -> None:  # noqa: B027
        """Refuse what can be known to fail on any machine with so many processes per training."""

    def check_device(self, machine: Machine, local_rank: int = 0) -> None:  # noqa: B027
        """Refuse what this machine cannot do."""

    def loader_processes(self, machine: Machine) -> int:
        """Return how many processes decode images beside a training."""
        return machine.workers or 0

    def measure_scaling(self, machine: Machine) -> Scaling:
        """Return how fast the training is on one such device, and on several."""
        raise NotImplementedError(f"{type(self).__name__} trains nothing")

    @cached_property
    def key(self) -> str:
        """The hash of the content."""
        text = json.dumps(self.content(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def total_flops(self) -> float:
        """FLOPs of this job and of everything it came from, each counted for every use."""
        return self.flops + sum(parent.total_flops for parent in self.parents)


class QuickJob(Job):
    """A job of seconds or minutes, which is not saved on the way."""

    @abstractmethod
    def run(self, context: Context) -> dict[str, Any]:
        """Compute the result. The parents are finished."""


class TrainingJob(Job):
    """A training: it is resumed from its last checkpoint, and can share its batches with others."""

    trains = True

    @property
    def stream(self) -> str | None:
        """Name its batches: jobs with equal names train on equal ones. None: it trains alone."""
        return None

    @property
    def fused(self) -> int:
        """Number of trainings with equal streams that are one computation; 0: it is on its own."""
        return 0

    def expected_seconds(self, machine: Machine) -> float | None:  # noqa: ARG002
        """Return the seconds that it takes on this machine, if that can be measured quickly."""
        return None

    def ways(
        self,
        siblings: int,  # noqa: ARG002
        threads: int,  # noqa: ARG002
        machine: Machine,  # noqa: ARG002
    ) -> "list[Way]":
        """Return the ways to train so many such models here, the one to use first."""
        return []

    @property
    def sequence_length(self) -> int | None:
        """Tokens per sequence of a language model's training; None for images."""
        return None

    @abstractmethod
    def session(self, context: Context, observe: Observer, resume_at: int | None = None) -> Session:
        """Return a session from the start, the last checkpoint, or that of step `resume_at`."""

    @abstractmethod
    def finish(self, context: Context, session: Session, trained: Trained) -> dict[str, Any]:
        """Write what the training leaves in its folder, and return its result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A job with its name and its level in a run."""

    name: str
    level: int
    """0 is the target's level."""
    job: Job


def execute(
    job: Job, context: Context, *, observe: Observer, stopped: Callable[[], bool]
) -> dict[str, Any]:
    """Run the job unless it is finished, and return its result. Its parents must be finished."""
    ((_, outcome),) = execute_together(
        [job], context, observe=lambda _job, progress: observe(progress), stopped=stopped
    )
    if isinstance(outcome, RbdcError):
        raise outcome
    return outcome


def execute_together(
    jobs: Sequence[Job],
    context: Context,
    *,
    observe: Callable[[Job, Progress], None],
    stopped: Callable[[], bool],
) -> Generator[tuple[Job, dict[str, Any] | RbdcError], None, None]:
    """Run a job, or trainings with equal streams; yield each with its result or its error.

    Jobs that are finished already are not run again. The parents of all must be finished.
    """
    store, world = context.store, context.world
    sessions: dict[Session, TrainingJob] = {}
    fused = isinstance(jobs[0], TrainingJob) and jobs[0].fused
    resume_at = common_step([store.folder(job) / CHECKPOINTS for job in jobs]) if fused else None
    with ExitStack() as stack:
        for job in jobs:
            result = world.broadcast(partial(store.result, job))
            if result is not None:
                yield job, result
                continue
            world.broadcast(partial(store.begin, job))
            try:
                if isinstance(job, TrainingJob):
                    observer = _logged(partial(observe, job), store.folder(job))
                    session = stack.enter_context(job.session(context, observer, resume_at))
                    sessions[session] = job
                    continue
                assert isinstance(job, QuickJob)
                result = context.costs(job.run(context))
                world.broadcast(partial(store.finish, job, result))
                yield job, result
            except RbdcError as error:
                yield job, error
        if not sessions:
            return
        if fused and len(sessions) < fused and not all(s.finished for s in sessions):
            yield from ((job, _incomplete(job, store)) for job in sessions.values())
            return
        try:
            together = train_together(list(sessions), stopped, fused=bool(fused))
            for session, outcome in together:
                training = sessions[session]
                ended: dict[str, Any] | RbdcError
                if isinstance(outcome, Trained):
                    result = context.costs(training.finish(context, session, outcome))
                    world.broadcast(partial(store.finish, training, result))
                    ended = result
                else:
                    ended = outcome
                del sessions[session]
                yield training, ended
        except RbdcError as error:  # what concerns all of them, such as a full disk
            yield from ((job, error) for job in sessions.values())
        except torch.OutOfMemoryError as error:
            explained = next(iter(sessions)).explain(error)
            yield from ((job, explained) for job in sessions.values())


def _incomplete(job: Job, store: Store) -> RunError:
    return RunError(
        f"{store.folder(job)} was trained as one with models that are finished or removed",
        "Start again in another folder, or train models apart (--fuse off).",
    )


def _logged(observe: Observer, folder: Path) -> Observer:
    """Return an observer that also writes progress.json every few seconds."""
    written, scores = 0.0, None

    def log(progress: Progress) -> None:
        nonlocal written, scores
        observe(progress)
        scores = progress.scores or scores  # the last ones stay visible
        if progress.scores is not None or time.monotonic() - written > PROGRESS_SECONDS:
            written = time.monotonic()
            so_far = replace(progress, scores=scores)
            write_text(folder / PROGRESS, json_text(asdict(so_far)))  # may be lost

    return log
