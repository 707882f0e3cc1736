"""Jobs: what has to be done, and what it is known by.

A job's key is the hash of everything that decides its result: model, recipe, seed, epochs, the
data's fingerprint, and its parents' keys. So a finished job is never done again, whoever needs it.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from rbdc.models import ModelSpec
from rbdc.training import Task
from rbdc.tree.transition import Transition

FORMAT = 1  # of what a job leaves behind; another number makes other keys


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainJob:
    """Train a model: from its own initialisation (a leaf), or from a coupling."""

    task: Task
    data: str
    """Fingerprint of the data."""
    class_names: tuple[str, ...]
    initial: "CoupleJob | None" = None
    teacher: str | None = None
    """SHA-256 of the teacher's weights."""
    keeps_optimizer: bool = False
    """Whether the optimizer's state is kept for a coupling that carries it over."""

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
            "keeps_optimizer": self.keeps_optimizer,
        }

    @property
    def key(self) -> str:
        return _hash(self.content())


@dataclass(frozen=True, kw_only=True, slots=True)
class CoupleJob:
    """Couple two trained models into the start of a wide one."""

    model: ModelSpec
    parents: tuple[TrainJob, TrainJob]
    transition: Transition
    allow_inexact: bool = False

    @property
    def data(self) -> str:
        return self.parents[0].data

    def content(self) -> dict[str, Any]:
        return {
            "kind": "couple",
            "format": FORMAT,
            "model": self.model.to_json(),
            "parents": [parent.key for parent in self.parents],
            "transition": self.transition.name,
            "allow_inexact": self.allow_inexact,
        }

    @property
    def key(self) -> str:
        return _hash(self.content())


Job = TrainJob | CoupleJob


def _hash(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
