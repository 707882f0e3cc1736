"""Run jobs in a folder, from the first check to the last result, and continue where they stopped.

`Run` is what is computed, `Where` is where, and `start(run, folder, where)` brings them together.
"""

import json
import platform
import sys
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from rbdc.disk import free_bytes, is_writable, write_json
from rbdc.errors import Interrupted, RunError, TrainingError, nearest
from rbdc.jobs.engine import Event, Watcher
from rbdc.jobs.job import Context, Job, Node, TrainingJob
from rbdc.jobs.layout import JOB, JOBS, LOCK, RESULT, RUN
from rbdc.jobs.lock import locked
from rbdc.jobs.store import Store, folder_name
from rbdc.runs.concurrency import (
    Concurrency,
    choose_concurrency,
    expected_times,
    make_engine,
    threads_of,
)
from rbdc.runs.record import FORMAT, check_same, read_record
from rbdc.runs.request import Result, Run, Where, settle
from rbdc.runs.trackers import check_trackers, with_trackers
from rbdc.training.choices import choice_lines

_DECIDING = ("device", "channels_last", "deterministic", "tf32", "parallel", "compile")
"""Settings of the machine that change the last bits of a training."""


def chosen_lines(run: Run, where: Where) -> list[str]:
    """Return what is chosen for a run's trainings on their device and why, for people."""
    where, request = settle(where), run.request
    assert where.facts is not None
    trainings = [node.job for node in run.nodes if node.job.trains]
    return choice_lines(
        where.machine,
        where.facts,
        str(request["amp_dtype"]) if request.get("amp") else "float32",
        [job.flops for job in trainings if job.compiles],
        workers=max(job.loader_processes(where.machine) for job in trainings),
        processes=where.world.size,
    )


def start(
    run: Run, output: str | Path, where: Where, watch: Watcher = lambda _event: None
) -> Result | None:
    """Check a run, then execute what is not finished of it. See `check` and `execute`."""
    where = settle(where)
    check(run, Path(output), where)
    return execute(run, Path(output), where, watch)


def check(run: Run, output: Path, where: Where) -> None:
    """Refuse everything that can be known to fail. Nothing is written."""
    _check_jobs(where)
    _check_folder(output)
    check_trackers(where.machine.log)
    jobs = [node.job for node in run.nodes]
    for job in jobs:
        job.check(where.machine, where.world.size)
        if where.cluster.engine == "local":  # a cluster's workers check their own devices
            job.check_device(where.machine, where.world.local_rank)
    if where.node is not None:
        _jobs_of(run, where.node, Store(output / JOBS))
    needed, free = _needed_bytes(run, output, where), free_bytes(output)
    if needed > free:
        raise RunError(
            f"the run needs up to {needed / 1e9:.1f} GB and {output} has {free / 1e9:.1f} GB free",
            "Make room, choose another folder, or keep fewer checkpoints (--keep).",
        )


def execute(run: Run, output: Path, where: Where, watch: Watcher) -> Result | None:
    """Run what is not finished of the jobs in `output`, and return the result.

    The same run on the same folder continues where it stopped; another one is refused. Returns
    None if only one model was asked for (`where.node`) and others are not trained yet.
    """
    where = settle(where)
    store, world = Store(output / JOBS), where.world
    alone = where.node is not None
    jobs = _jobs_of(run, where.node, store) if where.node else [node.job for node in run.nodes]
    with ExitStack() as stack:

        def begin() -> Concurrency:
            output.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(output, shared=alone))
            if alone:
                stack.enter_context(locked(store.begin(jobs[-1])))
            else:
                store.clean()
            return _begin(run, output, where)

        concurrency = world.broadcast(begin)
        engine = where.engine or make_engine(run, concurrency, where)
        if world.is_main:
            watch = with_trackers(where.machine.log, run, output, watch)
        if concurrency.reason:
            watch(Event(kind="note", key="", note=concurrency.reason))
        if world.size == 1 and where.cluster.engine == "local" and not alone:
            for event in expected_times(run, store, concurrency, where):
                watch(event)
        try:
            engine.run(
                jobs,
                Context(store=store, machine=where.machine, world=world),
                _watching(run, output, watch, writes=world.is_main),
            )
        except TrainingError as error:
            if not run.skips_failures:
                raise
            warnings.warn(f"a training failed, its result is missing: {error}", stacklevel=2)
        except Interrupted:
            if world.is_main and run.targets:
                write_json(output / RESULT, run.result(output))
            raise

        def finish() -> Result | None:
            if alone and not all(store.result(node.job) for node in run.nodes):
                return None
            result = run.result(output)
            run.finish(output, result)  # first: result.json says that the run is finished
            write_json(output / RESULT, result)
            return result

        return world.broadcast(finish)


def _watching(run: Run, output: Path, watch: Watcher, *, writes: bool) -> Watcher:
    """Return a watcher that also writes the result so far whenever a target is finished."""

    def watched(event: Event) -> None:
        watch(event)
        if writes and event.kind == "finished" and event.key in run.targets:
            write_json(output / RESULT, run.result(output))

    return watched


def _jobs_of(run: Run, name: str, store: Store) -> list[Job]:
    """Return the job of one model, after the growth job that makes its start and its parents."""
    trainings = {node.name: node.job for node in run.nodes if node.job.trains}
    if name not in trainings:
        raise RunError(
            f"the tree has no model called {name!r}",
            nearest(name, trainings) or f"Its models are {', '.join(trainings)}.",
        )
    job = trainings[name]
    names = {other.key: known for known, other in trainings.items()}
    parents = [parent for growth in job.parents for parent in growth.parents]
    missing = [names[parent.key] for parent in parents if not store.result(parent)]
    if missing:
        raise RunError(
            f"{name} is coupled of models that are not trained yet: {', '.join(missing)}",
            "Train these first.",
        )
    return [*parents, *job.parents, job]


def _command() -> list[str]:
    """Return the words behind `rbdc` that started this process; none if it was Python code."""
    return sys.argv[1:] if Path(sys.argv[0]).stem in ("rbdc", "cli") else []


def _check_jobs(where: Where) -> None:
    jobs, engine = where.jobs, where.cluster.engine
    if where.node and (jobs is not None or engine != "local"):
        raise RunError(
            "--node trains one model in this process, and --jobs or --engine says how several run",
            "Leave one of them out.",
        )
    if jobs is not None and engine != "local":
        raise RunError(
            f"jobs is {jobs}, and {engine} runs as many side by side as there is room for",
            "Leave --jobs out; --cpus-per-job and --gpus-per-job say how much room one takes.",
        )
    if jobs is not None and jobs < 1:
        raise RunError(f"jobs is {jobs}, expected 1 or more", "1 is one training at a time.")
    if jobs is not None and jobs > 1 and where.world.size > 1:
        raise RunError(
            f"{where.world.size} processes train each model together: there is no room for {jobs} "
            "jobs",
            "Leave --jobs out under torchrun.",
        )


def _check_folder(output: Path) -> None:
    if not is_writable(output):
        raise RunError(f"{output} cannot be written to", "Choose another folder.")
    read_record(output)  # refuses other formats
    ours = (output / RUN).exists() or any((output / JOBS).glob(f"*/{JOB}"))
    if output.exists() and not ours:
        foreign = [p.name for p in output.iterdir() if p.name != LOCK and RUN not in p.name]
        if foreign:
            raise RunError(
                f"{output} holds something ({foreign[0]}), but no run of ours",
                "Choose an empty or a new folder.",
            )


def _needed_bytes(run: Run, output: Path, where: Where) -> int:
    """Return the disk space that results to come and the largest level's checkpoints take."""
    store = Store(output / JOBS)
    siblings = Counter(node.level for node in run.nodes if node.job.trains)
    streams = Counter(node.job.stream for node in run.nodes if isinstance(node.job, TrainingJob))
    at_a_time = where.jobs or (
        torch.get_num_threads() if where.cluster.engine == "local" else len(run.nodes)
    )
    results = checkpoints = largest = 0
    for node in run.nodes:
        job = node.job
        largest = max(largest, job.model_bytes)
        if not store.result(job):
            results += job.result_bytes() - store.bytes_of(job)
            group = streams[job.stream] if isinstance(job, TrainingJob) and job.stream else 1
            at_once = max(group, min(siblings[node.level], at_a_time))
            checkpoints = max(checkpoints, at_once * job.checkpoint_bytes(where.machine))
    return max(0, results + checkpoints) + largest


def _begin(run: Run, output: Path, where: Where) -> Concurrency:
    """Check an old folder's request against this one, and write down how the run is run."""
    assert where.facts is not None
    old = read_record(output)
    identity = json.loads(json.dumps(run.identity))
    if old:
        check_same(output, old["identity"], identity)
    concurrency = choose_concurrency(run, where, old["engine"] if old else {})
    content = {
        "format": FORMAT,
        "kind": run.kind,
        "request": dict(run.request),
        "identity": identity,
        "nodes": [_describe(node) for node in run.nodes],
        "engine": {
            "name": where.cluster.engine,
            **asdict(concurrency),
            "processes": where.world.size,
        },
        "data": dict(run.data),
        "machine": where.machine.to_json(),
        "device": {**asdict(where.facts), "chosen": chosen_lines(run, where)},
        "environment": environment(),
        "command": (old or {}).get("command", _command()),
        "started": (old or {}).get("started", datetime.now(UTC).isoformat(timespec="seconds")),
    }
    if old:
        _warn_of_changes(old.get("environment", {}), content["environment"])
        _warn_of_changes(_how(run, old), _how(run, content))
    write_json(output / RUN, content)
    return concurrency


def _describe(node: Node) -> dict[str, Any]:
    job = node.job
    return {
        "name": node.name,
        "level": node.level,
        "key": job.key,
        "folder": f"{JOBS}/{folder_name(job)}",
        "parents": [parent.key for parent in job.parents],
        "flops": job.flops,
        **job.describe(),
    }


def environment() -> dict[str, str]:
    """Return the versions and devices that results may depend on in their last bits."""
    packages = ("rbdc", "torch", "torchvision", "timm", "transformers", "numpy")
    return {
        **{name: version(name) for name in packages if find_spec(name)},  # one is optional
        "python": platform.python_version(),
        "cpu": platform.processor() or platform.machine(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
    }


def _how(run: Run, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a run is carried out, as far as the last bits of its results depend on it."""
    engine, machine = record.get("engine", {}), record.get("machine", {})
    jobs, threads = engine.get("jobs", 1), engine.get("threads", 1)
    each = threads_of(run, Concurrency(jobs, threads)).values()
    return {
        "threads per training": " or ".join(map(str, sorted(set(each)))),
        "processes per training": engine.get("processes"),
        **{name: machine.get(name) for name in _DECIDING},
    }


def _warn_of_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    for name, value in new.items():
        if old.get(name) != value:
            warnings.warn(
                f"the run began with {name} {old.get(name)} and goes on with {value}: "
                "results may differ in their last bits",
                stacklevel=2,
            )
