"""The engine that runs jobs on a Ray cluster.

A job is a Ray task, or a Ray Train group if several processes train one model. Ray chooses the
nodes, and starts and ends the processes. If a worker or a node is lost, this engine submits the job
again, up to the given number of retries. The job then resumes from its last checkpoint.

There is one driver, and the run's folder is locked while it runs. If it dies, Ray ends its tasks.
The next driver reads from the store which jobs are finished, and runs the others.
"""

import pickle
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rbdc.cluster.board import Board
from rbdc.cluster.ray_start import check_nodes, ray_started
from rbdc.cluster.resources import (
    JobResources,
    Nodes,
    check_resources,
    fitting,
    job_resources,
    on_each,
)
from rbdc.errors import Interrupted, RbdcError, RunError
from rbdc.jobs.engine import Event, Ledger, Watcher, stop_requested
from rbdc.jobs.job import Context, Job
from rbdc.jobs.store import Store
from rbdc.settings import Cluster
from rbdc.training.choices import MachineFacts
from rbdc.training.machine import read_facts

POLL_SECONDS, NODES_SECONDS = 0.5, 2.0
BOARD_SECONDS = 10  # timeout of a call to the board
SAVE_SECONDS = 60  # time that running jobs have to save, if the engine ends with an error


def worker_facts(cluster: Cluster, device: str) -> MachineFacts:
    """Describe a worker's machine: what a run chooses is about its device, not the driver's.

    Assumption: all nodes with GPUs are alike, and each GPU has a training process of its own.
    """
    with ray_started(cluster.address) as ray:
        gpus = max((int(count) for count in on_each(ray.nodes(), "GPU")), default=0)
        on_gpu = gpus > 0 and device in ("auto", "cuda")
        asked = ray.remote(read_facts.__wrapped__).options(
            num_gpus=int(on_gpu), max_retries=cluster.retries
        )
        try:
            facts: MachineFacts = ray.get(asked.remote(device))
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RbdcError):
                raise error.cause from None
            raise _unchecked(error) from None
        except ray.exceptions.RayError as error:
            raise _unchecked(error) from None
    return replace(facts, gpus=gpus, processes=gpus) if on_gpu else facts


def _unchecked(error: Exception) -> RunError:
    reason = " ".join(str(error).split())[-300:]
    return RunError(f"a worker could not be checked: {reason}", "See Ray's logs on its node.")


@dataclass(frozen=True, kw_only=True, slots=True)
class RayEngine:
    """Run jobs on a Ray cluster, each with its own resources."""

    cluster: Cluster
    levels: Mapping[str, int]
    """Level of each job, by key; 0 is the target's."""

    def run(self, jobs: Sequence[Job], context: Context, watch: Watcher) -> None:
        """Run the jobs on the cluster; start or join it first."""
        if context.world.size > 1:
            raise RunError(
                f"there are {context.world.size} processes, and Ray starts its own",
                "Leave torchrun out; --workers-per-job is for a model that needs several.",
            )
        ledger = Ledger(jobs, context, watch)
        if not ledger.unfinished:
            ledger.close()
            return
        # Put into the object store once: all jobs use the same data, which may be large.
        store = Store(context.store.root.resolve())
        packed = pickle.dumps((ledger.unfinished, replace(context, store=store), str(Path.cwd())))
        with ray_started(self.cluster.address, len(packed)) as ray, stop_requested() as stopped:
            given = ray.put(packed)
            nodes = check_nodes(ray, store.root)
            unfinished = list(ledger.unfinished.values())
            resources = self._resources(ray, nodes, unfinished, context, given)
            _Scheduler(ray, self.cluster, ledger, resources, given).run(stopped)
            if stopped():
                raise Interrupted("stopped")
        ledger.close()

    def _resources(
        self, ray: Any, nodes: Nodes, jobs: Sequence[Job], context: Context, packed: Any
    ) -> dict[str, JobResources]:
        """Return the resources of each job, once it is known that the cluster can run them.

        A worker checks its devices, and measures the jobs' speed where it decides the GPUs.
        """
        from rbdc.cluster.ray_worker import probe

        trainings = [job for job in jobs if job.trains]
        on_gpu = any(on_each(nodes, "GPU")) and context.machine.device in ("auto", "cuda")
        first = {self.levels[job.key]: job.key for job in reversed(trainings)}
        measured = first if on_gpu and not self.cluster.gpus_per_job else {}
        asked = ray.remote(probe).options(num_gpus=int(on_gpu), max_retries=self.cluster.retries)
        try:
            speeds = ray.get(asked.remote(packed, measured))
        except ray.exceptions.RayError as error:
            raise _unchecked(error) from None
        if isinstance(speeds, RbdcError):
            raise speeds
        resources = job_resources(jobs, self.levels, self.cluster, nodes, speeds)
        by_level = {self.levels[job.key]: resources[job.key] for job in trainings}
        check_resources(nodes, {f"a model of level {n}": one for n, one in by_level.items()})
        for job in trainings:  # a batch must divide among the processes
            if (workers := resources[job.key].workers) > 1:
                job.check(context.machine, workers)
        return resources


class _Scheduler:
    """Submit jobs that are ready, report their progress, and submit lost jobs again."""

    def __init__(
        self,
        ray: Any,
        cluster: Cluster,
        ledger: Ledger,
        resources: Mapping[str, JobResources],
        packed: Any,
    ) -> None:
        from rbdc.cluster import ray_worker

        self.ray, self.cluster, self.ledger = ray, cluster, ledger
        self.resources, self.packed = resources, packed
        self.run_alone = ray.remote(ray_worker.run_alone)
        self.run_group = ray.remote(ray_worker.run_group)
        self.attempt = ray_worker.Attempt
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        board = ray.remote(Board)
        self.board = board.options(num_cpus=0, max_restarts=-1, scheduling_strategy=here).remote()
        self.running: dict[Any, Any] = {}  # the attempt of each object reference
        self.nodes = ray.nodes()
        self.begun: dict[str, str] = {}  # the node of each attempt that has begun, by name
        self.looked = time.monotonic()
        self.lost: Counter[str] = Counter()

    def run(self, stopped: Callable[[], bool]) -> None:
        """Run all jobs. When `stopped` returns True, wait until running jobs have saved."""
        try:
            while True:
                if stopped():
                    self._stop()
                else:
                    self._submit_what_fits()
                if not self.running:
                    self.ray.kill(self.board)  # idle workers would keep it for the next run
                    return
                done, _ = self.ray.wait(list(self.running), num_returns=1, timeout=POLL_SECONDS)
                self._listen()
                for ref in done:
                    self._settle(ref, self.running.pop(ref), stopped())
                if not stopped() and time.monotonic() - self.looked > NODES_SECONDS:
                    self._check_nodes()
        finally:
            if self.running:  # an error in this process: let running jobs save and end
                self._stop()
                left = list(self.running)
                self.ray.wait(left, num_returns=len(left), timeout=SAVE_SECONDS)

    def _submit_what_fits(self) -> None:
        # Ray runs tasks first-in first-out, so a later job that others depend on would starve.
        given = [attempt.resources for attempt in self.running.values()]
        for job in fitting(self.ledger.ready(), self.resources, given, self.nodes):
            self.ledger.take(job)
            self._submit(job)

    def _submit(self, job: Job) -> None:
        resources = self.resources[job.key]
        name = uuid.uuid4().hex
        attempt = self.attempt(name=name, key=job.key, resources=resources, board=self.board)
        alone = resources.workers == 1
        task = (self.run_alone if alone else self.run_group).options(
            name=f"{job.label}-{job.key[:8]}",
            num_cpus=resources.cpus if alone else 0,  # the workers of a group have their own
            num_gpus=resources.gpus if alone else 0,
            max_retries=0,  # Ray counts only some losses, and retries forever after others
        )
        self.running[task.remote(attempt, self.packed)] = attempt

    def _stop(self) -> None:
        with suppress(self.ray.exceptions.RayError):  # the next iteration tries again
            self.ray.get(self.board.end.remote(), timeout=BOARD_SECONDS)
        for ref, attempt in self.running.items():
            if attempt.name not in self.begun:  # it waits for resources and need not begin
                self.ray.cancel(ref)

    def _listen(self) -> None:
        jobs = self.ledger.unfinished
        under_way = {attempt.name: jobs[attempt.key] for attempt in self.running.values()}
        try:
            notes = self.ray.get(self.board.take.remote(), timeout=BOARD_SECONDS)
        except self.ray.exceptions.RayError:
            return  # Ray restarts a dead board, and workers post again soon
        for name, note in notes:
            if job := under_way.get(name):
                node, progress = pickle.loads(note)
                self._begin(name, job, node)
                if progress is not None:
                    self.ledger.watch(Event(kind="progress", key=job.key, progress=progress))

    def _begin(self, name: str, job: Job, node: str = "") -> None:
        if name not in self.begun:
            self.begun[name] = node
            devices = str(self.resources[job.key])
            self.ledger.watch(Event(kind="started", key=job.key, devices=devices))

    def _check_nodes(self) -> None:
        """Submit the jobs of dead nodes again. Workers of a node that hangs would never answer."""
        self.looked = time.monotonic()
        self.nodes = self.ray.nodes()
        dead = {node["NodeID"] for node in self.nodes if not node["Alive"]}
        for ref, attempt in list(self.running.items()):
            if attempt.resources.workers == 1 and self.begun.get(attempt.name) in dead:
                del self.running[ref]
                self.ray.cancel(ref, force=True)
                self._resubmit(self.ledger.unfinished[attempt.key], "its node was declared dead")

    def _settle(self, ref: Any, attempt: Any, stopping: bool) -> None:
        errors, job = self.ray.exceptions, self.ledger.unfinished[attempt.key]
        try:
            outcome = self.ray.get(ref)
        except errors.RayTaskError:
            if not stopping:
                raise  # a bug in this program
            return
        except errors.RayError as error:
            outcome = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if isinstance(outcome, dict):
            self._begin(attempt.name, job)
        if isinstance(outcome, dict | RbdcError):
            self.ledger.ended(job, outcome)
        elif not stopping:
            self._resubmit(job, str(outcome))

    def _resubmit(self, job: Job, reason: str) -> None:
        self.lost[job.key] += 1
        times = self.lost[job.key]
        problem = f"{job.label}-{job.key[:16]} lost its worker {times} times: {reason}"
        if times > self.cluster.retries:
            remedy = "The last checkpoint is kept: run the same command to resume from it."
            self.ledger.ended(job, RunError(problem, remedy))
            return
        warnings.warn(f"{problem}; it resumes from its last checkpoint", stacklevel=2)
        self._submit(job)
