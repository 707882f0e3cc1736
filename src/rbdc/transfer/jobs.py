"""Detection's jobs: a detector on a backbone, known by everything that decides it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rbdc.data import derive_seed
from rbdc.disk import sha256_of
from rbdc.jobs.job import Job
from rbdc.jobs.layout import MODEL, RUN
from rbdc.models import ModelSpec, build, spec_of
from rbdc.models.folder import weights_in
from rbdc.settings.detection import DetectionRecipe
from rbdc.transfer.weights import open_classifier

SCRATCH = "scratch:"
FORMAT = 1  # of what a job leaves behind; another number makes other keys


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """A trained classifier, and where it is."""

    name: str
    place: Path
    sha256: str
    """Of its weights; empty: the architecture alone, untrained."""
    spec: ModelSpec
    mean: tuple[float, ...]
    std: tuple[float, ...]
    how: Mapping[str, Any] = field(default_factory=dict)
    """How a weight file is opened."""

    def open(self, seed: int) -> nn.Module:
        """The classifier; one that is not trained is drawn from the seed."""
        if self.sha256:
            return open_classifier(self.place, **self.how)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(seed, "backbone"))
            classifier: Any = build(self.spec)
        classifier.pretrained_cfg.update(mean=self.mean, std=self.std)
        return classifier  # type: ignore[no-any-return]

    def content(self) -> dict[str, Any]:
        return {
            "sha256": self.sha256,
            "spec": self.spec.to_json(),
            "mean": list(self.mean),
            "std": list(self.std),
        }


def find_backbone(path: str, **how: Any) -> Backbone:
    """An exported folder, a run of `rbdc train`, or a weight file with its architecture's name.

    `scratch:PATH` is the same architecture without the weights, to see what they are worth.
    """
    trained = not path.startswith(SCRATCH)
    place = Path(path.removeprefix(SCRATCH))
    if (place / RUN).exists() and (place / MODEL).is_dir():
        place = place / MODEL
    classifier = open_classifier(place, **how)
    record: Any = classifier.pretrained_cfg
    return Backbone(
        name=path,
        place=place,
        sha256=sha256_of(weights_in(place) if place.is_dir() else place) if trained else "",
        spec=spec_of(classifier),
        mean=tuple(record["mean"]),
        std=tuple(record["std"]),
        how={key: value for key, value in how.items() if value is not None},
    )


@dataclass(frozen=True, kw_only=True)
class DetectJob(Job):
    """Train a detector on a backbone."""

    parents = ()
    backbone: Backbone
    recipe: DetectionRecipe
    seed: int
    data: Mapping[str, str]
    """Fingerprints of the splits."""
    class_names: tuple[str, ...]

    def content(self) -> dict[str, Any]:
        return {
            "kind": "detect",
            "format": FORMAT,
            "backbone": self.backbone.content(),
            "recipe": self.recipe.to_json(),
            "seed": self.seed,
            "data": dict(self.data),
            "class_names": list(self.class_names),
        }

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "detect",
            "backbone": self.backbone.name,
            "epochs": self.recipe.epochs,
            "seed": self.seed,
            "width": self.backbone.spec.width,
        }

    @property
    def label(self) -> str:
        return f"detect-{self.backbone.spec.name}-w{self.backbone.spec.width:g}"
