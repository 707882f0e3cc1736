"""Open a data set by name or path, and check that its images can be decoded."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch.utils.data import Dataset

from rbdc.data.datasets import dataset_data
from rbdc.data.files import find_shards, image_folders, shards, split_folders
from rbdc.data.hub import hub_data, is_saved_table
from rbdc.data.images import (
    DataSet,
    ImageSet,
    ImageSource,
    check_splits,
    listed_fingerprint,
    memory_data,
    some_images,
)
from rbdc.data.small import cifar, embedded, fashion_mnist, has_cifar, has_fashion_mnist
from rbdc.errors import DataError, nearest

NAMES = ("embedded", "fashion-mnist", "cifar10", "cifar100")
BAD_IMAGE = (OSError, SyntaxError, ValueError, TypeError, Image.DecompressionBombError)
"""Exceptions that PIL raises for bytes it cannot decode."""


Own = Dataset[Any] | tuple[Dataset[Any], Dataset[Any]]
"""A Dataset of the user's, or two: to train and to test on."""


def open_data(
    name: str | Own,
    *,
    folder: str | Path = "~/.cache/rbdc",
    download: bool = False,
    in_memory: bool = False,
    skip_bad: bool = False,
) -> DataSet:
    """Open a data set by name or path, or take a `torch.utils.data.Dataset` of (image, label).

    Of two Datasets, the second is tested on; of one, a tenth is.

    Names are `embedded`, `fashion-mnist`, `cifar10`, `cifar100` and `hf:NAME`. They are searched
    for in `folder`, and downloaded to it only with `download`. A path is a folder with
    `train/CLASS/*.jpg` and `val/` or `test/` beside it, a folder of tar shards, a named set in
    torchvision's layout, or a folder saved by `datasets`. Images that cannot be decoded raise an
    error that names them; with `skip_bad` they are left out and listed. `in_memory` decodes all
    images once, for small data sets.
    """
    if isinstance(name, str):
        data = _find(name, Path(folder).expanduser(), download)
    else:
        data = dataset_data(*(name if isinstance(name, tuple) else (name,)))
    if data.in_memory:
        return data
    data = _without_bad(data, skip_bad, every=in_memory)
    return _decoded(data) if in_memory else data


def _find(name: str, folder: Path, download: bool) -> DataSet:
    if name == "embedded":
        return memory_data("embedded", embedded("train"), embedded("test"))
    if name == "fashion-mnist":
        return fashion_mnist(folder, download=download)
    if name in ("cifar10", "cifar100"):
        return cifar(int(name.removeprefix("cifar")), folder, download=download)
    if name.startswith("hf:"):
        return hub_data(name.removeprefix("hf:"), download=download)
    root = Path(name).expanduser().absolute()
    if not root.is_dir():
        raise DataError(
            f"no data set is called {name!r}, and there is no such folder",
            nearest(name, NAMES) or f"Known are {', '.join(NAMES)}, hf:NAME, and folders.",
        )
    if classes := has_cifar(root):
        return cifar(classes, root)
    if has_fashion_mnist(root):
        return fashion_mnist(root)
    if is_saved_table(root):
        return hub_data(str(root))
    if tars := find_shards(root):
        return shards(root, tars)
    if folders := split_folders(root):
        return image_folders(root, folders)
    raise DataError(
        f"{root} contains no data set of a known layout",
        "Expected train/CLASS/*.jpg with val/ or test/ beside it, or train*.tar and val*.tar.",
    )


def _without_bad(data: DataSet, skip: bool, *, every: bool) -> DataSet:
    """Decode suspicious images, or every image, and refuse or leave out what does not decode."""
    bad = _bad_images(data.train, every), _bad_images(data.test, every)
    names = [*map(data.train.name, bad[0]), *map(data.test.name, bad[1])]
    if not names:
        return replace(data, skip_bad=skip)
    if not skip:
        some = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
        raise DataError(
            f"{len(names)} image{'s' if names[1:] else ''} cannot be decoded: {some}",
            "Remove or replace these images, or leave them out with --skip-bad.",
        )
    train, test = _without(data.train, bad[0]), _without(data.test, bad[1])
    check_splits(data.name, train, test, len(data.class_names))
    return replace(
        data,
        train=train,
        test=test,
        fingerprint=listed_fingerprint(data.class_names, [data.fingerprint, str(bad)]),
        skipped=tuple(names),
        skip_bad=True,
    )


def _bad_images(source: ImageSource, every: bool) -> list[int]:
    bad = []
    for index in range(len(source)) if every else source.suspects():
        try:
            read_rgb(source, index)
        except DataError:
            bad.append(index)
    return bad


def _without(source: ImageSource, bad: Sequence[int]) -> ImageSource:
    return some_images(source, sorted(set(range(len(source))) - set(bad)))


def _decoded(data: DataSet) -> DataSet:
    """Return the data decoded into memory. All images must have one size; none is resized."""
    first = np.asarray(read_rgb(data.train, 0)).shape
    train, test = (_decode(split, first, data.class_names) for split in (data.train, data.test))
    return replace(memory_data(data.name, train, test), skipped=data.skipped)


def _decode(source: ImageSource, first: tuple[int, ...], classes: tuple[str, ...]) -> ImageSet:
    images = np.empty((len(source), *first), dtype=np.uint8)
    for index in range(len(source)):
        image = np.asarray(read_rgb(source, index))
        if image.shape != first:
            raise DataError(
                f"{source.name(index)} is {image.shape[1]} x {image.shape[0]} px, other images "
                f"{first[1]} x {first[0]}",
                "Images kept in memory must have one size; leave --in-memory out.",
            )
        images[index] = image
    return ImageSet(
        images=torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(),
        labels=torch.as_tensor(source.labels),
        class_names=classes,
    )


def read_rgb(source: ImageSource, index: int) -> Image.Image:
    """Return the image in RGB, or raise a DataError that names it."""
    with naming(source, index):
        return to_rgb(source.read(index))


@contextmanager
def naming(source: ImageSource, index: int) -> Iterator[None]:
    """Turn the exceptions for an image that cannot be decoded into a DataError that names it."""
    try:
        yield
    except BAD_IMAGE as error:
        reason = "it is not an image" if isinstance(error, UnidentifiedImageError) else error
        raise DataError(
            f"{source.name(index)} cannot be decoded: {reason}",
            "Remove or replace it, or leave it out with --skip-bad.",
        ) from None


def to_rgb(image: Image.Image) -> Image.Image:
    """Decode an image, and convert it to RGB."""
    image.load()
    if image.mode.startswith("I;16"):  # PIL would clip all values above 255 to white
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image if image.mode == "RGB" else image.convert("RGB")
