"""The tree on a real Ray cluster of two nodes: run, killed in all its parts, gone on with."""

import json
import os
import shutil
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rbdc
from rbdc.cluster import ray_start
from rbdc.cluster.ray_start import ray_started
from rbdc.cluster.resources import ClusterResources, JobResources, check_resources, job_resources
from rbdc.errors import Interrupted, RbdcError, RunError
from rbdc.experiments.train import Training
from rbdc.jobs.engine import Event
from rbdc.jobs.job import Job
from rbdc.jobs.layout import FAILED, LEASE, MODEL
from rbdc.jobs.store import Store
from rbdc.plan import Scaling
from rbdc.settings import Cluster, Machine
from rbdc.training import join_world
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
LONG: dict[str, Any] = {"steps": 1, "epochs": 24.0}  # long enough to be killed in
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


class Driver:
    """A run on the cluster in a process of its own, and what is known of it."""

    def __init__(
        self,
        cluster: RayCluster,
        prepared: Training | Transfer,
        output: Path,
        machine: Machine = EAGER,
        **settings: Any,
    ) -> None:
        self.cluster, self.output = cluster, output
        self.log = output.with_suffix(".log")
        self.log.write_text("")
        nodes = prepared.run().nodes
        self.jobs = {node.name: node.job for node in nodes}
        asked = Cluster(**{"engine": "ray", "address": cluster.address, **settings})
        self.process: ForkProcess = cluster.start(
            _drive, prepared, output, machine, asked, self.log
        )

    @property
    def pid(self) -> int:
        return self.process.pid or 0

    def until(self, there: Callable[[], Any]) -> Any:
        """Wait for something to be there, as long as the run goes on."""
        while not (found := there()):
            assert self.process.is_alive(), self.said()
            time.sleep(0.01)
        return found

    def worker(self, name: str) -> tuple[int, int]:
        """(process, raylet) of the job of that name, once it has reported and saved something."""
        job = self.jobs[name]
        self.until(lambda: list(self.folder(job).glob("checkpoints/step-*")))
        self.until(lambda: "started" in self.events(name))
        found: tuple[int, int] = self.until(lambda: self.cluster.worker(_title(job)))
        return found

    def folder(self, job: Job) -> Path:
        return self.output / "jobs" / f"{job.label}-{job.key[:16]}"

    def finish(self) -> int:
        self.process.join(300)
        return -1 if self.process.exitcode is None else self.process.exitcode

    def said(self) -> str:
        return self.log.read_text()

    def events(self, name: str) -> list[str]:
        lines = [json.loads(line) for line in self.said().splitlines() if line.startswith("{")]
        return [line["kind"] for line in lines if line["key"] == self.jobs[name].key]


def _is_gone(process: int) -> bool:
    return not Path(f"/proc/{process}").exists()


def _title(job: Job) -> str:
    return f"{job.label}-{job.key[:8]}"


def _drive(prepared: Any, output: Path, machine: Machine, cluster: Cluster, log: Path) -> None:
    """Exit codes are those of the command line; everything said goes into the log."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1)
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, *_others: print(message, flush=True)

    def watch(event: Event) -> None:
        print(json.dumps({"kind": event.kind, "key": event.key}), flush=True)

    code = 0
    try:
        started(prepared, output, machine=machine, watch=watch, cluster=cluster)
    except Interrupted:
        code = 75
    except RbdcError as error:
        print(error)
        code = 2
    sys.stdout.flush()
    os._exit(code)


@pytest.fixture
def drive(cluster: RayCluster) -> Iterator[Callable[..., Driver]]:
    """Start runs that end with the test."""
    with ExitStack() as stack:

        def start(*args: Any, **settings: Any) -> Driver:
            driver = Driver(cluster, *args, **settings)
            stack.callback(driver.process.join)
            stack.callback(driver.process.kill)
            return driver

        yield start


Drive = Callable[..., Driver]


def test_a_killed_worker_and_the_same_bits(
    folder: Path, straight: Path, tmp_path: Path, drive: Drive
) -> None:
    driver = drive(small_tree(folder, **LONG), tmp_path / "run")
    os.kill(driver.worker("1.0")[0], signal.SIGKILL)
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
    places = {name: driver.worker(name)[1] for name in ("1.0", "1.1")}
    victim = next(raylet for raylet in places.values() if raylet != cluster.raylets[0])
    os.kill(victim, signal.SIGKILL)
    cluster.raylets.remove(victim)
    assert driver.finish() == 0, driver.said()
    assert_same_model(straight, driver.output)
    assert "lost its worker 1 times" in driver.said()
    cluster.add()


def test_a_node_that_hangs(
    folder: Path, straight: Path, tmp_path: Path, cluster: RayCluster, drive: Drive
) -> None:
    """Ray gives it up, and the job to another; then its worker wakes up, and would train on."""
    driver = drive(small_tree(folder, **LONG), tmp_path / "run")
    places = {name: driver.worker(name) for name in ("1.0", "1.1")}
    name = next(name for name, (_, raylet) in places.items() if raylet != cluster.raylets[0])
    worker, raylet = places[name]
    lease = driver.folder(driver.jobs[name]) / LEASE
    first = lease.read_text()
    for process in (worker, raylet):
        os.kill(process, signal.SIGSTOP)
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
            threads=1,
            board=SimpleNamespace(ended=SimpleNamespace(remote=lambda: silence)),
            cwd=".",
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
    driver.worker("1.0")
    with pytest.raises(RunError, match=rf"in use by another run: process {driver.pid} "):
        run(prepared, output)
    os.kill(driver.pid, signal.SIGKILL)
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
    process, _ = driver.until(lambda: driver.cluster.worker(_title(victim)))
    driver.until(lambda: "progress" in driver.events("1.0"))
    os.kill(process, signal.SIGTERM)
    driver.until(lambda: "its worker got a stop signal" in driver.said())
    assert list(driver.folder(victim).glob("checkpoints/step-*"))
    driver.until(lambda: driver.events("target").count("progress") > 1)
    os.kill(driver.pid, signal.SIGTERM)
    assert driver.finish() == 75, driver.said()
    assert list(driver.folder(driver.jobs["target"]).glob("checkpoints/step-*"))
    again = drive(prepared, output)
    assert again.finish() == 0, again.said()
    assert_same_model(straight, output)


def test_a_job_is_given_up_and_the_others_go_on(folder: Path, tmp_path: Path, drive: Drive) -> None:
    driver = drive(small_tree(folder, **LONG), tmp_path / "run", retries=1)
    for _ in range(2):
        process, _ = driver.worker("1.0")
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
    prepared = small_tree(folder, DEIT, **{**LONG, "epochs": 12.0})
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
    both = prepare_transfer(found, splits, detection(epochs=12.0))
    alone = started(both, tmp_path / "alone", machine=QUICK, watch=lambda _event: None, jobs=1)
    driver = drive(both, tmp_path / "run")
    os.kill(driver.worker("vit")[0], signal.SIGKILL)
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


@pytest.mark.parametrize("kind", ["closed", "silent", "nonsense"])
def test_an_address_that_does_not_answer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_start, "ANSWER_SECONDS", 3)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if kind == "silent":
            server.listen()
        address = f"127.0.0.1:{server.getsockname()[1]}" if kind != "nonsense" else "here"
        with pytest.raises(RunError, match=address), ray_started(address):
            pass
    assert "ray" not in sys.modules


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for address in (None, "auto"):
        with pytest.raises(RunError, match="Ray is not installed"), ray_started(address):
            pass


def _listening(folder: Path) -> None:
    """Everything that a Ray of our own listens to, and whether a token is asked for."""
    os.environ["HOME"] = str(folder)
    warnings.simplefilter("ignore")
    with ray_started(None) as ray:
        ray.get(ray.remote(lambda: None).remote())
        inodes = {
            str(link.readlink())
            for process in Path("/proc").glob("[0-9]*")
            if _is_child(int(process.name), os.getpid())
            for link in process.glob("fd/*")
            if link.is_symlink()
        }
        found = [
            line.split()[1].partition(":")[0]
            for table in ("tcp", "tcp6")
            for line in Path("/proc/net", table).read_text().splitlines()[1:]
            if line.split()[3] == "0A" and f"socket:[{line.split()[9]}]" in inodes
        ]
    said = {"addresses": found, "token": os.environ["RAY_AUTH_MODE"]}
    (folder / "found.json").write_text(json.dumps(said))


def _is_child(pid: int, of: int) -> bool:
    while pid not in (0, 1, of):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return False
        pid = int(stat.rpartition(")")[2].split()[1])
    return pid == of


def test_a_ray_of_our_own_is_for_this_machine_and_this_user(tmp_path: Path) -> None:
    process = forked(_listening, tmp_path)
    process.join()
    found = json.loads((tmp_path / "found.json").read_text())
    loopback = {"0100007F", "0000000000000000FFFF00000100007F"}
    assert len(found["addresses"]) >= 3 and set(found["addresses"]) <= loopback
    assert found["token"] == "token" and not (tmp_path / ".ray").exists()


def _node(**resources: float) -> dict[str, Any]:
    return {"Resources": resources, "Alive": True}


def test_shares_by_level(folder: Path) -> None:
    prepared = small_tree(folder)  # four leaves, two models, the target
    jobs = {node.name: node.job for node in prepared.nodes}
    levels = {node.job.key: node.level for node in prepared.nodes}

    speeds: dict[int, Scaling] = {}

    def shares(nodes: list[dict[str, Any]], **asked: Any) -> dict[str, JobResources]:
        cluster = Cluster(engine="ray", **asked)
        found = job_resources(list(jobs.values()), levels, cluster, nodes, speeds)
        return {name: found[job.key] for name, job in jobs.items()}

    cores = shares([_node(CPU=8.0)])
    assert [cores[name].cpus for name in ("2.0", "1.0", "target")] == [2, 4, 8]
    spread = shares([_node(CPU=4.0), _node(CPU=4.0)])
    assert [spread[name].cpus for name in ("2.0", "1.0", "target")] == [2, 4, 4]
    gpus = shares([_node(CPU=64.0, GPU=8.0)], gpus_per_job=(8, 2, 1))
    assert gpus["target"] == JobResources(workers=8, cpus=1 / 8, gpus=1)
    assert gpus["1.0"].workers == 2 and gpus["2.3"] == JobResources(workers=1, cpus=1, gpus=1)
    assert gpus["coupling target"].workers == 1 and gpus["coupling target"].gpus == 1


def test_gpus_by_measured_speed(folder: Path) -> None:
    """Siblings side by side first, then each on several, as far as that is faster."""
    prepared = small_tree(folder)
    jobs = [node.job for node in prepared.nodes]
    levels = {node.job.key: node.level for node in prepared.nodes}
    names = {node.job.key: node.name for node in prepared.nodes}

    def gpus(nodes: list[dict[str, Any]], *, images_per_second: float, **others: Any) -> list[int]:
        speed = Scaling(
            **{
                "batch_size": 1024,
                "images_per_second": (images_per_second,),
                "gradient_bytes": (4_000_000,),
                **others,
            }
        )
        speeds = dict.fromkeys((0, 1, 2), speed)
        found = job_resources(jobs, levels, Cluster(engine="ray"), nodes, speeds)
        check_resources(nodes, {names[key]: share for key, share in found.items()})
        by_name = {names[key]: share for key, share in found.items()}
        chosen = [by_name[name] for name in ("2.0", "1.0", "target")]
        assert all(share.gpus == 1 for share in chosen)
        return [share.workers for share in chosen]

    eight, node = [_node(CPU=64.0, GPU=8.0)], _node(CPU=16.0, GPU=4.0)
    assert gpus(eight, images_per_second=500) == [2, 4, 8]
    assert gpus([node, node], images_per_second=500) == [2, 4, 8]
    assert gpus([_node(CPU=8.0, GPU=2.0)], images_per_second=500) == [1, 1, 2]
    # a step that is as short as steps can be gets no shorter
    assert gpus(eight, images_per_second=100_000) == [1, 1, 1]
    # 256 images of a step are all that one has room for
    assert gpus(eight, images_per_second=100_000, max_images_per_device=256) == [4, 4, 4]
    assert gpus([_node(CPU=1.0, GPU=1.0)], images_per_second=500, max_images_per_device=256) == [
        1,
        1,
        1,
    ]


def test_room(folder: Path) -> None:
    gone = {"Resources": {"CPU": 8.0}, "Alive": False}
    room = ClusterResources.of([_node(CPU=2.0, GPU=1.0), _node(CPU=2.0), gone])
    one = JobResources(workers=1, cpus=1, gpus=0)
    assert room.holds([one] * 4) and not room.holds([one] * 5)
    large = JobResources(workers=2, cpus=1, gpus=1)
    assert not room.holds([large])
    jobs = [node.job for node in small_tree(folder).nodes[:4]]
    shares = {job.key: share for job, share in zip(jobs, [one, one, large, one], strict=True)}
    assert room.fitting(jobs, shares, []) == jobs[:2]  # none is let past another
    assert room.fitting(jobs, shares, [one] * 3) == jobs[:1]
    assert room.fitting(jobs[2:], shares, [one]) == []
    assert room.fitting(jobs[2:], shares, []) == jobs[2:3]  # whatever it is: Ray may know better


def test_shares_that_no_node_can_give() -> None:
    nodes = [_node(CPU=4.0, GPU=2.0), _node(CPU=4.0, GPU=2.0)]
    check_resources(nodes, {"it": JobResources(workers=4, cpus=2, gpus=1)})
    with pytest.raises(RunError, match="it needs 5 GPUs, and the cluster has 4"):
        check_resources(nodes, {"it": JobResources(workers=5, cpus=1, gpus=1)})
    with pytest.raises(RunError, match="1 workers with 6 CPUs each, and the nodes have"):
        check_resources(nodes, {"it": JobResources(workers=1, cpus=6, gpus=0)})
