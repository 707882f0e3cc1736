"""Jobs: what has to be done, and what it is known by.

A job's key is the hash of everything that decides its result: model, recipe, seed, epochs, the
data's fingerprint, and its parents' keys. So a finished job is never done again, whoever needs it.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rbdc.jobs.method import Kept, Method
from rbdc.models import ModelSpec
from rbdc.training import Task

FORMAT = 2  # of what a job leaves behind; another number makes other keys


class Job(ABC):
    """Something that has to be done once its parents are."""

    trains = True
    """Whether it is a training: it takes long, and tells how far it is."""
    parents: "tuple[Job, ...]"
    """Jobs that must be finished first."""

    @abstractmethod
    def content(self) -> dict[str, Any]:
        """Everything that decides the result."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What people want to know of it, for run.json: its kind, at least."""

    @property
    @abstractmethod
    def label(self) -> str:
        """What its folder is called, before its key."""

    @property
    def size(self) -> str:
        """Of its model, for people."""
        return ""

    @cached_property
    def key(self) -> str:
        text = json.dumps(self.content(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class TrainJob(Job):
    """Train a model: from its own initialisation (a leaf), or from one grown of its parents."""

    task: Task
    data: str
    """Fingerprint of the data."""
    class_names: tuple[str, ...]
    initial: "GrowJob | None" = None
    teacher: str | None = None
    """SHA-256 of the teacher's weights."""
    keeps: Kept = ""
    """What is kept beside the weights, for the method that widens this model."""

    @property
    def model(self) -> ModelSpec:
        return self.task.model

    @property
    def parents(self) -> "tuple[GrowJob, ...]":  # type: ignore[override]
        return (self.initial,) if self.initial else ()

    def content(self) -> dict[str, Any]:
        return {
            "kind": "train",
            "format": FORMAT,
            "task": self.task.to_json(),
            "data": self.data,
            "class_names": list(self.class_names),
            "initial": self.initial.key if self.initial else None,
            "teacher": self.teacher,
            "keeps": self.keeps,
        }

    def describe(self) -> dict[str, Any]:
        task = self.task
        return {
            "kind": "train",
            "width": self.model.width,
            "epochs": task.epochs,
            "seed": task.seed,
        }

    @property
    def label(self) -> str:
        return f"{self.model.name}-w{self.model.width:g}"

    @property
    def size(self) -> str:
        return f"width {self.model.width:g}"


@dataclass(frozen=True, kw_only=True)
class GrowJob(Job):
    """Make the start of a wide model of trained ones: couple two, or what a rival does."""

    trains = False
    model: ModelSpec
    parents: tuple[TrainJob, ...]
    method: Method
    seed: int = 0
    """Of what the method draws."""
    images: int = 0
    """Training images that the method may look at, and pays for."""

    def content(self) -> dict[str, Any]:
        return {
            "kind": "grow",
            "format": FORMAT,
            "model": self.model.to_json(),
            "parents": [parent.key for parent in self.parents],
            "method": self.method.content(),
            "seed": self.seed,
            "images": self.images,
        }

    def describe(self) -> dict[str, Any]:
        return {"kind": "grow", "width": self.model.width, "method": self.method.content()}

    @property
    def label(self) -> str:
        return f"{self.method.name}-{self.model.name}-w{self.model.width:g}"

    @property
    def size(self) -> str:
        return f"width {self.model.width:g}"
