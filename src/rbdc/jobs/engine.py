"""Engines: they run what is ready. This one runs it here; a cluster's can take its place.

An engine is given jobs, parents before children, and a function that does one. It knows nothing of
trees, models or data.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from types import FrameType
from typing import Any, Literal, Protocol

from rbdc.errors import Interrupted, RbdcError, RunError
from rbdc.jobs.execute import Workshop, execute
from rbdc.jobs.job import Job
from rbdc.training import Progress

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """What an observer of an engine is told about a job."""

    kind: Literal["found", "started", "progress", "finished", "failed"]
    key: str
    progress: Progress | None = None
    result: Mapping[str, Any] | None = None
    error: str = ""
    place: str = ""
    """Where it started, if an engine has several."""


Watcher = Callable[[Event], None]


class Engine(Protocol):
    """Runs jobs, each after its parents, until all are finished or nothing more can be."""

    def run(self, jobs: Sequence[Job], shop: Workshop, watch: Watcher) -> None:
        """Raises Interrupted when asked to stop, and the first failure when all else is done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InProcess:
    """One job after the other, in this process; under torchrun all processes share each."""

    threads: Mapping[str, int]
    """CPU threads of each job, by key; 0 is torch's choice."""

    def run(self, jobs: Sequence[Job], shop: Workshop, watch: Watcher) -> None:
        ledger = Ledger(jobs, shop, watch)
        with stop_requested() as stopped:
            while ready := ledger.ready():
                job = ready[0]
                ledger.started(job)
                try:
                    result = execute(
                        job,
                        with_threads(shop, self.threads[job.key]),
                        observe=lambda p, key=job.key: watch(  # type: ignore[misc]
                            Event(kind="progress", key=key, progress=p)
                        ),
                        stopped=stopped,
                    )
                    ledger.finished(job, result)
                except RbdcError as error:
                    ledger.failed(job, error)
                    if shop.world.size > 1:  # the others may not have failed: torchrun ends them
                        raise
                if shop.world.size == 1 and stopped():  # many agree on it in the next training
                    raise Interrupted("stopped between two jobs")
        ledger.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class SideBySide:
    """Several jobs at a time, each in a process with its share of the machine."""

    workers: int
    threads: Mapping[str, int]
    """CPU threads of each job, by key."""
    all_threads: int
    """More than these are never at work: two trainings that fight for cores both lose."""
    devices: Sequence[str] = ()
    """CUDA_VISIBLE_DEVICES of each worker, on a machine with GPUs."""

    def run(self, jobs: Sequence[Job], shop: Workshop, watch: Watcher) -> None:
        # A server that has imported everything and computed nothing forks the workers: they start
        # at once, and inherit neither threads nor a CUDA context.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([type(shop).__module__])
        with _signals(signal.SIG_IGN):  # inherited: a signal to the whole group is for us to handle
            forkserver.ensure_running()
        events, devices = context.SimpleQueue(), context.SimpleQueue()
        stop = context.Event()
        for number in range(self.workers):
            devices.put(self.devices[number] if self.devices else None)
        ledger = Ledger(jobs, shop, watch)
        running: dict[Future[Any], Job] = {}
        with (
            stop_requested(also=stop.set) as stopped,
            ProcessPoolExecutor(
                self.workers,
                mp_context=context,
                initializer=_begin_worker,
                initargs=(shop, events, stop, devices),
            ) as pool,
        ):
            try:
                while True:
                    for job in [] if stopped() else ledger.ready():
                        busy = sum(self.threads[other.key] for other in running.values())
                        if running and busy + self.threads[job.key] > self.all_threads:
                            break
                        ledger.started(job)
                        running[pool.submit(_work, job, self.threads[job.key])] = job
                    if not running:
                        break
                    done, _ = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
                    _forward(events, watch)
                    for future in done:
                        _settle(future, running.pop(future), ledger)
            except BrokenProcessPool:
                raise RunError(
                    "a training process died (killed, or out of memory)",
                    "Give the same command again: it goes on from the last checkpoints.",
                ) from None
            finally:
                stop.set()  # whatever happened: who is still at it saves, and ends
        if stopped():
            raise Interrupted("stopped")
        ledger.close()


class Ledger:
    """Which jobs are finished, running, failed; the first failure."""

    def __init__(self, jobs: Sequence[Job], shop: Workshop, watch: Watcher) -> None:
        self.store, self.watch, self.world = shop.store, watch, shop.world
        self.waiting = {job.key: job for job in jobs}
        self.done: set[str] = set()
        self.failure: RbdcError | None = None
        results = self.world.broadcast(lambda: {job.key: self.store.result(job) for job in jobs})
        for job in jobs:
            if results[job.key] is not None:
                del self.waiting[job.key]
                self.done.add(job.key)
                watch(Event(kind="found", key=job.key, result=results[job.key]))

    def ready(self) -> list[Job]:
        return [
            job
            for job in self.waiting.values()
            if all(parent.key in self.done for parent in job.parents)
        ]

    def take(self, job: Job) -> None:
        """It waits no more, though it may not have begun."""
        del self.waiting[job.key]

    def started(self, job: Job) -> None:
        self.take(job)
        self.watch(Event(kind="started", key=job.key))

    def finished(self, job: Job, result: Mapping[str, Any]) -> None:
        self.done.add(job.key)
        self.watch(Event(kind="finished", key=job.key, result=result))

    def failed(self, job: Job, error: RbdcError) -> None:
        if self.world.is_main:
            self.store.fail(job, error)
        self.failure = self.failure or error
        self.watch(Event(kind="failed", key=job.key, error=str(error)))

    def close(self) -> None:
        if self.failure:
            raise self.failure


def _settle(future: Future[Any], job: Job, ledger: Ledger) -> None:
    try:
        ledger.finished(job, future.result())
    except Interrupted:
        pass  # saved; the run says so when all are
    except RbdcError as error:
        ledger.failed(job, error)


def _forward(events: Any, watch: Watcher) -> None:
    """What workers have told so far: a simple queue has it before the job is reported done."""
    while not events.empty():
        key, progress = events.get()
        watch(Event(kind="progress", key=key, progress=progress))


def with_threads(shop: Workshop, threads: int) -> Workshop:
    return replace(shop, machine=replace(shop.machine, threads=threads))


@contextmanager
def stop_requested(also: Callable[[], None] = lambda: None) -> Iterator[Callable[[], bool]]:
    """While it lasts, a stop signal is noted instead of obeyed; what is yielded tells."""
    request = threading.Event()

    def note(_number: int, _frame: FrameType | None) -> None:
        request.set()
        also()

    with _signals(note):
        yield request.is_set


@contextmanager
def _signals(handler: Any) -> Iterator[None]:
    """Another handler of the stop signals, while it lasts."""
    if threading.current_thread() is not threading.main_thread():  # only it may handle signals
        yield
        return
    before = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


# --- in a worker process ---------------------------------------------------------------------

_shop: Workshop
_events: Any
_stop: Any


def _begin_worker(shop: Workshop, events: Any, stop: Any, devices: Any) -> None:
    global _shop, _events, _stop
    _shop, _events, _stop = shop, events, stop
    device = devices.get()
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(job: Job, threads: int) -> dict[str, Any]:
    return execute(
        job,
        with_threads(_shop, threads),
        observe=lambda progress: _events.put((job.key, progress)),
        stopped=_stop.is_set,
    )
