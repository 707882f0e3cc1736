"""The store: one folder per job, with what the job left behind (`layout` lists the files)."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rbdc.disk import write_json
from rbdc.jobs.layout import CHECKPOINTS, FAILED, JOB, MODEL, PROGRESS, RESULT, RUN
from rbdc.jobs.records import read_job_result

if TYPE_CHECKING:
    from rbdc.jobs.job import Job


class Store:
    """Finished and unfinished jobs in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, job: "Job") -> Path:
        """Return the folder of a job."""
        return self.root / folder_name(job)

    def begin(self, job: "Job") -> Path:
        """Create the job's folder if need be, write job.json, and return the folder."""
        folder = self.folder(job)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FAILED).unlink(missing_ok=True)
        if not (folder / JOB).exists():
            write_json(folder / JOB, {"key": job.key, **job.content()})
        return folder

    def result(self, job: "Job") -> dict[str, Any] | None:
        """Return the result of a finished job, or None."""
        return read_job_result(self.folder(job) / RESULT)

    def bytes_of(self, job: "Job") -> int:
        """Return the bytes that the job has written so far."""
        return sum(p.stat().st_size for p in self.folder(job).rglob("*") if p.is_file())

    def finish(self, job: "Job", result: Mapping[str, Any]) -> None:
        """Write the result, which marks the job finished, and remove its checkpoints."""
        folder = self.folder(job)
        write_json(folder / RESULT, result)
        (folder / PROGRESS).unlink(missing_ok=True)
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)

    def fail(self, job: "Job", error: Exception) -> None:
        """Write why the job failed."""
        write_json(self.folder(job) / FAILED, {"error": str(error), "type": type(error).__name__})

    def clean(self) -> None:
        """Remove what killed processes left half-written. The run's lock must be held."""
        run = self.root.parent
        for end in ("partial", "old"):  # a file being written, and the one it replaces
            for path in [
                *(p for name in (RUN, RESULT, MODEL) for p in run.glob(f".{name}*.{end}")),
                *self.root.glob(f"*/.*.{end}"),
                *self.root.glob(f"*/{CHECKPOINTS}/.*.{end}"),
            ]:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for result in self.root.glob(f"*/{RESULT}"):  # killed between `finish`'s two steps
            shutil.rmtree(result.parent / CHECKPOINTS, ignore_errors=True)
            (result.parent / PROGRESS).unlink(missing_ok=True)


def folder_name(job: "Job") -> str:
    """Return the name of a job's folder: its label and the start of its key."""
    return f"{job.label}-{job.key[:16]}"
