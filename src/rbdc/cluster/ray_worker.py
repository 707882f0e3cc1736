"""A job on a Ray cluster, as its workers see it."""

import os
import pickle
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

from rbdc.cluster.resources import Share
from rbdc.disk import write_text
from rbdc.errors import Interrupted, RbdcError, RunError
from rbdc.jobs.engine import stop_requested
from rbdc.jobs.job import Context, Job, execute
from rbdc.jobs.layout import LEASE
from rbdc.plan import Scaling
from rbdc.training import Progress, join_world

LISTEN_SECONDS, TELL_SECONDS = 0.5, 2.0
GROUP = ".ray-train"  # what Ray Train leaves in a job's folder, until the job ends


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One try at a job: who tries, for whom, with what."""

    name: str
    key: str
    """Key of the job."""
    share: Share
    threads: int
    """Of each process; 0 is torch's choice."""
    board: Any
    cwd: str
    """Of the driver: relative paths are meant to be there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of an attempt. Without anything, its worker was told to stop and has saved."""

    result: dict[str, Any] | None = None
    error: RbdcError | None = None
    lost: str = ""
    """Why it ended through no fault of the job."""


def look(packed: bytes, measured: Mapping[int, str], cwd: str) -> dict[int, Scaling] | RbdcError:
    """Check that the jobs can run on this machine, and measure how fast some of them train.

    `measured` are keys of jobs, by level. Returns the error where one cannot run.
    """
    jobs, context = _unpacked(packed, cwd)
    try:
        for job in jobs.values():
            job.check_device(context.machine)
        return {
            level: jobs[key].measure_scaling(context.machine) for level, key in measured.items()
        }
    except RbdcError as error:
        return error


def work(attempt: Attempt, packed: bytes) -> Outcome:
    """Run the job in this process. A stop signal to it is obeyed like one to the driver."""
    job, context = _begin(attempt, packed)
    _take_lease(attempt, context.store.folder(job))
    with stop_requested() as signalled:
        return _outcome(attempt, job, context, signalled)


def lead(attempt: Attempt, packed: bytes) -> Outcome:
    """Let a torch group of Ray Train do the job, and wait for it. This process only waits."""
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
    from ray import train
    from ray.train.torch import TorchConfig, TorchTrainer

    job, context = _begin(attempt, packed)
    folder, share = context.store.folder(job), attempt.share
    _take_lease(attempt, folder)
    trainer = TorchTrainer(
        follow,
        train_loop_config={"attempt": attempt, "packed": packed},
        torch_config=TorchConfig(backend="nccl" if share.gpus else "gloo"),
        scaling_config=train.ScalingConfig(
            num_workers=share.workers,
            use_gpu=bool(share.gpus),
            resources_per_worker={"CPU": share.cpus} | ({"GPU": share.gpus} if share.gpus else {}),
        ),
        run_config=train.RunConfig(name=attempt.name, storage_path=str(folder / GROUP)),
    )
    try:
        trainer.fit()  # Ray Train saves nothing and tries once: checkpoints and retries are ours
    except train.WorkerGroupError as error:
        return _blame(list(error.worker_failures.values()))
    except train.TrainingFailedError as error:
        return Outcome(lost=_last_line(error))
    finally:
        shutil.rmtree(folder / GROUP, ignore_errors=True)
    return Outcome(result=context.store.result(job))


def follow(config: dict[str, Any]) -> None:
    """One process of a group. Ray Train has joined them already."""
    attempt: Attempt = config["attempt"]
    job, context = _begin(attempt, config["packed"])
    world = join_world(context.machine.device)
    outcome = _outcome(attempt, job, replace(context, world=world), lambda: False)
    if outcome.error is not None:
        raise outcome.error
    if outcome.result is None:
        raise Interrupted("stopped")


def _begin(attempt: Attempt, packed: bytes) -> tuple[Job, Context]:
    jobs, context = _unpacked(packed, attempt.cwd)
    return jobs[attempt.key], context.with_threads(attempt.threads)


def _unpacked(packed: bytes, cwd: str) -> tuple[dict[str, Job], Context]:
    with suppress(OSError):  # another machine may not have it
        os.chdir(cwd)
    jobs, context = pickle.loads(packed)
    return jobs, context


def _outcome(
    attempt: Attempt, job: Job, context: Context, signalled: Callable[[], bool]
) -> Outcome:
    listener = _Listener(attempt, context.store.folder(job) / LEASE)
    try:
        result = execute(
            job,
            context,
            observe=_Reporter(attempt),
            stopped=lambda: listener() or signalled(),
        )
        if context.world.is_main:  # finished: an older attempt that still runs sees that and ends
            listener.lease.unlink(missing_ok=True)
        return Outcome(result=result)
    except Interrupted:
        return Outcome()
    except RbdcError as error:
        return Outcome(error=error)


def _take_lease(attempt: Attempt, folder: Path) -> None:
    """Let this attempt, and no earlier one, write into the job's folder.

    Ray ends the processes of a node that it has given up, but a node that is only cut off notices
    that late. Until then it would go on, beside the attempt that replaced it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / LEASE, attempt.name)


class _Listener:
    """Answer whether to stop: called at every step, looked up now and then."""

    def __init__(self, attempt: Attempt, lease: Path) -> None:
        self.attempt, self.lease = attempt, lease
        self.answer = self._ask()
        self.looked, self.stop = time.monotonic(), False

    def _ask(self) -> Future[bool]:
        # Not ray.wait, not even for no time: Ray takes a task that waits for blocked, and gives its
        # cores to another one.
        answer: Future[bool] = self.attempt.board.ended.remote().future()
        return answer

    def __call__(self) -> bool:
        if time.monotonic() - self.looked > LISTEN_SECONDS:
            self._check_lease()
            self.stop = self.stop or self._told_to_stop()
            self.looked = time.monotonic()
        return self.stop

    def _told_to_stop(self) -> bool:
        if not self.answer.done():
            return False
        try:
            return bool(self.answer.result())
        except RayActorError:  # the board fell off the wall; Ray hangs up another
            self.answer = self._ask()
            return False

    def _check_lease(self) -> None:
        try:
            holder = self.lease.read_text()
        except FileNotFoundError:
            holder = "nobody, for it is finished"
        except OSError:  # the disk is away for a moment: saving would say so
            return
        if holder != self.attempt.name:
            raise RunError(
                f"the job {self.attempt.key[:16]} was given to another worker: {holder}",
                "Nothing is lost: that one goes on from the last checkpoint.",
            )


class _Reporter:
    """Progress, passed on now and then, and never waited for."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt, self.told = attempt, time.monotonic()
        self.node = ray.get_runtime_context().get_node_id()
        self._pin(None)  # it has begun

    def __call__(self, progress: Progress) -> None:
        if progress.scores is not None or time.monotonic() - self.told > TELL_SECONDS:
            self.told = time.monotonic()
            self._pin(progress)

    def _pin(self, progress: Progress | None) -> None:
        self.attempt.board.pin.remote(self.attempt.name, pickle.dumps((self.node, progress)))


def _blame(failures: list[Exception]) -> Outcome:
    """One of a group failed, and the others failed for want of it: who was first?"""
    for error in failures:
        if isinstance(error, RbdcError):
            return Outcome(error=error)
    for error in failures:
        if isinstance(error, Interrupted):
            return Outcome()
    return Outcome(lost="; ".join(map(_last_line, failures)))


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
