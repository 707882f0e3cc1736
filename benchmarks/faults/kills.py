"""Runs that are killed, at file operations and at random moments, until they are let to end."""

import os
import random
import shutil
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from benchmarks.faults.child import kill_at
from benchmarks.faults.matrix import Kind, Outcome, failed, same
from benchmarks.faults.small import MODEL, about, difference, finished, fresh, ray_cluster, start
from rbdc.errors import RbdcError
from rbdc.report.run import run_status

KILLS = 5  # of one run


def kinds() -> list[Kind]:
    """Return a kind per way to run, and one that kills at each file operation."""
    texts = {
        "memory": ("images in memory, one process", 40),
        "folder": ("images from files, one process", 30),
        "two": ("two trainings side by side", 40),
        "ddp": ("two processes of a training (DDP)", 20),
        "fsdp": ("two processes of a training (FSDP)", 10),
    }
    each, operations = "SIGKILL before each file operation, in turn", about("memory")["operations"]
    return [
        Kind(name="kill-operation", text=each, cases=operations, attempt=_at_each),
        *(
            Kind(name=f"kill-{way}", text=f"SIGKILL, five of a run: {text}", cases=cases,
                 attempt=partial(_attempt, way))
            for way, (text, cases) in texts.items()
        ),
        Kind(name="kill-ray", text="SIGKILL of workers and drivers of a run on a Ray cluster",
             cases=6, attempt=_with_ray),
    ]  # fmt: skip


def _at_each(number: int, _draw: random.Random) -> Outcome:
    """Kill a run once, before the operation with this number."""
    run = fresh("kill-operation") / "run"
    start("memory", run, partial(kill_at, run, number)).kill(60)
    return _end("memory", run, 1)


def _attempt(way: str, _number: int, draw: random.Random) -> Outcome:
    """Kill a run five times, at operations and at moments, then let it end."""
    run, known, killed = fresh(f"kill-{way}") / "run", about(way), 0
    for kill in range(KILLS):
        part = 1 / (1 + kill)  # there is less and less left to do
        if kill % 2:
            operation, moment = None, draw.uniform(0, known["seconds"] * part)
        else:
            operation, moment = draw.randrange(int(known["operations"] * part)), 60.0
        before = partial(kill_at, run, operation) if operation is not None else None
        running = start(way, run, before).kill(moment)
        killed += running or operation is not None
        if problem := _look(run):
            return failed(problem, killed)
    return _end(way, run, killed)


def _with_ray(_number: int, draw: random.Random) -> Outcome:
    """Kill a worker and the driver of a run on a cluster, five times, then let it end."""
    run, known, killed = fresh("kill-ray") / "run", about("ray"), 0
    for _ in range(KILLS):
        running = start("ray", run)
        while running.alive and not ray_cluster().worker(MODEL):
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.3))
        if worker := ray_cluster().worker(MODEL):
            os.kill(worker[0], signal.SIGKILL)
            killed += 1
        killed += running.kill(draw.uniform(0, known["seconds"] / 4))
        if problem := _look(run):
            return failed(problem, killed)
    return _end("ray", run, killed)


def _end(way: str, run: Path, killed: int) -> Outcome:
    """Let a run that was killed end, and compare its bits."""
    ended = start(way, run).wait()
    problem = ended.story if ended.code else difference(run, finished(way))
    if problem:
        return failed(problem, killed)
    shutil.rmtree(run.parent)
    return same(killed)


def _look(run: Path) -> str:
    """Return what is wrong with the status of a run that was killed; empty if nothing is."""
    try:
        with suppress(RbdcError):
            run_status(run)
    except Exception as error:
        return f"status: {type(error).__name__}: {error}"
    return ""
