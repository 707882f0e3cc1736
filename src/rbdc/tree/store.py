"""The store: a folder a job, and in it what the job left behind.

STORE/resnet18d-w0.5-0123456789ab/
  job.json          what the job is: the content its key is the hash of
  result.json       what came out; it is there when, and only when, the job is finished
  failed.json       why it could not be finished
  progress.json     how far it is
  model/            the trained model, as timm loads it; ema/ and best/ likewise
  start/            of a coupling: what the wide model starts with
  optimizer/        for a coupling that carries the optimizer's state over
  checkpoints/      of a training under way
  summary.csv, log.jsonl, tensorboard/
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rbdc.errors import RunError
from rbdc.models.folder import sync
from rbdc.training.logs import write_text
from rbdc.tree.jobs import Job

JOB, RESULT, FAILED, PROGRESS = "job.json", "result.json", "failed.json", "progress.json"


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

    def finish(self, job: Job, result: Mapping[str, Any]) -> None:
        """From here on the job is finished; what it needed only on the way goes."""
        folder = self.folder(job)
        write_json(folder / RESULT, result)
        (folder / PROGRESS).unlink(missing_ok=True)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)

    def fail(self, job: Job, error: Exception) -> None:
        write_json(self.folder(job) / FAILED, {"error": str(error), "type": type(error).__name__})

    def clean(self) -> None:
        """Remove what killed processes left half-written. Nobody else may be at work here."""
        for path in [
            *self.root.glob("*/.*.partial"),
            *self.root.glob("*/checkpoints/.*.partial"),
            *self.root.glob("*/.*.old"),
        ]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for result in self.root.glob(f"*/{RESULT}"):  # killed between finishing and tidying up
            shutil.rmtree(result.parent / "checkpoints", ignore_errors=True)
            (result.parent / PROGRESS).unlink(missing_ok=True)


def folder_name(job: Job) -> str:
    kind = "" if hasattr(job, "task") else "coupled-"
    return f"{kind}{job.model.name}-w{job.model.width:g}-{job.key[:16]}"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """A JSON file, whole or not at all, and on the disk when this returns."""
    try:
        write_text(path, json.dumps(content, indent=2) + "\n")
        sync(path)
        sync(path.parent)
    except OSError as error:
        raise RunError(f"{path} could not be written: {error}", "Mend the disk, go on.") from error


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON file that `write_json` wrote; None if it is not there."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise RunError(f"{path} cannot be read: {error}", "Remove it and go on.") from None
    if not isinstance(content, dict):
        raise RunError(f"{path} holds no JSON object", "Remove it and go on.")
    return content


def free_bytes(folder: Path) -> int:
    """Free space where `folder` is, or will be."""
    place = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    return shutil.disk_usage(place).free


def is_writable(folder: Path) -> bool:
    place = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    return place.is_dir() and os.access(place, os.W_OK)
