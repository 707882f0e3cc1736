"""The tree on a real Ray cluster of two nodes: run, killed in all its parts, gone on with."""

import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rbdc
from rbdc.cluster.ray_engine import worker_facts
from rbdc.cluster.ray_start import ray_started
from rbdc.cluster.resources import JobResources
from rbdc.errors import Interrupted, RbdcError, RunError
from rbdc.experiments.train import Training
from rbdc.jobs.engine import Event
from rbdc.jobs.job import Job
from rbdc.jobs.layout import FAILED, LEASE, MODEL, PROGRESS
from rbdc.jobs.store import Store
from rbdc.settings import Cluster, Machine
from rbdc.training import join_world
from rbdc.training.machine import read_facts
from rbdc.training.world import leave_world
from rbdc.transfer import load_detector
from rbdc.transfer.coco import open_splits
from rbdc.transfer.jobs import find_backbone
from rbdc.transfer.prepare import Transfer, prepare_transfer
from tests.cluster.ray_cluster import RayCluster
from tests.runs.test_processes import finish, free_port
from tests.runs.test_run import DEIT, EAGER, assert_same_model, run, small_tree
from tests.support import QUICK, forked, started
from tests.transfer.scenes import classifier, write_scenes
from tests.transfer.test_transfer import recipe as detection

pytestmark = pytest.mark.xdist_group("ray")  # one cluster for all of them
# A target of 100 steps, long enough to be stopped in; parents of 50 steps, which are held for that.
LONG: dict[str, Any] = {"steps": 1, "epochs": 20.0, "ratio": 2.0}
SHORT: dict[str, Any] = {"steps": 1, "epochs": 2.0}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    cluster = RayCluster()
    try:
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def straight(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What this machine alone makes of LONG."""
    output = tmp_path_factory.mktemp("runs") / "straight"
    run(small_tree(folder, **LONG), output)
    return output


class DriverProcess:
    """A process that has joined the cluster and starts one run after the other there.

    Ray keeps its idle workers for its next run, which need not import everything again.
    """

    def __init__(self, cluster: RayCluster) -> None:
        self.cluster = cluster
        self.connection, theirs = multiprocessing.Pipe()
        self.process: ForkProcess = cluster.start(_serve, cluster.address, theirs)
        theirs.close()
        self.is_free = True

    def start(self, *order: Any) -> None:
        self.is_free = False
        self.connection.send(order)

    def runs(self) -> bool:
        return not self.connection.poll()

    def finish(self) -> int:
        """The exit code of the run, or of the process if it was killed."""
        try:
            code = self.connection.recv() if self.connection.poll(300) else -1
            self.is_free = True
        except EOFError:
            self.process.join()
            code = self.process.exitcode
        return int(code)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.is_free = False


class Driver:
    """A run on the cluster by a process of its own, and what is known of it."""

    def __init__(
        self,
        process: DriverProcess,
        prepared: Training | Transfer,
        output: Path,
        machine: Machine = EAGER,
        **settings: Any,
    ) -> None:
        self.process, self.cluster, self.output = process, process.cluster, output
        self.log = output.with_suffix(".log")
        self.log.write_text("")
        nodes = prepared.run().nodes
        self.jobs = {node.name: node.job for node in nodes}
        asked = Cluster(**{"engine": "ray", "address": self.cluster.address, **settings})
        process.start(_drive, prepared, output, machine, asked, self.log)

    @property
    def pid(self) -> int:
        return self.process.process.pid or 0

    def until(self, there: Callable[[], Any]) -> Any:
        """Wait for something to be there, as long as the run goes on."""
        while not (found := there()):
            assert self.process.runs(), self.said()
            time.sleep(0.01)
        return found

    def worker(self, name: str, left: str = "checkpoints/step-*") -> int:
        """The process of a job, held by SIGSTOP once it has left a file in its folder.

        So the shortest training is still there to be killed; SIGCONT lets it go on.
        """
        return self._hold(name, self.until(lambda: self._running(name))[0], left)

    def elsewhere(self) -> tuple[str, int, int]:
        """(name, process, raylet) of the parent that is not on the first node, held likewise."""
        first = self.cluster.raylets[0]

        def look() -> tuple[str, int, int] | None:
            found = ((name, self._running(name)) for name in ("1.0", "1.1"))
            return next(((name, *one) for name, one in found if one and one[1] != first), None)

        name, process, raylet = self.until(look)
        return name, self._hold(name, process), raylet

    def _running(self, name: str) -> tuple[int, int] | None:
        """(process, raylet) of a job that has begun."""
        job = self.jobs[name]
        if not self.folder(job).exists():  # looking through all processes takes a while
            return None
        return self.cluster.worker(_title(job))

    def _hold(self, name: str, process: int, left: str = "checkpoints/step-*") -> int:
        self.until(lambda: list(self.folder(self.jobs[name]).glob(left)))
        os.kill(process, signal.SIGSTOP)
        self.slow_down(process, lambda: "started" in self.events(name))  # its note is on the way
        return process

    def slow_down(self, process: int, there: Callable[[], bool]) -> None:
        """Give a held process moments until something is there: few steps, time for messages."""
        while not there():
            os.kill(process, signal.SIGCONT)
            time.sleep(0.01)
            os.kill(process, signal.SIGSTOP)
            time.sleep(0.1)

    def folder(self, job: Job) -> Path:
        return self.output / "jobs" / f"{job.label}-{job.key[:16]}"

    def finish(self) -> int:
        return self.process.finish()

    def said(self) -> str:
        return self.log.read_text()

    def events(self, name: str) -> list[str]:
        lines = [json.loads(line) for line in self.said().splitlines() if line.startswith("{")]
        return [line["kind"] for line in lines if line["key"] == self.jobs[name].key]


def _is_gone(process: int) -> bool:
    return not Path(f"/proc/{process}").exists()


def _title(job: Job) -> str:
    return f"{job.label}-{job.key[:8]}"


def _serve(address: str, orders: Any) -> None:
    """Join the cluster, then do what is ordered and answer with its exit code."""
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1)
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, *_others: print(message, flush=True)
    with ray_started(address):
        while True:
            do, *args = orders.recv()
            orders.send(do(*args))


def _drive(prepared: Any, output: Path, machine: Machine, cluster: Cluster, log: Path) -> int:
    """Exit codes are those of the command line; everything said goes into the log."""
    with log.open("a") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)

    def watch(event: Event) -> None:
        print(json.dumps({"kind": event.kind, "key": event.key}), flush=True)

    try:
        started(prepared, output, machine=machine, watch=watch, cluster=cluster)
    except Interrupted:
        return 75
    except RbdcError as error:
        print(error, flush=True)
        return 2
    return 0


@pytest.fixture(scope="module")
def processes() -> Iterator[list[DriverProcess]]:
    """The processes that have joined the cluster; only the last can be alive."""
    processes: list[DriverProcess] = []
    yield processes
    if processes:
        processes[-1].kill()


@pytest.fixture
def join(
    cluster: RayCluster, processes: list[DriverProcess]
) -> Iterator[Callable[[], DriverProcess]]:
    """Return a process that has joined the cluster and has nothing to do."""

    def free() -> DriverProcess:
        if not (processes and processes[-1].is_free):
            processes.append(DriverProcess(cluster))
        return processes[-1]

    yield free
    if processes and not processes[-1].is_free:
        processes[-1].kill()


@pytest.fixture
def drive(join: Callable[[], DriverProcess]) -> Callable[..., Driver]:
    """Start runs that end with the test."""
    return lambda *args, **settings: Driver(join(), *args, **settings)


Drive = Callable[..., Driver]


def test_a_killed_worker_and_the_same_bits(
    folder: Path, straight: Path, tmp_path: Path, drive: Drive
) -> None:
    driver = drive(small_tree(folder, **LONG), tmp_path / "run")
    os.kill(driver.worker("1.0"), signal.SIGKILL)
    assert driver.finish() == 0, driver.said()
    assert_same_model(straight, driver.output)
    assert "lost its worker 1 times" in driver.said()
    assert driver.events("1.0").count("started") == 2
    for name in ("1.1", "coupling target", "target"):
        events = driver.events(name)
        assert events[0] == "started" and events[-1] == "finished"
        assert events.count("started") == events.count("finished") == 1
    assert "progress" in driver.events("target")
    left = {path.name for path in driver.output.glob("jobs/.*")}
    assert not left and not list(driver.output.glob(f"jobs/*/{LEASE}"))


def test_a_lost_node(
    folder: Path, straight: Path, tmp_path: Path, cluster: RayCluster, drive: Drive
) -> None:
    driver = drive(small_tree(folder, **LONG), tmp_path / "run")
    _name, worker, raylet = driver.elsewhere()
    for process in (raylet, worker):
        os.kill(process, signal.SIGKILL)
    cluster.raylets.remove(raylet)
    assert driver.finish() == 0, driver.said()
    assert_same_model(straight, driver.output)
    assert "lost its worker 1 times" in driver.said()
    cluster.add()


def test_a_node_that_hangs(
    folder: Path, straight: Path, tmp_path: Path, cluster: RayCluster, drive: Drive
) -> None:
    """Ray gives it up, and the job to another; then its worker wakes up, and would train on."""
    driver = drive(small_tree(folder, **LONG), tmp_path / "run")
    name, worker, raylet = driver.elsewhere()
    os.kill(raylet, signal.SIGSTOP)
    lease = driver.folder(driver.jobs[name]) / LEASE
    first = lease.read_text()
    try:
        driver.until(lambda: lease.exists() and lease.read_text() not in ("", first))
        os.kill(worker, signal.SIGCONT)
        assert driver.finish() == 0, driver.said()
    finally:
        os.kill(raylet, signal.SIGKILL)  # its worker ends with it
        cluster.raylets.remove(raylet)
    assert "lost its worker 1 times" in driver.said()
    assert_same_model(straight, driver.output)
    cluster.add()


def _ask_a_worker(address: str) -> int:
    facts = worker_facts(Cluster(engine="ray", address=address), "auto")
    assert facts == read_facts("auto"), facts  # the nodes are this machine, without a GPU
    try:
        worker_facts(Cluster(engine="ray", address=address), "abacus")
    except RunError as error:
        assert "the device 'abacus' cannot be used" in error.problem
        return 0
    raise AssertionError("an unknown device")


def test_a_worker_describes_its_machine(
    cluster: RayCluster, join: Callable[[], DriverProcess]
) -> None:
    process = join()
    process.start(_ask_a_worker, cluster.address)
    assert process.finish() == 0


def _go_on_without_lease(folder: Path, store: Path) -> None:
    """The worker's question at every step, with a board that says nothing."""
    from rbdc.cluster import ray_worker

    ray_worker.LISTEN_SECONDS = 0.0
    silence = SimpleNamespace(future=Future)
    job = small_tree(folder, **SHORT).tree.nodes[0].job
    place = Store(store).folder(job)
    attempts = [
        ray_worker.Attempt(
            name=name,
            key=job.key,
            resources=JobResources(workers=1, cpus=1, gpus=0),
            board=SimpleNamespace(ended=SimpleNamespace(remote=lambda: silence)),
        )
        for name in ("first", "second")
    ]
    ray_worker._take_lease(attempts[0], place)
    stopped = ray_worker._Listener(attempts[0], place / LEASE)
    assert not stopped()
    ray_worker._take_lease(attempts[1], place)
    for _ in range(2):
        try:
            stopped()
        except RunError as error:
            assert "was given to another worker" in str(error)
        else:
            raise AssertionError("it goes on")
        stopped.lease.unlink(missing_ok=True)  # and once the other has finished


def test_who_has_lost_the_lease_goes_on_no_more(folder: Path, tmp_path: Path) -> None:
    process = forked(_go_on_without_lease, folder, tmp_path)
    process.join()
    assert process.exitcode == 0


def test_a_killed_driver_and_another_at_the_same_time(
    folder: Path, straight: Path, tmp_path: Path, cluster: RayCluster, drive: Drive
) -> None:
    prepared, output = small_tree(folder, **LONG), tmp_path / "run"
    driver = drive(prepared, output)
    worker = driver.worker("1.0")
    with pytest.raises(RunError, match=rf"in use by another run: process {driver.pid} "):
        run(prepared, output)
    os.kill(driver.pid, signal.SIGKILL)
    os.kill(worker, signal.SIGCONT)
    while cluster.worker(_title(driver.jobs["1.0"])):  # it ends with its driver
        time.sleep(0.01)
    assert driver.finish() == -signal.SIGKILL
    finished = {path: path.stat().st_mtime_ns for path in output.glob("jobs/*/result.json")}
    again = drive(prepared, output)
    assert again.finish() == 0, again.said()
    assert_same_model(straight, output)
    assert all(path.stat().st_mtime_ns == when for path, when in finished.items())


def test_stop_signals(folder: Path, straight: Path, tmp_path: Path, drive: Drive) -> None:
    """A worker that is told to end saves, and its job goes on elsewhere; a driver tells all."""
    prepared, output = small_tree(folder, **LONG), tmp_path / "run"
    driver = drive(prepared, output, machine=QUICK)  # saves when it is told to, or at its end
    victim = driver.jobs["1.0"]
    process = driver.worker("1.0", PROGRESS)
    for number in (signal.SIGTERM, signal.SIGCONT):
        os.kill(process, number)
    driver.until(lambda: "its worker got a stop signal" in driver.said())
    assert list(driver.folder(victim).glob("checkpoints/step-*"))
    process = driver.worker("target", PROGRESS)
    os.kill(driver.pid, signal.SIGTERM)
    driver.slow_down(process, lambda: not driver.process.runs())
    os.kill(process, signal.SIGCONT)
    assert driver.finish() == 75, driver.said()
    assert list(driver.folder(driver.jobs["target"]).glob("checkpoints/step-*"))
    again = drive(prepared, output)
    assert again.finish() == 0, again.said()
    assert_same_model(straight, output)


def test_a_job_is_given_up_and_the_others_go_on(folder: Path, tmp_path: Path, drive: Drive) -> None:
    driver = drive(small_tree(folder, **LONG), tmp_path / "run", retries=1)
    for _ in range(2):
        process = driver.worker("1.0")
        os.kill(process, signal.SIGKILL)
        driver.until(partial(_is_gone, process))
    assert driver.finish() == 2
    assert "lost its worker 2 times" in driver.said()
    assert driver.events("1.0")[-1] == "failed" and driver.events("1.1")[-1] == "finished"
    assert not driver.events("coupling target")
    assert (driver.folder(driver.jobs["1.0"]) / FAILED).exists()


def test_a_mistake_is_not_tried_again(folder: Path, tmp_path: Path, drive: Drive) -> None:
    driver = drive(small_tree(folder, **SHORT, lr=1e30), tmp_path / "run")
    assert driver.finish() == 2
    assert "The last good checkpoint is kept" in driver.said()
    for name in ("1.0", "1.1"):
        assert driver.events(name)[-1] == "failed" and "lost" not in driver.said()


def _rank(rank: int, port: int, prepared: Training, output: Path) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    world = join_world()
    started(prepared, output, machine=QUICK, watch=lambda _event: None, world=world)
    leave_world()


def test_several_processes_on_one_model(folder: Path, tmp_path: Path, drive: Drive) -> None:
    """A group of Ray Train, of which one is killed, makes what two processes of torchrun do."""
    prepared = small_tree(folder, DEIT, **{**LONG, "epochs": 8.0})
    driver = drive(prepared, tmp_path / "run", workers_per_job=(2, 1), cpus_per_job=(2, 1))
    target = driver.folder(driver.jobs["target"])
    driver.until(lambda: list(target.glob("checkpoints/step-*")))
    process, _ = driver.until(lambda: driver.cluster.worker("RayTrainWorker"))
    os.kill(process, signal.SIGKILL)
    assert driver.finish() == 0, driver.said()
    assert "lost its worker 1 times" in driver.said()
    assert not list(driver.output.glob("jobs/*/.ray*"))
    for job in set(driver.output.glob("jobs/*")) - {target}:  # the same parents
        shutil.copytree(job, tmp_path / "two" / "jobs" / job.name)
    port = free_port()
    ranks = [forked(_rank, rank, port, prepared, tmp_path / "two") for rank in range(2)]
    assert finish(ranks) == [0, 0]
    assert_same_model(driver.output, tmp_path / "two")


def test_detectors_too(tmp_path: Path, drive: Drive) -> None:
    """One of two killed in between: both are what this machine alone makes of them."""
    rbdc.export(classifier(), tmp_path / "vit")
    found = [find_backbone(str(tmp_path / "vit")), find_backbone(f"scratch:{tmp_path / 'vit'}")]
    splits = open_splits(write_scenes(tmp_path / "scenes"))
    both = prepare_transfer(found, splits, detection(epochs=6.0))
    alone = started(both, tmp_path / "alone", machine=QUICK, watch=lambda _event: None, jobs=1)
    driver = drive(both, tmp_path / "run")
    os.kill(driver.worker("vit"), signal.SIGKILL)
    assert driver.finish() == 0, driver.said()
    assert "lost its worker 1 times" in driver.said()
    result = json.loads((driver.output / "result.json").read_text())
    for ours, theirs in zip(result["rows"], alone["rows"], strict=True):
        (one,), (other,) = ours["trained"], theirs["trained"]
        assert one["scores"] == json.loads(json.dumps(other["scores"]))
        folders = (driver.output / one["folder"], tmp_path / "alone" / other["folder"])
        first, second = (load_detector(folder / MODEL)[0].state_dict() for folder in folders)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_device_that_workers_do_not_have(folder: Path, tmp_path: Path, drive: Drive) -> None:
    """It is looked for where the work will be."""
    machine = replace(EAGER, device="cuda")
    driver = drive(small_tree(folder, **SHORT), tmp_path / "run", machine)
    assert driver.finish() == 2
    assert "the device 'cuda' cannot be used" in driver.said()
    assert not list(driver.output.glob("jobs/*"))


def test_more_than_the_cluster_has(folder: Path, tmp_path: Path, drive: Drive) -> None:
    driver = drive(small_tree(folder, **SHORT), tmp_path / "run", gpus_per_job=8)
    assert driver.finish() == 2
    assert "a model of level 1 needs 8 GPUs, and the cluster has 0" in driver.said()
    assert not list(driver.output.glob("jobs/*"))


def test_nodes_that_differ(folder: Path, tmp_path: Path, cluster: RayCluster, drive: Drive) -> None:
    if not cluster.isolated:
        pytest.skip("needs namespaces: a node that sees another disk")
    hidden, other = tmp_path / "hidden", tmp_path / "other"
    hidden.mkdir()
    (other / "timm-0.0.1.dist-info").mkdir(parents=True)
    (other / "timm-0.0.1.dist-info" / "METADATA").write_text("Name: timm\nVersion: 0.0.1\n")
    cluster.add_odd(hidden=hidden, python_path=other)
    try:
        unseen = drive(small_tree(folder, **SHORT), hidden / "run")
        assert unseen.finish() == 2
        assert f"cannot access {hidden / 'run' / 'jobs'}" in unseen.said()
        differing = drive(small_tree(folder, **SHORT), tmp_path / "run")
        assert differing.finish() == 2
        assert "has timm 0.0.1, and here it is" in differing.said()
    finally:
        cluster.remove_odd()
