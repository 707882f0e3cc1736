"""Engines run jobs whose parents are finished: in this process, or in several side by side.

An engine is given jobs, parents before children. It knows nothing of trees, models or data.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from graphlib import TopologicalSorter
from multiprocessing import forkserver
from types import FrameType
from typing import Any, Literal, Protocol

from rbdc.errors import Interrupted, RbdcError, RunError
from rbdc.jobs.job import Context, Job, TrainingJob, execute_together
from rbdc.stops import signals
from rbdc.training import Progress

MOST_TOGETHER = 8  # models that take turns in one process: all of them are in the device's memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """What happens to a job, as an engine reports it."""

    kind: Literal["note", "expected", "found", "started", "progress", "finished", "failed"]
    key: str
    progress: Progress | None = None
    result: Mapping[str, Any] | None = None
    error: str = ""
    seconds: float = 0.0
    """The time that a training is expected to take of the run's."""
    note: str = ""
    """Something about the whole run, for people."""
    devices: str = ""
    """The devices it started on, if the engine has several to choose from."""


Watcher = Callable[[Event], None]


class Engine(Protocol):
    """Run jobs, each after its parents, until all are finished or nothing more can be."""

    def run(self, jobs: Sequence[Job], context: Context, watch: Watcher) -> None:
        """Raise Interrupted when asked to stop, and the first failure when all else is done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InProcess:
    """Jobs in this process, one after the other; trainings on equal batches take turns.

    Under torchrun all ranks train each model together.
    """

    threads: Mapping[str, int]
    """CPU threads of each job, by key; 0: torch's choice."""

    def run(self, jobs: Sequence[Job], context: Context, watch: Watcher) -> None:
        """Run what is ready, group after group."""
        ledger = Ledger(jobs, context, watch)
        with stop_requested() as stopped:
            while ready := ledger.ready():
                jobs = groups_of(ready)[0]
                for job in jobs:
                    ledger.started(job)
                threads = context.with_threads(self.threads[jobs[0].key])
                together = execute_together(
                    jobs, threads, observe=partial(_observe, watch), stopped=stopped
                )
                with closing(together):  # now: what fails when it is collected is lost
                    for job, outcome in together:
                        ledger.ended(job, outcome)
                        if context.world.size > 1 and isinstance(outcome, RbdcError):
                            raise outcome  # other ranks may not have failed: torchrun ends them
                if context.world.size == 1 and stopped():  # several ranks agree in their next step
                    raise Interrupted("stopped between two jobs")
        ledger.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class SideBySide:
    """Several jobs at a time, each in a process with some of the CPU threads."""

    workers: int
    threads: Mapping[str, int]
    """CPU threads of each job, by key."""
    all_threads: int
    """Most threads in use at a time: two trainings that compete for cores both lose."""
    devices: Sequence[str] = ()
    """CUDA_VISIBLE_DEVICES of each worker, on a machine with GPUs."""

    def run(self, jobs: Sequence[Job], context: Context, watch: Watcher) -> None:
        """Run up to `workers` jobs at a time."""
        processes = start_server({type(job).__module__ for job in jobs})
        events, devices = processes.SimpleQueue(), processes.SimpleQueue()
        stop = processes.Event()
        for number in range(self.workers):
            devices.put(self.devices[number] if self.devices else None)
        ledger = Ledger(jobs, context, watch)
        # Sent to each worker once: jobs share their data, which may be large.
        given = {job.key: job for job in ledger.unfinished.values()}
        running: dict[Future[Any], list[Job]] = {}
        with (
            stop_requested(also=stop.set) as stopped,
            ProcessPoolExecutor(
                self.workers,
                mp_context=processes,
                initializer=_begin_worker,
                initargs=(given, context, events, stop, devices),
            ) as pool,
        ):
            try:
                while True:
                    free = self.workers - len(running)
                    ready = ledger.ready() if free and not stopped() else []
                    for jobs in groups_of(ready, free):
                        threads = self.threads[jobs[0].key]
                        busy = sum(self.threads[others[0].key] for others in running.values())
                        if running and busy + threads > self.all_threads:
                            break
                        for job in jobs:
                            ledger.started(job)
                        keys = [job.key for job in jobs]
                        share = 1.0 if self.devices else threads / self.all_threads
                        running[pool.submit(_work, keys, threads, share)] = jobs
                    if not running:
                        break
                    done, _ = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
                    _forward(events, ledger)
                    for future in done:
                        running.pop(future)
                        with suppress(Interrupted):  # saved; the run says so when all are
                            future.result()
                            _forward(events, ledger)
            except BrokenProcessPool:
                raise RunError(
                    "a training process died (killed, or out of memory)",
                    "Give the same command again: it goes on from the last checkpoints.",
                ) from None
            finally:
                stop.set()  # in any case: running jobs save and end
        if stopped():
            raise Interrupted("stopped")
        ledger.close()


def _forget_server() -> None:
    """Start a server anew in a forked process: the one that runs is its parent's."""
    forkserver._forkserver.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_forget_server)


def start_server(modules: Collection[str]) -> Any:
    """Start the server that forks workers, unless it runs; return its multiprocessing context.

    It has imported everything and computed nothing, so that workers start at once, and inherit
    neither threads nor a CUDA context. It imports while this process goes on.
    """
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(sorted(modules))
    with signals(signal.SIG_IGN):  # inherited: a signal to the whole group is for us to handle
        forkserver.ensure_running()
    _imported.setdefault(processes, False)
    return processes


_imported: dict[Any, bool] = {}
"""Whether the server is known to have imported everything, by its context; empty: no server."""


def wait_for_server() -> None:
    """Wait until the server has imported everything: that would slow whatever is measured."""
    for processes, done in list(_imported.items()):
        if not done:
            process = processes.Process(target=int)  # it forks when it has
            process.start()
            process.join()
            _imported[processes] = True


def groups_of(ready: Sequence[Job], workers: int = 1) -> list[list[Job]]:
    """Divide jobs into groups that run in one process each, for `workers` processes.

    Trainings on equal batches are one group, so that each batch is read once; or several, if there
    are processes that would have nothing to do otherwise. Fused trainings are never divided.
    """
    streams: dict[str, list[Job]] = {}
    for job in ready:
        stream = job.stream if isinstance(job, TrainingJob) else None
        streams.setdefault(stream or job.key, []).append(job)
    each = max(1, workers // len(streams)) if streams else 1
    groups = []
    for jobs in streams.values():
        fused = isinstance(jobs[0], TrainingJob) and jobs[0].fused
        size = len(jobs) if fused else min(MOST_TOGETHER, -(-len(jobs) // min(each, len(jobs))))
        groups += [jobs[first : first + size] for first in range(0, len(jobs), size)]
    return groups


class Ledger:
    """Which jobs are finished, ready, running or failed; and the first failure."""

    def __init__(self, jobs: Sequence[Job], context: Context, watch: Watcher) -> None:
        self.store, self.watch, self.world = context.store, watch, context.world
        self.failure: RbdcError | None = None
        results = self.world.broadcast(lambda: {job.key: self.store.result(job) for job in jobs})
        done = {key for key, result in results.items() if result is not None}
        self.unfinished = {job.key: job for job in jobs if job.key not in done}
        self._order = TopologicalSorter(
            {
                key: [parent.key for parent in job.parents if parent.key not in done]
                for key, job in self.unfinished.items()
            }
        )
        self._order.prepare()
        self._ready: set[str] = set()
        for job in jobs:
            if job.key in done:
                watch(Event(kind="found", key=job.key, result=results[job.key]))

    def ready(self) -> list[Job]:
        """Return the jobs that can start now, in the order they were given."""
        self._ready.update(self._order.get_ready())
        return [job for key, job in self.unfinished.items() if key in self._ready]

    def take(self, job: Job) -> None:
        """Take the job out of what is ready, though it may not have started."""
        self._ready.remove(job.key)

    def started(self, job: Job) -> None:
        """Note that the job starts."""
        self.take(job)
        self.watch(Event(kind="started", key=job.key))

    def ended(self, job: Job, outcome: Mapping[str, Any] | RbdcError) -> None:
        """Note how a job ended.

        After a result, jobs that wait for it may become ready. After an error, which is written
        down, they never do.
        """
        if not isinstance(outcome, RbdcError):
            self._order.done(job.key)
            self.watch(Event(kind="finished", key=job.key, result=outcome))
            return
        if self.world.is_main:
            self.store.fail(job, outcome)
        self.failure = self.failure or outcome
        self.watch(Event(kind="failed", key=job.key, error=str(outcome)))

    def close(self) -> None:
        """Raise the first failure, if there was one."""
        if self.failure:
            raise self.failure


def _observe(watch: Watcher, job: Job, progress: Progress) -> None:
    watch(Event(kind="progress", key=job.key, progress=progress))


def _forward(events: Any, ledger: Ledger) -> None:
    """Pass on what workers reported: progress, results and errors."""
    while not events.empty():
        key, what = events.get()
        if isinstance(what, Progress):
            ledger.watch(Event(kind="progress", key=key, progress=what))
        else:
            ledger.ended(ledger.unfinished[key], what)


@contextmanager
def stop_requested(also: Callable[[], None] = lambda: None) -> Iterator[Callable[[], bool]]:
    """Defer stop signals; yield a function that returns True once one has arrived."""
    request = threading.Event()

    def note(_number: int, _frame: FrameType | None) -> None:
        request.set()
        also()

    with signals(note):
        yield request.is_set


# --- in a worker process ---------------------------------------------------------------------

_jobs: Mapping[str, Job]
_context: Context
_events: Any
_stop: Any


def _begin_worker(
    jobs: Mapping[str, Job], context: Context, events: Any, stop: Any, devices: Any
) -> None:
    global _jobs, _context, _events, _stop
    _jobs, _context, _events, _stop = jobs, context, events, stop
    device = devices.get()
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(keys: Sequence[str], threads: int, share: float) -> None:
    """Run a group of jobs, and report what happens to each."""
    for job, outcome in execute_together(
        [_jobs[key] for key in keys],
        _context.with_threads(threads, share),
        observe=lambda job, progress: _events.put((job.key, progress)),
        stopped=_stop.is_set,
    ):
        _events.put((job.key, outcome))
