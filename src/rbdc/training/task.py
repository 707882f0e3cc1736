"""The definition of one training: everything that decides its result, and nothing else."""

import warnings
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from timm.data import resolve_data_config
from torch import nn

from rbdc.data import DataSet, ImageFormat, ImageSet, TextData, TextFormat
from rbdc.errors import DataError
from rbdc.models import ModelSpec, record_of
from rbdc.models.create import constructor_names
from rbdc.models.language import SEQUENCE
from rbdc.settings import Extent, Length, Recipe, plain


@dataclass(frozen=True, kw_only=True)
class Parametrization(ABC):
    """How weights are computed from other trainable tensors, for a growth method that needs it.

    It lasts as long as the training: exported models have ordinary weights.
    """

    name: ClassVar[str]
    count: int
    """Trainable tensors per weight."""

    @abstractmethod
    def apply(self, model: nn.Module) -> nn.Module:
        """Parametrize the weights of an ordinary model (torch.nn.utils.parametrize); return it."""

    def to_json(self) -> dict[str, Any]:
        """Return the name and the options."""
        return {"name": self.name, **asdict(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One training. Two equal tasks on equal data from equal weights give equal models."""

    model: ModelSpec
    recipe: Recipe
    image: Any  # ImageFormat | TextFormat
    """Input format of the model, from `input_format`."""
    epochs: float
    """Passes over the training images; may be a fraction."""
    seed: int
    """Seed of the initial weights and of the model's own randomness: dropout and drop path."""
    data_seed: int
    """Seed of the order of the images, their augmentation, and mixup. Tasks with equal recipes and
    data seeds train on equal batches."""
    warmup_epochs: Length
    """Learning rate warm-up; a plain number is in epochs."""
    anneal: bool = True
    """Whether the learning rate follows the recipe's schedule. If False, it stays at its peak after
    warm-up, for a model whose training continues in a wider one."""
    schedule_epochs: float | None = None
    """Epochs of the learning rate's schedule if the training ends before it; None: `epochs`."""
    parametrization: Parametrization | None = None
    """How weights are computed from other tensors; None trains the weights themselves."""

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "recipe": self.recipe.to_json(),
            "parametrization": self.parametrization and self.parametrization.to_json(),
            "warmup_epochs": plain(self.warmup_epochs),
        }

    def steps(self, steps_per_epoch: int) -> int:
        """Return the number of updates, at least 1."""
        return max(1, self.updates(self.epochs, steps_per_epoch))

    def schedule_steps(self, steps_per_epoch: int) -> int:
        """Return the number of updates of the learning rate's schedule."""
        epochs = self.epochs if self.schedule_epochs is None else self.schedule_epochs
        return max(1, self.updates(epochs, steps_per_epoch))

    def updates(self, length: Length, steps_per_epoch: int, total: int = 0) -> int:
        """Return a length in updates; a plain number is in epochs, a share is one of `total`."""
        extent = Extent(
            steps_per_epoch=steps_per_epoch, batch_size=self.recipe.batch_size, total=total
        )
        return extent.updates(length)


def fit_to_data(spec: ModelSpec, data: DataSet, recipe: Recipe) -> ModelSpec:
    """Return the model with the data's classes and, for images in memory, their shape."""
    arguments = dict(spec.arguments)
    if isinstance(data, TextData):
        arguments.setdefault("vocab_size", data.vocab_size)
        return replace(spec, arguments={**arguments, SEQUENCE: data.train.length})
    known = len(data.class_names)
    if arguments.setdefault("num_classes", known) != known:
        raise DataError(
            f"the model has {arguments['num_classes']} classes and {data.name} has {known}",
            "Leave num_classes out: the data sets it.",
        )
    if isinstance(data.train, ImageSet):
        channels, height, width = data.train.images.shape[1:]
        arguments.setdefault("in_chans", channels)
        if recipe.batched:
            arguments.setdefault("img_size", height if height == width else [height, width])
    for name, rate in (("drop_rate", recipe.drop), ("drop_path_rate", recipe.drop_path)):
        if rate and name in constructor_names(spec.name):
            arguments.setdefault(name, rate)
        elif rate:
            warnings.warn(f"{spec.name} has no {name}: it is trained without it", stacklevel=2)
    return replace(spec, arguments=arguments)


def input_format(spec: ModelSpec, recipe: Recipe, data: DataSet) -> ImageFormat | TextFormat:
    """Return the model's input format: of images, or of text."""
    if isinstance(data, TextData):
        record = record_of(spec)
        return TextFormat(sequence_length=record[SEQUENCE], vocab_size=record["vocab_size"])
    return image_format(spec, recipe, data)


def image_format(spec: ModelSpec, recipe: Recipe, data: DataSet) -> ImageFormat:
    """Return the model's input format, from its `pretrained_cfg` and the recipe."""
    record = record_of(spec)
    config = resolve_data_config(pretrained_cfg=dict(record))
    channels, height, width = record["input_size"]
    if channels not in (1, 3):
        raise DataError(
            f"the model takes images of {channels} channels", "Images have 1 or 3: set in_chans."
        )
    uncropped = isinstance(data.train, ImageSet)  # small images are not cropped for evaluation
    crop_pct = recipe.crop_pct or (1.0 if uncropped else config["crop_pct"])
    statistics = {}
    for name in ("mean", "std"):
        values = getattr(recipe, name) or tuple(config[name])
        statistics[name] = values * channels if len(values) == 1 else values  # one for all channels
        if len(statistics[name]) != channels:
            raise DataError(
                f"{name} has {len(values)} values and the model takes {channels} channels",
                "Give one value per channel.",
            )
    return ImageFormat(
        channels=channels,
        height=height,
        width=width,
        crop_pct=crop_pct,
        interpolation=config["interpolation"],
        **statistics,
    )


def images_for(spec: ModelSpec, image: Any) -> Any:
    """Return the input format of a stage's model: as the target's, but of the model's own size."""
    if isinstance(image, TextFormat):
        return replace(image, sequence_length=record_of(spec)[SEQUENCE])
    _channels, height, width = record_of(spec)["input_size"]
    return replace(image, height=height, width=width)


def tested_images(task: Task) -> ImageFormat:
    """Return the format of the test images: as for training, or of the size of the recipe."""
    side = task.recipe.test_size
    image: ImageFormat = task.image
    return replace(image, height=side, width=side) if side else image


def describe_images(model: nn.Module, image: ImageFormat, test: ImageFormat | None = None) -> None:
    """Store the image preprocessing in the model, so that timm uses the same."""
    known = {key: getattr(image, key) for key in ("mean", "std", "crop_pct", "interpolation")}
    if test and test.shape != image.shape:
        known["test_input_size"] = test.shape  # timm's `use_test_size`
    model.pretrained_cfg.update(known)  # type: ignore[operator,union-attr]
