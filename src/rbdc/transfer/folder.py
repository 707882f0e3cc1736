"""Write and read a trained detector: its weights and its description."""

from pathlib import Path
from typing import Any

from torch import nn

from rbdc.errors import CheckpointError, RecipeError
from rbdc.models import ModelSpec, build_empty, spec_of
from rbdc.settings.detection import DetectionRecipe
from rbdc.training.checkpoint import read_state, write_state
from rbdc.transfer.detector import ARCHITECTURE, Detector, build_detector


def save_detector(
    detector: Detector,
    folder: Path,
    classifier: nn.Module,
    recipe: DetectionRecipe,
    class_names: tuple[str, ...],
) -> None:
    """Write a detector atomically, with everything needed to build it on this classifier again."""
    record: Any = classifier.pretrained_cfg
    about = {
        "backbone": spec_of(classifier).to_json(),
        "mean": list(record["mean"]),
        "std": list(record["std"]),
        "settings": {name: getattr(recipe, name) for name in ARCHITECTURE},
        "class_names": list(class_names),
    }
    write_state(folder, detector.state_dict(), {"detector": about})


def load_detector(folder: str | Path) -> tuple[Detector, tuple[str, ...]]:
    """Load a detector that `rbdc transfer` wrote, in evaluation mode, with its class names.

    `detector([image])` takes floats (3, H, W) in [0, 1] of any size, and returns for each image its
    boxes, labels, scores and masks. The class name of label n is `names[n - 1]`.
    """
    tensors, facts = read_state(Path(folder))
    try:
        about = facts["detector"]
        classifier: Any = build_empty(ModelSpec(**about["backbone"]))
        classifier.pretrained_cfg.update(mean=about["mean"], std=about["std"])
        names = tuple(about["class_names"])
        recipe = DetectionRecipe(**about["settings"])
        detector, _ = build_detector(classifier, len(names), recipe)
        detector.load_state_dict(tensors)
    except (KeyError, TypeError, RecipeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{folder} contains no detector: {reason}", "Name a folder that rbdc transfer wrote."
        ) from None
    return detector.eval(), names
