"""Data sets: images in memory or decoded on demand, with labels and class names."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from rbdc.data.randomness import generator
from rbdc.errors import DataError


class ImageSource(ABC):
    """Images with labels: in memory, files, members of tar shards, or rows of a table."""

    labels: Sequence[int] | Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def read(self, index: int) -> Image.Image:
        """Return the image. PIL may decode it later, and raises then if it cannot be decoded."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the path of an image, or another name for messages."""

    def suspects(self) -> list[int]:
        """Return the indices of images that may be damaged; they are decoded before training."""
        return []


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSet(ImageSource):
    """Images in memory as uint8 (images, channels, height, width), with their labels."""

    images: Tensor
    labels: Tensor
    class_names: tuple[str, ...]

    def read(self, index: int) -> Image.Image:
        image = self.images[index]
        return Image.fromarray(image.permute(1, 2, 0).squeeze(-1).numpy())

    def name(self, index: int) -> str:
        return f"image {index}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SomeImages(ImageSource):
    """The images of `source` that have these indices."""

    source: ImageSource
    indices: tuple[int, ...]
    labels: tuple[int, ...]

    def read(self, index: int) -> Image.Image:
        return self.source.read(self.indices[index])

    def name(self, index: int) -> str:
        return self.source.name(self.indices[index])


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSet:
    """A data set: its training and test split, class names and fingerprint."""

    name: str
    train: ImageSource
    test: ImageSource
    class_names: tuple[str, ...]
    fingerprint: str
    """Digest that changes when images, labels or classes change."""
    compared: str = "every byte"
    """What the fingerprint covers of an image, for people."""
    skipped: tuple[str, ...] = ()
    """Names of unreadable images that were left out."""
    skip_bad: bool = False
    """Whether an image that cannot be decoded during training is replaced by the next one."""

    @property
    def in_memory(self) -> bool:
        return isinstance(self.train, ImageSet)

    def describe(self) -> str:
        """Return what the data has, for people."""
        return (
            f"{self.name}: {len(self.train):,} training and {len(self.test):,} test images, "
            f"{len(self.class_names)} classes; a resumed run compares {self.compared} of each image"
        )

    def held_out(self, share: float) -> "DataSet":
        """Return the training images in two parts, one to train on and one to test on.

        The test images are left out: what is chosen by such a test has not seen them.
        """
        count = len(self.train)
        order = torch.randperm(count, generator=generator(0, "hold out")).tolist()
        tested = min(count - 1, max(1, round(share * count)))
        parts = (sorted(order[tested:]), sorted(order[:tested]))
        train, test = (some_images(self.train, indices) for indices in parts)
        return replace(
            self, train=train, test=test, fingerprint=f"{self.fingerprint}, {tested} held out"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "fingerprint": self.fingerprint,
            "compared": self.compared,
            "train_images": len(self.train),
            "test_images": len(self.test),
            "class_names": list(self.class_names),
            "skipped": list(self.skipped),
        }


def memory_data(name: str, train: ImageSet, test: ImageSet) -> DataSet:
    """Return a data set of two image sets. The fingerprint covers every byte."""
    classes = train.class_names
    digest = hashlib.sha256("\0".join(classes).encode(errors="surrogateescape"))
    for split in (train, test):
        if len(split.images) != len(split.labels):
            raise DataError(
                f"{name} has {len(split.images)} images and {len(split.labels)} labels in a split",
                "Fetch it again.",
            )
        digest.update(str(tuple(split.images.shape)).encode())
        digest.update(split.images.contiguous().numpy().data)
        digest.update(split.labels.numpy().data)
    check_splits(name, train, test, len(classes))
    found = digest.hexdigest()
    return DataSet(name=name, train=train, test=test, class_names=classes, fingerprint=found)


def some_images(source: ImageSource, indices: Sequence[int]) -> ImageSource:
    """Return the images that have these indices."""
    if isinstance(source, ImageSet):
        chosen = torch.tensor(indices)
        return replace(source, images=source.images[chosen], labels=source.labels[chosen])
    labels = tuple(int(source.labels[index]) for index in indices)
    return SomeImages(source=source, indices=tuple(indices), labels=labels)


def listed_fingerprint(class_names: Sequence[str], lines: Sequence[str]) -> str:
    """Return a fingerprint of images that are not fully read, given one line per image."""
    digest = hashlib.sha256("\0".join(class_names).encode(errors="surrogateescape"))
    for line in lines:
        digest.update(line.encode(errors="surrogateescape") + b"\n")
    return digest.hexdigest()


def check_splits(name: str, train: ImageSource, test: ImageSource, classes: int) -> None:
    """Refuse a split without images, or a label that is not a class index."""
    for split, images in (("training", train), ("test", test)):
        if not len(images):
            raise DataError(
                f"{name} has no {split} images", "Both splits need images, in one folder per class."
            )
        labels = images.labels.tolist() if isinstance(images.labels, Tensor) else images.labels
        for index, label in enumerate(labels):
            if label is None or not 0 <= label < classes:
                raise DataError(
                    f"{images.name(index)} of the {split} images of {name} has label {label}, and "
                    f"there are {classes} classes",
                    "Labels count from 0.",
                )
