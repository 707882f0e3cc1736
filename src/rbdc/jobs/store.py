"""The store: a folder a job, and in it what the job left behind (`places` lists it)."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rbdc.disk import read_json, write_json
from rbdc.jobs.job import Job
from rbdc.jobs.layout import CHECKPOINTS, FAILED, JOB, MODEL, PROGRESS, RESULT, RUN


class Store:
    """Finished and unfinished jobs in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, job: Job) -> Path:
        return self.root / folder_name(job)

    def begin(self, job: Job) -> Path:
        """The job's folder, made if it is not there, with what the job is written in it."""
        folder = self.folder(job)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FAILED).unlink(missing_ok=True)
        if not (folder / JOB).exists():
            write_json(folder / JOB, {"key": job.key, **job.content()})
        return folder

    def result(self, job: Job) -> dict[str, Any] | None:
        """What a finished job left, or None."""
        return read_json(self.folder(job) / RESULT)

    def bytes_of(self, job: Job) -> int:
        """What the job has left here so far."""
        return sum(p.stat().st_size for p in self.folder(job).rglob("*") if p.is_file())

    def finish(self, job: Job, result: Mapping[str, Any]) -> None:
        """From here on the job is finished; what it needed only on the way goes."""
        folder = self.folder(job)
        write_json(folder / RESULT, result)
        (folder / PROGRESS).unlink(missing_ok=True)
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)

    def fail(self, job: Job, error: Exception) -> None:
        write_json(self.folder(job) / FAILED, {"error": str(error), "type": type(error).__name__})

    def clean(self) -> None:
        """Remove what killed processes left half-written. Nobody else may be at work here."""
        run = self.root.parent
        for end in ("partial", "old"):  # what was being written, and what it was to replace
            for path in [
                *(p for name in (RUN, RESULT, MODEL) for p in run.glob(f".{name}*.{end}")),
                *self.root.glob(f"*/.*.{end}"),
                *self.root.glob(f"*/{CHECKPOINTS}/.*.{end}"),
            ]:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for result in self.root.glob(f"*/{RESULT}"):  # killed between finishing and tidying up
            shutil.rmtree(result.parent / CHECKPOINTS, ignore_errors=True)
            (result.parent / PROGRESS).unlink(missing_ok=True)


def folder_name(job: Job) -> str:
    return f"{job.label}-{job.key[:16]}"
