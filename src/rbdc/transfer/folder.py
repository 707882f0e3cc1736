"""A trained detector on disk: its weights, and what it takes to build it again."""

from pathlib import Path
from typing import Any

from torch import nn

from rbdc.errors import CheckpointError
from rbdc.models import ModelSpec, build_empty, spec_of
from rbdc.training.checkpoint import read_state, write_state
from rbdc.transfer.detector import Detector, DetectorSettings, build_detector


def save_detector(detector: Detector, folder: Path, about: dict[str, Any]) -> None:
    """Write it whole or not at all; `about` is what `description` gave."""
    write_state(folder, detector.state_dict(), {"detector": about})


def load_detector(folder: str | Path) -> tuple[Detector, tuple[str, ...]]:
    """A detector that `rbdc transfer` wrote, in evaluation mode, and the names of its classes.

    `detector([image])` takes floats (3, H, W) in [0, 1] of any size, and gives for each image its
    boxes, labels (from 1: the name of label n is the n-1st), scores and masks.
    """
    tensors, facts = read_state(Path(folder))
    try:
        about = facts["detector"]
        classifier: Any = build_empty(ModelSpec(**about["backbone"]))
        classifier.pretrained_cfg.update(mean=about["mean"], std=about["std"])
        names = tuple(about["class_names"])
        detector, _ = build_detector(
            classifier, classes=len(names), settings=DetectorSettings(**about["settings"])
        )
        detector.load_state_dict(tensors)
    except (KeyError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{folder} holds no detector: {reason}", "Name a folder that rbdc transfer wrote."
        ) from None
    return detector.eval(), names


def description(
    classifier: nn.Module, settings: DetectorSettings, class_names: tuple[str, ...]
) -> dict[str, Any]:
    """What it takes to build a detector on such a classifier again, for JSON."""
    record: Any = classifier.pretrained_cfg
    return {
        "backbone": spec_of(classifier).to_json(),
        "mean": list(record["mean"]),
        "std": list(record["std"]),
        "settings": settings.to_json(),
        "class_names": list(class_names),
    }
