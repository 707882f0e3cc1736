"""A run: jobs in one folder, from the first check to the last result."""

import os
import platform
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch

from rbdc.disk import free_bytes, is_writable, read_json, write_json
from rbdc.errors import RunError
from rbdc.settings import Cluster
from rbdc.training.machine import default_threads
from rbdc.jobs.engine import Engine, InProcess, SideBySide, Watcher
from rbdc.jobs.execute import Workshop
from rbdc.jobs.lock import locked
from rbdc.jobs.tree import Node
from rbdc.jobs.layout import JOB, JOBS, LOCK, RUN
from rbdc.cluster.ray_engine import RayEngine
from rbdc.jobs.store import folder_name

Result = TypeVar("Result")


def run_nodes(
    nodes: Sequence[Node],
    shop: Workshop,
    output: Path,
    *,
    request: Mapping[str, Any],
    watch: Watcher,
    finish: Callable[[], Result],
    jobs: int | None = None,
    cluster: Cluster | None = None,
    engine: Engine | None = None,
) -> Result:
    """Run what is not finished of the nodes' jobs in `output`, then `finish`, and give its result.

    The same request on the same folder goes on where it was; another one is refused. `jobs`
    trainings go on side by side on this machine; by default as many as the shop says. A `cluster`,
    or another `engine` altogether, runs them as it likes.
    """
    cluster = cluster or Cluster()
    check_run(nodes, shop, output, jobs, cluster)
    world = shop.world
    with ExitStack() as stack:

        def begin() -> dict[str, Any]:
            output.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(output))
            shop.store.clean()  # it is ours: check_run has looked
            return begin_run(output, nodes, request, shop, jobs, cluster)

        chosen = _engine(nodes, world.broadcast(begin), cluster)
        (engine or chosen).run([node.job for node in nodes], shop, watch)
        return world.broadcast(finish)


def check_run(
    nodes: Sequence[Node],
    shop: Workshop,
    output: Path,
    jobs: int | None = None,
    cluster: Cluster | None = None,
) -> None:
    """Everything that can be known to fail, before the first step."""
    if jobs is not None and cluster is not None and cluster.engine != "local":
        raise RunError(
            f"jobs is {jobs}, and {cluster.engine} runs as many side by side as there is room for",
            "Leave --jobs out; --cpus-per-job and --gpus-per-job say how much room one takes.",
        )
    if jobs is not None and jobs < 1:
        raise RunError(f"jobs is {jobs}, expected 1 or more", "1 is one training at a time.")
    if jobs is not None and jobs > 1 and shop.world.size > 1:
        raise RunError(
            f"{shop.world.size} processes train each model together: there is no room for {jobs} "
            "jobs",
            "Leave --jobs out under torchrun.",
        )
    _check_folder(output)
    todo = [node.job for node in nodes]
    shop.check(todo)
    if (
        cluster is None or cluster.engine == "local"
    ):  # another engine's machines are looked at there
        shop.check_device(todo)
    needed, free = shop.needed_bytes(nodes, jobs), free_bytes(output)
    if needed > free:
        raise RunError(
            f"the run needs up to {needed / 1e9:.1f} GB and {output} has {free / 1e9:.1f} GB free",
            "Make room, choose another folder, or keep fewer checkpoints (--keep).",
        )


def _check_folder(output: Path) -> None:
    if not is_writable(output):
        raise RunError(f"{output} cannot be written to", "Choose another folder.")
    ours = (output / RUN).exists() or any((output / JOBS).glob(f"*/{JOB}"))
    if output.exists() and not ours:
        foreign = [p.name for p in output.iterdir() if p.name != LOCK and RUN not in p.name]
        if foreign:
            raise RunError(
                f"{output} holds something ({foreign[0]}), but no run of ours",
                "Choose an empty or a new folder.",
            )


def begin_run(
    output: Path,
    nodes: Sequence[Node],
    request: Mapping[str, Any],
    shop: Workshop,
    jobs: int | None,
    cluster: Cluster,
) -> dict[str, Any]:
    """Check an old folder's request against this one, and write down how the run is run."""
    old = read_json(output / RUN)
    if old:
        _check_same(output, old["request"], request)
    machine, world = shop.machine, shop.world
    todo = [node.job for node in nodes]
    threads = machine.threads or default_threads(shop.decoders(todo))
    if old and jobs is None:
        jobs = old["engine"]["jobs"]
    if old and not machine.threads:
        threads = old["engine"]["threads"]
    if jobs is None and cluster.engine == "local":
        jobs = shop.default_jobs(todo, threads)
    content = {
        "request": request,
        "nodes": [_describe(node, shop) for node in nodes],
        "engine": {
            "name": cluster.engine,
            "jobs": jobs,
            "threads": threads,
            "processes": world.size,
        },
        "data": shop.data_record(),
        "machine": machine.to_json(),
        "environment": environment(),
        "command": (old or {}).get("command", sys.argv[1:]),
        "started": (old or {}).get("started", datetime.now(UTC).isoformat(timespec="seconds")),
    }
    if old:
        _warn_of_versions(old["environment"], content["environment"])
    write_json(output / RUN, content)
    return content


def _engine(nodes: Sequence[Node], run: Mapping[str, Any], cluster: Cluster) -> Engine:
    """On this machine siblings side by side share the threads; one alone has them all."""
    if cluster.engine == "ray":
        return RayEngine(cluster=cluster, levels={node.job.key: node.level for node in nodes})
    jobs, threads = run["engine"]["jobs"], run["engine"]["threads"]
    siblings = Counter(node.level for node in nodes if node.job.trains)
    share = {
        node.job.key: max(1, threads // min(jobs, max(1, siblings[node.level]))) for node in nodes
    }
    if jobs == 1 or run["engine"]["processes"] > 1:
        return InProcess(threads=share)
    gpus = torch.cuda.device_count() if run["machine"]["device"] in ("auto", "cuda") else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    devices = [visible.split(",")[number % gpus] for number in range(jobs)] if gpus else []
    return SideBySide(workers=jobs, threads=share, all_threads=max(threads, jobs), devices=devices)


def _describe(node: Node, shop: Workshop) -> dict[str, Any]:
    job = node.job
    return {
        "name": node.name,
        "level": node.level,
        "key": job.key,
        "folder": f"{JOBS}/{folder_name(job)}",
        "parents": [parent.key for parent in job.parents],
        "flops": shop.flops(job),
        **job.describe(),
    }


def environment() -> dict[str, str]:
    packages = ("rbdc", "torch", "torchvision", "timm", "numpy")
    return {
        **{name: version(name) for name in packages},
        "python": platform.python_version(),
        "cpu": platform.processor() or platform.machine(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
    }


def _warn_of_versions(old: Mapping[str, str], new: Mapping[str, str]) -> None:
    for name, value in new.items():
        if old.get(name) != value:
            warnings.warn(
                f"the run began with {name} {old.get(name)} and goes on with {value}: "
                "results may differ in their last bits",
                stacklevel=2,
            )


def _check_same(output: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    different = list(differences(old, new))
    if different:
        more = f" and {len(different) - 5} more" if different[5:] else ""
        raise RunError(
            f"{output} holds a run that was asked for otherwise: "
            + "; ".join(f"{name} was {was}, now {now}" for name, was, now in different[:5])
            + more,
            "Ask for the same to go on, or choose another folder.",
        )


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], where: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """(name, old value, new value) of everything that differs, nested names with dots."""
    for name in dict.fromkeys([*old, *new]):
        was, now = old.get(name), new.get(name)
        if isinstance(was, dict) and isinstance(now, dict):
            yield from differences(was, now, f"{where}{name}.")
        elif was != now:
            yield f"{where}{name}", was, now
