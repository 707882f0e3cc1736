"""Jobs: what has to be done, and what it is known by.

A job's key is the hash of everything that decides its result: model, recipe, seed, epochs, the
data's fingerprint, and its parents' keys. So a finished job is never done again, whoever needs it.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rbdc.models import ModelSpec
from rbdc.training import Task
from rbdc.tree.method import Kept, Method

FORMAT = 2  # of what a job leaves behind; another number makes other keys


@dataclass(frozen=True, kw_only=True)
class TrainJob:
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
    def parents(self) -> "tuple[Job, ...]":
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

    @cached_property
    def key(self) -> str:
        return _hash(self.content())


@dataclass(frozen=True, kw_only=True)
class GrowJob:
    """Make the start of a wide model of trained ones: couple two, or what a rival does."""

    model: ModelSpec
    parents: tuple[TrainJob, ...]
    method: Method
    seed: int = 0
    """Of what the method draws."""
    images: int = 0
    """Training images that the method may look at, and pays for."""

    @property
    def data(self) -> str:
        return self.parents[0].data

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

    @cached_property
    def key(self) -> str:
        return _hash(self.content())


Job = TrainJob | GrowJob


def _hash(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
