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

from rbdc.errors import Interrupted, RunError
from rbdc.recipes import Cluster
from rbdc.training import World
from rbdc.tree.engine import Event, Ledger, Watcher, stop_requested
from rbdc.tree.execute import Workshop
from rbdc.tree.jobs import Job
from rbdc.tree.ray_board import Board
from rbdc.tree.ray_start import Share, check_nodes, check_shares, ray_started
from rbdc.tree.store import Store

POLL_SECONDS, NODES_SECONDS = 0.5, 2.0
BOARD_SECONDS = 10  # for an answer, before the next question
SAVE_SECONDS = 60  # for those still at it, when everything ends with an error


@dataclass(frozen=True, kw_only=True, slots=True)
class RayEngine:
    """Jobs on a Ray cluster, each with its share of it."""

    cluster: Cluster
    levels: Mapping[str, int]
    """Of each job, by key; 0 is the target's."""

    def run(self, jobs: Sequence[Job], shop: Workshop, watch: Watcher) -> None:
        if shop.world.size > 1:
            raise RunError(
                f"there are {shop.world.size} processes, and Ray starts its own",
                "Leave torchrun out; --workers-per-job is for a model that needs several.",
            )
        ledger = Ledger(jobs, shop, watch)
        if not ledger.waiting:
            ledger.close()
            return
        packed = pickle.dumps(replace(shop, store=Store(shop.store.root.resolve())))
        with ray_started(self.cluster.address, len(packed)) as ray, stop_requested() as stopped:
            shares = self._checked(ray, jobs, shop)
            foreman = _Foreman(ray, self.cluster, ledger, shares, ray.put(packed), shop.machine)
            foreman.run(stopped)
            if stopped():
                raise Interrupted("stopped")
        ledger.close()

    def _checked(self, ray: Any, jobs: Sequence[Job], shop: Workshop) -> dict[str, Share]:
        """What each job gets, once all is known to be there."""
        nodes = check_nodes(ray, shop.store.root.resolve())
        shares = self._shares(jobs, nodes, shop.machine.device)
        trainings = [job for job in jobs if job.trains]
        names = {job.key: f"a model of level {self.levels[job.key]}" for job in trainings}
        check_shares(nodes, {name: shares[key] for key, name in names.items()})
        for job in trainings:  # as it will be: a batch must divide among the processes
            if (workers := shares[job.key].workers) > 1:
                replace(shop, world=World(size=workers)).check([job])
        return shares

    def _shares(
        self, jobs: Sequence[Job], nodes: Sequence[Mapping[str, Any]], device: str
    ) -> dict[str, Share]:
        """Of each job: what is asked for, or all that there is, divided among a level's models."""
        gpus = [node["Resources"].get("GPU", 0) for node in nodes]
        cpus = [node["Resources"].get("CPU", 0) for node in nodes]
        on_gpu = any(gpus) and device in ("auto", "cuda")
        siblings = Counter(self.levels[job.key] for job in jobs if job.trains)
        shares = {}
        for job in jobs:
            level = self.levels[job.key]
            gpu = _at(self.cluster.gpus_per_job, level, 1.0 if on_gpu else 0.0)
            even = min(max(cpus), max(1.0, sum(cpus) // max(1, siblings[level])))
            cpu = _at(self.cluster.cpus_per_job, level, 1.0 if gpu else even)
            workers = _at(self.cluster.workers_per_job, level, max(1, int(gpu)))
            if not job.trains:  # made by one process, in no time
                gpu, cpu, workers = min(1.0, gpu / workers), cpu / workers, 1
            shares[job.key] = Share(workers=workers, cpus=cpu / workers, gpus=gpu / workers)
        return shares


def _at(values: Sequence[Any], level: int, otherwise: Any) -> Any:
    return values[min(level, len(values) - 1)] if values else otherwise


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
        from rbdc.tree import ray_work

        self.ray, self.cluster, self.ledger, self.shares = ray, cluster, ledger, shares
        self.packed, self.machine = packed, machine
        self.ways = {1: ray.remote(ray_work.work), 2: ray.remote(ray_work.lead)}
        self.attempt = ray_work.Attempt
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        self.board = (
            ray.remote(Board)
            .options(num_cpus=0, max_restarts=-1, scheduling_strategy=here)
            .remote()
        )
        self.running: dict[Any, Any] = {}  # what Ray will answer with -> the attempt
        self.begun: dict[str, str] = {}  # names of attempts that are under way -> their nodes
        self.looked = time.monotonic()
        self.lost: Counter[str] = Counter()

    def run(self, stopped: Callable[[], bool]) -> None:
        try:
            while True:
                if stopped():
                    self._stop()
                else:
                    for job in self.ledger.ready():
                        self.ledger.take(job)
                        self._give_out(job)
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

    def _give_out(self, job: Job) -> None:
        share = self.shares[job.key]
        threads = self.machine.threads or (0 if share.gpus else max(1, int(share.cpus)))
        attempt = self.attempt(
            name=uuid.uuid4().hex,
            job=job,
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
        under_way = {attempt.name: attempt.job for attempt in self.running.values()}
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
            self.ledger.watch(Event(kind="started", key=job.key))

    def _look_after_nodes(self) -> None:
        """A node that Ray has given up may hang, with its workers: they would never answer."""
        self.looked = time.monotonic()
        dead = {node["NodeID"] for node in self.ray.nodes() if not node["Alive"]}
        for ref, attempt in list(self.running.items()):
            if attempt.share.workers == 1 and self.begun.get(attempt.name) in dead:
                del self.running[ref]
                self.ray.cancel(ref, force=True)
                self._give_out_again(attempt.job, "its node was given up")

    def _settle(self, ref: Any, attempt: Any, stopping: bool) -> None:
        errors, job = self.ray.exceptions, attempt.job
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
