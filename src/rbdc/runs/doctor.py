"""Verify every checksum of a run's folder, and remove what must be computed again."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rbdc.disk import read_json
from rbdc.errors import RbdcError, RunError
from rbdc.jobs.layout import (
    AVERAGE,
    CHECKPOINTS,
    FAILED,
    JOB,
    JOBS,
    MODEL,
    PROGRESS,
    RESULT,
    RUN,
    SAVED_FOR_GROWTH,
    START,
)
from rbdc.jobs.lock import locked
from rbdc.jobs.records import (
    Failed,
    JobRecord,
    ProgressRecord,
    read_job_result,
    read_run_result,
)
from rbdc.models.config import read_config
from rbdc.models.folder import check_sums
from rbdc.models.weights import read_weights, weights_in
from rbdc.runs.record import read_record
from rbdc.training.checkpoint import FACTS, read_state

BEST = "best"
_LEFT_BY = {"grow": START, "train": MODEL, "detect": MODEL}
"""What a finished job of a kind must have left, at least."""


@dataclass(frozen=True, kw_only=True)
class Damage:
    """Something in a run's folder that is damaged or missing."""

    problem: str
    remove: Path
    """The file or folder whose removal makes the run's command compute it again."""
    cost: str
    """What is computed again, for people."""


def find_damage(folder: Path) -> list[Damage]:
    """Read all files of a run that have a checksum, and return what is damaged."""
    if not (folder / RUN).exists() and not (folder / JOBS).is_dir():
        raise RunError(f"{folder} holds no run", f"A run's folder has a {RUN}.")
    found = [
        *_problem(lambda: read_record(folder), folder / RUN, "nothing: it is written again"),
        *_problem(
            lambda: read_run_result(folder / RESULT),
            folder / RESULT,
            "nothing: it is put together again",
        ),
    ]
    if (folder / MODEL).exists():
        found += _problem(lambda: _check_model(folder / MODEL), folder / MODEL, "a copy")
    jobs = sorted(path for path in (folder / JOBS).glob("*") if path.is_dir())
    again = {job: damage for job in jobs for damage in _finished_damage(job)}
    for group in _trained_as_one(jobs):  # one of them cannot be trained without the others
        first = next((again[job] for job in group if job in again), None)
        if first:
            others = {job: _redone(job, f"trained as one with {first.remove}") for job in group}
            again = {**others, **again}
    found += again.values()
    return found + [damage for job in jobs if job not in again for damage in _small_damage(job)]


def repair(folder: Path) -> list[Damage]:
    """Remove what is damaged and return it. The run must not be at work."""
    with locked(folder):
        found = find_damage(folder)
        for damage in found:
            if damage.remove.is_dir() and not damage.remove.is_symlink():
                shutil.rmtree(damage.remove)
            else:
                damage.remove.unlink(missing_ok=True)
    return found


def _problem(read: Callable[[], object], remove: Path, cost: str) -> Iterator[Damage]:
    try:
        read()
    except RbdcError as error:
        yield Damage(problem=error.problem, remove=remove, cost=cost)
    except OSError as error:
        yield Damage(problem=str(error), remove=remove, cost=cost)


def _redone(job: Path, problem: str) -> Damage:
    return Damage(problem=problem, remove=job, cost="this job, from its start")


def _finished_damage(job: Path) -> Iterator[Damage]:
    """Yield the first damage because of which a finished job must be done again."""
    if (job / RESULT).exists():
        for damage in _problem(lambda: _check_finished(job), job, ""):
            yield _redone(job, damage.problem)


def _check_finished(job: Path) -> None:
    """Raise what is wrong with the result of a job and the models that it left."""
    result = read_job_result(job / RESULT) or {}
    needed = {_LEFT_BY.get(str(result.get("kind")), MODEL)}
    if _about(job).get("saved_for_growth"):
        needed.add(SAVED_FOR_GROWTH)
    for name in (MODEL, AVERAGE, BEST, START, SAVED_FOR_GROWTH):
        if name in needed or (job / name).exists():
            _check_model(job / name)


def _check_model(folder: Path) -> None:
    if (folder / FACTS).exists() or not (folder / "config.json").exists():
        read_state(folder)
        return
    read_config(folder)
    read_weights(weights_in(folder))
    check_sums(folder)


def _small_damage(job: Path) -> Iterator[Damage]:
    """Yield what is damaged beside the result of a job: files that only tell how far it is."""
    yield from _problem(lambda: read_json(job / JOB, JobRecord), job / JOB, "nothing")
    yield from _problem(lambda: read_json(job / FAILED, Failed), job / FAILED, "nothing")
    yield from _problem(
        lambda: read_json(job / PROGRESS, ProgressRecord), job / PROGRESS, "nothing"
    )
    for path in sorted((job / CHECKPOINTS).glob("step-*")):
        cost = "the steps since the checkpoint before it"
        yield from _problem(lambda path=path: read_state(path), path, cost)  # type: ignore[misc]


def _trained_as_one(jobs: list[Path]) -> list[list[Path]]:
    """Return the jobs that took their steps as one model, group by group."""
    groups: dict[str, list[Path]] = {}
    for job in jobs:
        about = _about(job)
        if seeds := about.get("fused_with"):
            task = {k: v for k, v in about.get("task", {}).items() if k != "seed"}
            groups.setdefault(json.dumps([seeds, task]), []).append(job)
    return list(groups.values())


def _about(job: Path) -> JobRecord:
    """Return the content of job.json, empty if it is damaged: no result depends on it."""
    try:
        return read_json(job / JOB, JobRecord) or {}
    except RbdcError:
        return {}
