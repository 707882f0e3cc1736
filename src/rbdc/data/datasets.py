"""Images of the user's own `torch.utils.data.Dataset`, as torchvision's and most others are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset

from rbdc.data.images import DataSet, ImageSource, check_splits, listed_fingerprint
from rbdc.errors import DataError

HELD_OUT = 0.1
"""Share of the images that are tested on, if there is no data set to test on."""
MOST_COMPARED = 50_000
"""Images of a split up to which all are read for the fingerprint; of more, evenly spread ones."""
_MAP_STYLE = "Give a Dataset with __len__ and __getitem__, whose items are (image, label)."


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetImages(ImageSource):
    """The items of a Dataset."""

    dataset: Any
    labels: tuple[int, ...]

    def read(self, index: int) -> Image.Image:
        image, _ = _item(self.dataset, index)
        return image

    def name(self, index: int) -> str:
        return f"item {index} of {_name(self.dataset)}"


def dataset_data(train: "Dataset[Any]", test: "Dataset[Any] | None" = None) -> DataSet:
    """Return the data of one Dataset, of which a tenth is tested on, or of two.

    Items are (image, label): a PIL image, or a uint8 tensor or array, as it is before any random
    transform, and a class number. Labels are read from `targets` where the Dataset has them.
    """
    splits = [_read(dataset) for dataset in (train, test) if dataset is not None]
    sources = [source for source, _ in splits]
    classes = _class_names(train, sources)
    if test is not None and (others := getattr(test, "classes", None)) is not None:
        _check_classes(classes, tuple(map(str, others)))
    name = f"{_name(train)} (a Dataset)"
    check_splits(name, sources[0], sources[-1], len(classes))
    every = max(len(source) for source in sources) <= MOST_COMPARED
    data = DataSet(
        name=name,
        train=sources[0],
        test=sources[-1],
        class_names=classes,
        fingerprint=listed_fingerprint(classes, [line for _, lines in splits for line in lines]),
        compared="every pixel" if every else f"the label, and of {MOST_COMPARED:,} every pixel,",
    )
    return data if test is not None else data.held_out(HELD_OUT)


def _read(dataset: Any) -> tuple[DatasetImages, list[str]]:
    """Return the images with their labels, and lines to compare them with those of another day."""
    count = _length(dataset)
    first, again = (np.asarray(_item(dataset, 0)[0]).tobytes() for _ in range(2))
    if first != again:
        raise DataError(
            f"{_name(dataset)} gives another image each time that item 0 is read",
            "Leave random transforms out (transform=None): the recipe augments the images.",
        )
    known = _targets(dataset, count)
    step = 1 if known is None else -(-count // MOST_COMPARED)
    labels, lines = list(known or ()), []
    for index in range(0, count, step):
        image, label = _item(dataset, index)
        if known is None:
            labels.append(label)
        lines.append(f"{index} {image.size} {crc32(np.asarray(image).tobytes())}")
    return DatasetImages(dataset=dataset, labels=tuple(labels)), [*lines, str(labels)]


def _length(dataset: Any) -> int:
    try:
        count = None if isinstance(dataset, IterableDataset) else len(dataset)
    except (TypeError, NotImplementedError):
        count = None
    if not count:
        has = "is empty" if count == 0 else "has no length, so its order cannot be repeated"
        raise DataError(f"{_name(dataset)} {has}", _MAP_STYLE)
    return count


def _targets(dataset: Any, count: int) -> list[int] | None:
    """Return the labels that the Dataset lists in `targets`, or None."""
    if isinstance(dataset, Subset):
        inner = _targets(dataset.dataset, len(dataset.dataset))  # type: ignore[arg-type]
        return None if inner is None else [inner[index] for index in dataset.indices]
    targets = getattr(dataset, "targets", None)
    if getattr(dataset, "target_transform", None) is not None or targets is None:
        return None
    try:
        labels = torch.as_tensor(targets)
    except (TypeError, ValueError, RuntimeError):
        return None
    whole = not (labels.is_floating_point() or labels.is_complex())
    return labels.tolist() if whole and labels.shape == (count,) else None


def _item(dataset: Any, index: int) -> tuple[Image.Image, int]:
    """Return an image and its label; refuse an item that is something else."""
    item = dataset[index]
    if not isinstance(item, tuple | list) or len(item) != 2:
        found = f"{len(item)} values" if isinstance(item, tuple | list) else type(item).__name__
        raise DataError(
            f"item {index} of {_name(dataset)} is {found}, expected an image and its label",
            _MAP_STYLE,
        )
    image, label = item
    return _image(dataset, index, image), _label(dataset, index, label)


def _image(dataset: Any, index: int, image: Any) -> Image.Image:
    if isinstance(image, Image.Image):
        return image
    array = image.numpy() if isinstance(image, Tensor) else image
    if isinstance(array, np.ndarray) and array.dtype == np.uint8 and array.ndim in (2, 3):
        if isinstance(image, Tensor) and array.ndim == 3:
            array = array.transpose(1, 2, 0)
        if array.shape[2:] == (1,):
            array = array[:, :, 0]
        if array.shape[2:] in ((), (3,)):
            return Image.fromarray(np.ascontiguousarray(array))
    kind = f" of {image.dtype}" if hasattr(image, "dtype") else ""
    raise DataError(
        f"the image of item {index} of {_name(dataset)} is a {type(image).__name__}{kind}, "
        "expected a PIL image or uint8 values",
        "Leave its transforms out (transform=None): the recipe augments and normalizes.",
    )


def _label(dataset: Any, index: int, label: Any) -> int:
    number = label.item() if isinstance(label, Tensor | np.generic) and label.ndim == 0 else label
    if not isinstance(number, int):
        raise DataError(
            f"the label of item {index} of {_name(dataset)} is a {type(label).__name__}, expected "
            "the number of a class",
            _MAP_STYLE,
        )
    return number


def _class_names(dataset: Any, sources: Sequence[DatasetImages]) -> tuple[str, ...]:
    names = getattr(dataset, "classes", None)
    if isinstance(names, list | tuple) and names:
        return tuple(map(str, names))
    return tuple(map(str, range(1 + max(max(source.labels) for source in sources))))


def _check_classes(first: tuple[str, ...], second: tuple[str, ...]) -> None:
    if first != second:
        raise DataError(
            f"the Dataset to train on has {len(first)} classes and the one to test on "
            f"{len(second)}, or in another order",
            "Both must have the same classes in the same order.",
        )


def _name(dataset: Any) -> str:
    return type(dataset.dataset if isinstance(dataset, Subset) else dataset).__name__
