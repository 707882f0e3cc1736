"""The engine that runs jobs on a Ray cluster.

Jobs become Ray tasks, or groups of Ray Train where several processes train one model. Ray finds
them a place, starts and ends their processes. What is ours: a job whose worker or node is lost is
given out again, so and so often, and goes on from its last checkpoint in the store.

There is one driver, and the run's folder is locked while it lives. When it dies, Ray ends what it
started; the next one finds in the store what is done, and goes on with the rest.
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
from rbdc.cluster.resources import Nodes, Room, Share, check_resources, shares_of
from rbdc.errors import Interrupted, RbdcError, RunError
from rbdc.jobs.engine import Event, Ledger, Watcher, stop_requested
from rbdc.jobs.job import Context, Job
from rbdc.jobs.store import Store
from rbdc.plan import Scaling
from rbdc.settings import Cluster

POLL_SECONDS, NODES_SECONDS = 0.5, 2.0
BOARD_SECONDS = 10  # for an answer, before the next question
SAVE_SECONDS = 60  # for those still at it, when everything ends with an error


@dataclass(frozen=True, kw_only=True, slots=True)
class RayEngine:
    """Jobs on a Ray cluster, each with its share of it."""

    cluster: Cluster
    levels: Mapping[str, int]
    """Of each job, by key; 0 is the target's."""

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
        # Given to Ray once: jobs share their data, which may be large.
        store = Store(context.store.root.resolve())
        packed = pickle.dumps((ledger.unfinished, replace(context, store=store)))
        with ray_started(self.cluster.address, len(packed)) as ray, stop_requested() as stopped:
            given = ray.put(packed)
            nodes = check_nodes(ray, store.root)
            shares = self._checked(ray, nodes, list(ledger.unfinished.values()), context, given)
            foreman = _Foreman(ray, self.cluster, ledger, shares, given, context.machine)
            foreman.run(stopped)
            if stopped():
                raise Interrupted("stopped")
        ledger.close()

    def _checked(
        self, ray: Any, nodes: Nodes, jobs: Sequence[Job], context: Context, packed: Any
    ) -> dict[str, Share]:
        """Return the resources of each job, once the cluster is known to have them."""
        machine = context.machine
        trainings = [job for job in jobs if job.trains]
        on_gpu = Room.of(nodes).gpus > 0 and machine.device in ("auto", "cuda")
        speeds = self._looked_at(ray, trainings, packed, on_gpu=on_gpu)
        shares = shares_of(jobs, self.levels, self.cluster, nodes, speeds)
        names = {job.key: f"a model of level {self.levels[job.key]}" for job in trainings}
        check_resources(nodes, {name: shares[key] for key, name in names.items()})
        for job in trainings:  # a batch must divide among the processes
            if (workers := shares[job.key].workers) > 1:
                job.check(machine, workers)
        return shares

    def _looked_at(
        self, ray: Any, trainings: Sequence[Job], packed: Any, *, on_gpu: bool
    ) -> dict[int, Scaling]:
        """Check on a worker that jobs can run; measure their speed where it decides the GPUs."""
        from rbdc.cluster.ray_worker import look

        first = {self.levels[job.key]: job.key for job in reversed(trainings)}
        measured = first if on_gpu and not self.cluster.gpus_per_job else {}
        asked = ray.remote(look).options(num_gpus=int(on_gpu), max_retries=self.cluster.retries)
        try:
            answer = ray.get(asked.remote(packed, measured, str(Path.cwd())))
        except ray.exceptions.RayError as error:
            reason = " ".join(str(error).split())[-300:]
            raise RunError(
                f"a worker could not be looked at: {reason}", "See Ray's logs on its node."
            ) from None
        if isinstance(answer, RbdcError):
            raise answer
        found: dict[int, Scaling] = answer
        return found


class _Foreman:
    """Gives out what is ready, listens, and gives out again what was lost."""

    def __init__(
        self,
        ray: Any,
        cluster: Cluster,
        ledger: Ledger,
        shares: Mapping[str, Share],
        packed: Any,
        machine: Any,
    ) -> None:
        from rbdc.cluster import ray_worker

        self.ray, self.cluster, self.ledger, self.shares = ray, cluster, ledger, shares
        self.packed, self.machine = packed, machine
        self.ways = {1: ray.remote(ray_worker.work), 2: ray.remote(ray_worker.lead)}
        self.attempt = ray_worker.Attempt
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        self.board = (
            ray.remote(Board)
            .options(num_cpus=0, max_restarts=-1, scheduling_strategy=here)
            .remote()
        )
        self.running: dict[Any, Any] = {}  # what Ray will answer with -> the attempt
        self.room = Room.of(ray.nodes())
        self.begun: dict[str, str] = {}  # names of attempts that are under way -> their nodes
        self.looked = time.monotonic()
        self.lost: Counter[str] = Counter()

    def run(self, stopped: Callable[[], bool]) -> None:
        try:
            while True:
                if stopped():
                    self._stop()
                else:
                    self._give_out_what_fits()
                if not self.running:
                    return
                done, _ = self.ray.wait(list(self.running), num_returns=1, timeout=POLL_SECONDS)
                self._listen()
                for ref in done:
                    self._settle(ref, self.running.pop(ref), stopped())
                if not stopped() and time.monotonic() - self.looked > NODES_SECONDS:
                    self._look_after_nodes()
        finally:
            if self.running:  # an error of ours: who is still at it saves, and ends
                self._stop()
                self.ray.wait(
                    list(self.running), num_returns=len(self.running), timeout=SAVE_SECONDS
                )

    def _give_out_what_fits(self) -> None:
        """Submit only what fits.

        Ray runs tasks first-in first-out, so a later job that others depend on would starve.
        """
        given = [attempt.share for attempt in self.running.values()]
        for job in self.room.first_of(self.ledger.ready(), self.shares, given):
            self.ledger.take(job)
            self._give_out(job)

    def _job(self, attempt: Any) -> Job:
        return self.ledger.unfinished[attempt.key]

    def _give_out(self, job: Job) -> None:
        share = self.shares[job.key]
        threads = self.machine.threads or (0 if share.gpus else max(1, int(share.cpus)))
        attempt = self.attempt(
            name=uuid.uuid4().hex,
            key=job.key,
            share=share,
            threads=threads,
            board=self.board,
            cwd=str(Path.cwd()),
        )
        alone = share.workers == 1
        task = self.ways[1 if alone else 2].options(
            name=f"{job.label}-{job.key[:8]}",
            num_cpus=share.cpus if alone else 0,  # a group has its own
            num_gpus=share.gpus if alone else 0,
            max_retries=0,  # Ray would count some losses, and try for ever after others
        )
        self.running[task.remote(attempt, self.packed)] = attempt

    def _stop(self) -> None:
        with suppress(self.ray.exceptions.RayError):  # it is asked again
            self.ray.get(self.board.end.remote(), timeout=BOARD_SECONDS)
        for ref, attempt in self.running.items():
            if attempt.name not in self.begun:  # it waits for room, and need not begin
                self.ray.cancel(ref)

    def _listen(self) -> None:
        under_way = {attempt.name: self._job(attempt) for attempt in self.running.values()}
        try:
            notes = self.ray.get(self.board.take.remote(), timeout=BOARD_SECONDS)
        except self.ray.exceptions.RayError:
            return  # Ray starts it again if it died; what it had is told again soon
        for name, note in notes:
            if name in under_way:
                node, progress = pickle.loads(note)
                self._begin(name, under_way[name], node)
                if progress is not None:
                    key = under_way[name].key
                    self.ledger.watch(Event(kind="progress", key=key, progress=progress))

    def _begin(self, name: str, job: Job, node: str = "") -> None:
        if name not in self.begun:
            self.begun[name] = node
            devices = str(self.shares[job.key])
            self.ledger.watch(Event(kind="started", key=job.key, devices=devices))

    def _look_after_nodes(self) -> None:
        """A node that Ray has given up may hang, with its workers: they would never answer."""
        self.looked = time.monotonic()
        nodes = self.ray.nodes()
        self.room = Room.of(nodes)
        dead = {node["NodeID"] for node in nodes if not node["Alive"]}
        for ref, attempt in list(self.running.items()):
            if attempt.share.workers == 1 and self.begun.get(attempt.name) in dead:
                del self.running[ref]
                self.ray.cancel(ref, force=True)
                self._give_out_again(self._job(attempt), "its node was given up")

    def _settle(self, ref: Any, attempt: Any, stopping: bool) -> None:
        errors, job = self.ray.exceptions, self._job(attempt)
        try:
            outcome = self.ray.get(ref)
        except errors.RayTaskError:
            if not stopping:
                raise  # a mistake in this program
            return
        except errors.RayError as error:
            lost = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        else:
            if outcome.result is not None:
                self._begin(attempt.name, job)
                self.ledger.finished(job, outcome.result)
                return
            if outcome.error is not None:
                self.ledger.failed(job, outcome.error)
                return
            lost = outcome.lost or "its worker was told to end"
        if not stopping:
            self._give_out_again(job, lost)

    def _give_out_again(self, job: Job, reason: str) -> None:
        self.lost[job.key] += 1
        times = self.lost[job.key]
        problem = f"{job.label}-{job.key[:16]} lost its worker {times} times: {reason}"
        if times > self.cluster.retries:
            remedy = "The last checkpoint is kept: give the same command to go on from there."
            self.ledger.failed(job, RunError(problem, remedy))
            return
        warnings.warn(f"{problem}; it goes on from its last checkpoint", stacklevel=2)
        self._give_out(job)
