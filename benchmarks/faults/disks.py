"""Disks that are full, read-only or lose what was not waited for, and clocks that jump."""

import errno
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from datetime import datetime, tzinfo
from functools import partial
from pathlib import Path

from benchmarks.faults.child import before_operations, fail_from, kill_at
from benchmarks.faults.matrix import Kind, Outcome, failed, same
from benchmarks.faults.small import about, difference, finished, fresh, root, start
from rbdc.jobs import lock
from rbdc.runs import run as runs

YEARS = 365.25 * 86400


def kinds() -> list[Kind]:
    """Return the kinds of this file."""
    full, read_only = (partial(_attempt_disk, n) for n in (errno.ENOSPC, errno.EROFS))
    operations = about("memory")["operations"]
    lost = "power lost before each file operation: what was not synced is torn"
    return [
        Kind(name="power", text=lost, cases=operations, attempt=_attempt_power),
        Kind(name="full", text="the disk is full from an operation on", cases=100, attempt=full),
        Kind(name="read-only", text="the disk becomes read-only", cases=50, attempt=read_only),
        Kind(name="clock", text="the clock jumps by years", cases=30, attempt=_attempt_clock),
    ]


def _ends_well(run: Path) -> Outcome:
    ended = start("memory", run).wait()
    problem = ended.story if ended.code else difference(run, finished("memory"))
    if problem:
        return failed(problem)
    shutil.rmtree(run.parent)
    return same()


def _attempt_disk(number: int, _number: int, draw: random.Random) -> Outcome:
    """Let operations fail for good, or a few times; the next command must make up for it."""
    run = fresh("disk") / "run"
    operation = draw.randrange(about("memory")["operations"])
    times = draw.choice((1, 3, 10**9))
    fault = partial(fail_from, run, operation, number, times=times)
    ended = start("memory", run, fault).wait()
    if ended.code != 0 and not ended.refusal:
        return failed(f"operation {operation}, {times} times: {ended.story}")
    return _ends_well(run)


def _attempt_clock(_number: int, draw: random.Random) -> Outcome:
    """Kill a run after the clock has jumped, set its files' times, and let it jump again."""
    run = fresh("clock") / "run"
    operation = draw.randrange(about("memory")["operations"])
    jumps = [draw.uniform(-10, 10) * YEARS for _ in range(3)]

    def first() -> None:
        _jump(jumps[0])
        kill_at(run, operation)

    start("memory", run, first).kill(60)
    for path in run.rglob("*"):
        moved = time.time() + jumps[1]
        os.utime(path, (moved, moved))
    ended = start("memory", run, partial(_jump, jumps[2])).wait()
    return failed(ended.story) if ended.code else _ends_well(run)


def _jump(seconds: float) -> None:
    """Move this process's wall clock."""
    real, real_ns = time.time, time.time_ns

    class Moved(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> "Moved":
            return cls.fromtimestamp(real() + seconds, tz)

    time.time = lambda: real() + seconds
    time.time_ns = lambda: real_ns() + int(seconds * 1e9)
    for module in (lock, runs):
        module.datetime = Moved  # type: ignore[attr-defined]


def _attempt_power(number: int, draw: random.Random) -> Outcome:
    """Go on with what a disk holds after a power cut before the n-th operation.

    As on a file system with a journal, names are there in the order of the operations, and of the
    content of a file only what was synced is there for certain.
    """
    recorded = _record()
    states = sorted(path for path in recorded.iterdir() if path.is_dir())
    state = states[number % len(states)]
    run = fresh("power") / "run"
    shutil.copytree(state, run, symlinks=True)
    for name, synced in json.loads(state.with_suffix(".json").read_text()).items():
        _tear(run / name, synced, draw)
    return _ends_well(run)


def _tear(path: Path, synced: int, draw: random.Random) -> None:
    """Lose what was written to a file after its first bytes were synced."""
    first, content = path.read_bytes()[:synced], path.read_bytes()[synced:]
    torn: list[Callable[[], bytes]] = [
        lambda: b"",
        lambda: content[: len(content) // 2],
        lambda: bytes(len(content)),
        lambda: content[: len(content) // 2] + bytes(len(content) - len(content) // 2),
    ]
    path.write_bytes(first + draw.choice(torn)())


def _record() -> Path:
    """Run once; keep what the disk holds before each operation, and which files are not synced."""
    states, done = root() / "power-states", root() / "power-states.done"
    if done.exists():
        return states
    shutil.rmtree(states, ignore_errors=True)
    run = fresh("power-recorded") / "run"
    synced: dict[int, bytes] = {}  # the content that is on disk, by the file's number
    count = 0

    def keep(event: str, path: str) -> None:
        nonlocal count
        state = states / f"{count:04d}"
        shutil.copytree(run, state, symlinks=True) if run.exists() else state.mkdir(parents=True)
        files = [file for file in run.rglob("*") if file.is_file()]
        kept = {file: _common(synced.get(_id(file), b""), file.read_bytes()) for file in files}
        dirty = {str(f.relative_to(run)): n for f, n in kept.items() if n < f.stat().st_size}
        state.with_suffix(".json").write_text(json.dumps(dirty))
        count += 1
        if event == "fsync" and Path(path).is_file():
            synced[_id(Path(path))] = Path(path).read_bytes()

    ended = start("memory", run, lambda: before_operations(run, keep)).wait()
    assert ended.code == 0, ended.text
    done.touch()
    return states


def _id(path: Path) -> int:
    return path.stat().st_ino


def _common(synced: bytes, now: bytes) -> int:
    """Return how many bytes of a file are on disk: all that were synced, if lines were added."""
    return len(synced) if now.startswith(synced) else 0
