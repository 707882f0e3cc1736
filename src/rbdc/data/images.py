"""What a data set is: images in memory, or images decoded one by one; and their classes."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor

from rbdc.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSet:
    """Images in memory, uint8 (images, channels, height, width), and their classes."""

    images: Tensor
    labels: Tensor
    class_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> Image.Image:
        image = self.images[index]
        return Image.fromarray(image.permute(1, 2, 0).squeeze(-1).numpy())

    def name(self, index: int) -> str:
        return f"image {index}"

    def suspects(self) -> list[int]:
        return []

    def without(self, indices: Sequence[int]) -> "ImageSet":
        kept = torch.ones(len(self), dtype=torch.bool)
        kept[list(indices)] = False
        return replace(self, images=self.images[kept], labels=self.labels[kept])


class ImageSource(Protocol):
    """Images that are read when needed: files, members of shards, rows of a table."""

    @property
    def labels(self) -> "Sequence[int] | Tensor": ...

    def __len__(self) -> int: ...

    def read(self, index: int) -> Image.Image:
        """The image, maybe not decoded yet: PIL raises where it finds out that it cannot be."""

    def name(self, index: int) -> str:
        """Where it is, for people: a path."""

    def suspects(self) -> list[int]:
        """Images that a quick look finds wanting; they are decoded before training begins."""

    def without(self, indices: Sequence[int]) -> "ImageSource":
        """The same source, some images left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSet:
    """A data set with its two splits, its class list, and what it is known by."""

    name: str
    train: ImageSource
    test: ImageSource
    class_names: tuple[str, ...]
    fingerprint: str
    """A digest that changes when images, labels or classes do."""
    skipped: tuple[str, ...] = ()
    """Unreadable images that were left out."""
    skip_bad: bool = False
    """Whether an image that turns out unreadable later is replaced by the next one."""

    @property
    def in_memory(self) -> bool:
        return isinstance(self.train, ImageSet)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "fingerprint": self.fingerprint,
            "train_images": len(self.train),
            "test_images": len(self.test),
            "class_names": list(self.class_names),
            "skipped": list(self.skipped),
        }


def memory_data(name: str, train: ImageSet, test: ImageSet) -> DataSet:
    """A data set of two image sets; its fingerprint is that of every byte."""
    digest = hashlib.sha256("\0".join(train.class_names).encode(errors="surrogateescape"))
    for split in (train, test):
        if len(split.images) != len(split.labels):
            raise DataError(
                f"{name} has {len(split.images)} images and {len(split.labels)} labels in a split",
                "Fetch it again.",
            )
        digest.update(str(tuple(split.images.shape)).encode())
        digest.update(split.images.contiguous().numpy().data)
        digest.update(split.labels.numpy().data)
    check_splits(name, train, test, classes=len(train.class_names))
    return DataSet(
        name=name,
        train=train,
        test=test,
        class_names=train.class_names,
        fingerprint=digest.hexdigest(),
    )


def listed_fingerprint(class_names: Sequence[str], lines: Sequence[str]) -> str:
    """The fingerprint of images that are not read whole: a line each."""
    digest = hashlib.sha256("\0".join(class_names).encode(errors="surrogateescape"))
    for line in lines:
        digest.update(line.encode(errors="surrogateescape") + b"\n")
    return digest.hexdigest()


def check_splits(name: str, train: ImageSource, test: ImageSource, *, classes: int) -> None:
    """Both splits have images, and every label is that of a class."""
    for split, images in (("training", train), ("test", test)):
        if not len(images):
            raise DataError(
                f"{name} has no {split} images", "Both splits need images, in a folder a class."
            )
        labels = images.labels.tolist() if isinstance(images.labels, Tensor) else images.labels
        for index, label in enumerate(labels):
            if label is None or not 0 <= label < classes:
                raise DataError(
                    f"{images.name(index)} of the {split} images of {name} has label {label}, and "
                    f"there are {classes} classes",
                    "Labels count from 0.",
                )
