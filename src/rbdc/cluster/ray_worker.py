"""Run a job in the worker processes of a Ray cluster."""

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

from rbdc.cluster.resources import JobResources
from rbdc.disk import write_text
from rbdc.errors import Interrupted, RbdcError, RunError
from rbdc.jobs.engine import stop_requested
from rbdc.jobs.job import Context, Job, execute
from rbdc.jobs.layout import LEASE
from rbdc.plan import Scaling
from rbdc.training import Progress, join_world

LISTEN_SECONDS, REPORT_SECONDS = 0.5, 2.0
GROUP = ".ray-train"  # Ray Train's files in a job's folder, deleted when the job ends


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One attempt at a job, with its resources."""

    name: str
    key: str
    """Key of the job."""
    resources: JobResources
    board: Any


Outcome = dict[str, Any] | RbdcError | Interrupted
"""The job's result, its error, or the reason of an end that the job did not cause."""


def probe(packed: bytes, measured: Mapping[int, str]) -> dict[int, Scaling] | RbdcError:
    """Check that the jobs can run on this machine, and measure how fast some of them train.

    `measured` are keys of jobs, by level. Returns the error where one cannot run.
    """
    jobs, context = _unpacked(packed)
    try:
        for job in jobs.values():
            job.check_device(context.machine)
        return {n: jobs[key].measure_scaling(context.machine) for n, key in measured.items()}
    except RbdcError as error:
        return error


def run_alone(attempt: Attempt, packed: bytes) -> Outcome:
    """Run the job in this process. A stop signal to this process also stops the job."""
    job, context = _begin(attempt, packed)
    _take_lease(attempt, context.store.folder(job))
    with stop_requested() as signalled:
        return _outcome(attempt, job, context, signalled)


def run_group(attempt: Attempt, packed: bytes) -> Outcome:
    """Run the job in a group of processes of Ray Train, and wait for it."""
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
    from ray import train
    from ray.train.torch import TorchConfig, TorchTrainer

    job, context = _begin(attempt, packed)
    folder, resources = context.store.folder(job), attempt.resources
    _take_lease(attempt, folder)
    trainer = TorchTrainer(
        run_rank,
        train_loop_config={"attempt": attempt, "packed": packed},
        torch_config=TorchConfig(backend="nccl" if resources.gpus else "gloo"),
        scaling_config=train.ScalingConfig(
            num_workers=resources.workers,
            use_gpu=bool(resources.gpus),
            resources_per_worker=resources.per_worker,
        ),
        run_config=train.RunConfig(name=attempt.name, storage_path=str(folder / GROUP)),
    )
    try:
        trainer.fit()  # without Ray Train's checkpoints and retries: the engine has its own
    except train.WorkerGroupError as error:
        return _first_failure(list(error.worker_failures.values()))
    except train.TrainingFailedError as error:
        return Interrupted(_first_line(error))
    finally:
        shutil.rmtree(folder / GROUP, ignore_errors=True)
    return context.store.result(job) or Interrupted("its result cannot be read")


def run_rank(config: dict[str, Any]) -> None:
    """Run one process of a group. Ray Train has initialised its process group."""
    job, context = _begin(config["attempt"], config["packed"])
    world = join_world(context.machine.device)
    outcome = _outcome(config["attempt"], job, replace(context, world=world))
    if not isinstance(outcome, dict):
        raise outcome


def _begin(attempt: Attempt, packed: bytes) -> tuple[Job, Context]:
    jobs, context = _unpacked(packed)
    each = attempt.resources
    threads = context.machine.threads or (0 if each.gpus else max(1, int(each.cpus)))
    return jobs[attempt.key], context.with_threads(threads)


def _unpacked(packed: bytes) -> tuple[dict[str, Job], Context]:
    """Return the jobs by key, after changing to the driver's working directory."""
    jobs, context, cwd = pickle.loads(packed)
    with suppress(OSError):  # the folder may not exist on this machine
        os.chdir(cwd)
    return jobs, context


def _outcome(
    attempt: Attempt, job: Job, context: Context, signalled: Callable[[], bool] = lambda: False
) -> Outcome:
    listener = _Listener(attempt, context.store.folder(job) / LEASE)
    try:
        result = execute(
            job, context, observe=_Reporter(attempt), stopped=lambda: listener() or signalled()
        )
        if context.world.is_main:  # finished: an older attempt that still runs sees that and ends
            listener.lease.unlink(missing_ok=True)
        return result
    except Interrupted:
        return Interrupted("its worker got a stop signal")
    except RbdcError as error:
        return error


def _take_lease(attempt: Attempt, folder: Path) -> None:
    """Let this attempt, and no earlier one, write into the job's folder.

    Ray ends the processes of a node that it has given up, but a node that is only cut off notices
    that late. Until then it would go on, beside the attempt that replaced it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / LEASE, attempt.name)


class _Listener:
    """Return whether to stop. Called at every step, it checks every LISTEN_SECONDS."""

    def __init__(self, attempt: Attempt, lease: Path) -> None:
        self.attempt, self.lease = attempt, lease
        self.looked, self.stop = time.monotonic(), False
        self._ask()

    def _ask(self) -> None:
        # Not ray.wait, even with a timeout of 0: Ray treats a waiting task as blocked, and gives
        # its cores to another task.
        self.answer: Future[bool] = self.attempt.board.ended.remote().future()

    def __call__(self) -> bool:
        if time.monotonic() - self.looked > LISTEN_SECONDS:
            self._check_lease()
            if not self.stop and self.answer.done():
                try:
                    self.stop = self.answer.result()
                except RayActorError:  # the board died; Ray restarts it
                    self._ask()
            self.looked = time.monotonic()
        return self.stop

    def _check_lease(self) -> None:
        try:
            holder = self.lease.read_text()
        except FileNotFoundError:
            holder = "nobody, for it is finished"
        except OSError:  # the disk is unavailable; if it stays so, saving fails
            return
        if holder != self.attempt.name:
            raise RunError(
                f"the job {self.attempt.key[:16]} was given to another worker: {holder}",
                "Nothing is lost: that one goes on from the last checkpoint.",
            )


class _Reporter:
    """Post progress to the board every REPORT_SECONDS, without waiting for it."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt, self.reported = attempt, time.monotonic()
        self.node = ray.get_runtime_context().get_node_id()
        self._post(None)  # report that the attempt has begun

    def __call__(self, progress: Progress) -> None:
        if progress.scores is not None or time.monotonic() - self.reported > REPORT_SECONDS:
            self.reported = time.monotonic()
            self._post(progress)

    def _post(self, progress: Progress | None) -> None:
        self.attempt.board.post.remote(self.attempt.name, pickle.dumps((self.node, progress)))


def _first_failure(failures: list[Exception]) -> Outcome:
    """Return the outcome of a failed group: the error of the process that failed first."""
    for kind in (RbdcError, Interrupted):
        for error in failures:
            if isinstance(error, kind):
                return error
    return Interrupted("; ".join(map(_first_line, failures)))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
