"""Load the teacher of a distillation: an exported folder, or a timm model with a weight file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from rbdc.data import ImageFormat
from rbdc.disk import sha256_of
from rbdc.errors import RecipeError, nearest
from rbdc.models import load
from rbdc.models.config import RECORD, constructor_arguments, read_config
from rbdc.models.create import create_filled
from rbdc.models.weights import read_weights, weights_in
from rbdc.plan import CounterName, forward_flops
from rbdc.plan.flops import DEFAULT_COUNTER
from rbdc.settings import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Teacher:
    """The model whose outputs the student learns from."""

    model: nn.Module
    sha256: str
    """SHA-256 of its weights."""
    forward_flops: int
    """FLOPs of a forward pass of one of the student's images."""


def load_teacher(
    recipe: Recipe, image: ImageFormat, classes: int, counter: CounterName = DEFAULT_COUNTER
) -> Teacher | None:
    """Load the recipe's teacher; None if the recipe has no distillation."""
    if recipe.distillation == "none" or recipe.teacher is None:
        return None
    path = Path(recipe.teacher)
    if path.is_dir():
        file = weights_in(path)
        teacher = load(path) if (path / RECORD).exists() else _of_folder(path)
    elif timm.is_model(recipe.teacher):
        if recipe.teacher_path is None:
            raise RecipeError(
                f"the teacher {recipe.teacher} has no weights", "Give them: --teacher-path FILE."
            )
        file = Path(recipe.teacher_path)
        arguments = {"num_classes": classes, "in_chans": image.channels}
        teacher = create_filled(recipe.teacher, arguments, read_weights(file), str(file))
    else:
        raise RecipeError(
            f"the teacher {recipe.teacher!r} is neither a folder nor a timm model",
            nearest(recipe.teacher, timm.list_models()) or "Give an exported folder.",
        )
    _check(teacher.eval(), image, classes)
    record: Any = teacher.pretrained_cfg
    record["input_size"] = image.shape
    return Teacher(
        model=teacher.requires_grad_(False),
        sha256=sha256_of(file),
        forward_flops=forward_flops(teacher, counter=counter),
    )


def _of_folder(folder: Path) -> nn.Module:
    """Load any timm model from a folder that timm wrote."""
    config, state = read_config(folder), read_weights(weights_in(folder))
    return create_filled(config["architecture"], constructor_arguments(config), state, str(folder))


def _check(teacher: nn.Module, image: ImageFormat, classes: int) -> None:
    found = check_images(teacher, image)
    if found != (2, classes):
        raise RecipeError(
            f"the teacher returns {found[1:]} logits and the data has {classes} classes",
            "Use a teacher for the same classes.",
        )


@torch.no_grad()
def check_images(teacher: nn.Module, image: ImageFormat) -> tuple[int, ...]:
    """Refuse a teacher that cannot process such images; return the shape of its logits for two."""
    try:
        return tuple(teacher(torch.zeros(2, *image.shape)).shape)
    except Exception as error:  # a model can raise any error for a wrong image size
        raise RecipeError(
            f"the teacher cannot process {image.channels} x {image.height} x {image.width} images: "
            f"{error}",
            "A teacher sees the student's images: use a teacher for that size.",
        ) from None
