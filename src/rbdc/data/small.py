"""Data sets that fit into memory: the embedded images, Fashion-MNIST, CIFAR-10 and CIFAR-100."""

import gzip
import zlib
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torchvision.datasets import CIFAR10, CIFAR100, FashionMNIST

from rbdc.data.images import DataSet, ImageSet, memory_data
from rbdc.errors import DataError

CLASS_NAMES = tuple(FashionMNIST.classes)
DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # apt install dataset-fashion-mnist
_CIFAR = {10: CIFAR10, 100: CIFAR100}
_DOWNLOAD = "Allow the download (--data-download), or give the folder that contains it."


def embedded(split: str) -> ImageSet:
    """Load the embedded part of Fashion-MNIST: 10,000 "train" or 2,000 "test" images, 28 x 28."""
    with (
        as_file(files("rbdc.data") / "embedded" / "fashion-mnist-12k.npz") as path,
        np.load(path, allow_pickle=False) as arrays,
    ):
        return ImageSet(
            images=torch.from_numpy(arrays[f"{split}_images"]).unsqueeze(1),
            labels=torch.from_numpy(arrays[f"{split}_labels"]).long(),
            class_names=CLASS_NAMES,
        )


def has_fashion_mnist(folder: Path) -> Path | None:
    """Return the folder of the four idx files in Debian's or torchvision's layout, or None."""
    for path in (folder, folder / "FashionMNIST" / "raw", folder / "raw"):
        if any((path / f"train-images-idx3-ubyte{end}").exists() for end in ("", ".gz")):
            return path
    return None


def fashion_mnist(folder: Path, *, download: bool = False) -> DataSet:
    """Open Fashion-MNIST: 60,000 training and 10,000 test images, 28 x 28."""
    path = has_fashion_mnist(folder) or has_fashion_mnist(DEBIAN)
    if path is None and download:
        try:
            FashionMNIST(str(folder), download=True)
        except (RuntimeError, OSError) as error:
            raise DataError(f"Fashion-MNIST cannot be downloaded: {error}", _DOWNLOAD) from None
        path = has_fashion_mnist(folder)
    if path is None:
        raise DataError(f"Fashion-MNIST is not in {folder}, nor in {DEBIAN}", _DOWNLOAD)
    train, test = (
        ImageSet(
            images=read_idx(path, f"{prefix}-images-idx3-ubyte", axes=3).unsqueeze(1),
            labels=read_idx(path, f"{prefix}-labels-idx1-ubyte", axes=1).long(),
            class_names=CLASS_NAMES,
        )
        for prefix in ("train", "t10k")
    )
    return memory_data("fashion-mnist", train, test)


def has_cifar(folder: Path) -> int | None:
    """Return 10 or 100 if `folder` contains that CIFAR in torchvision's layout, else None."""
    found = (n for n, source in _CIFAR.items() if (folder / source.base_folder).is_dir())
    return next(found, None)


def cifar(classes: int, folder: Path, *, download: bool = False) -> DataSet:
    """Open CIFAR-10 or CIFAR-100: 50,000 training and 10,000 test images, 32 x 32.

    The files are in torchvision's layout. torchvision checks their MD5 before it unpickles them.
    """
    source = _CIFAR[classes]
    try:
        splits = [source(str(folder), train=train, download=download) for train in (True, False)]
    except (RuntimeError, OSError) as error:  # missing files, wrong MD5, or no network
        raise DataError(f"CIFAR-{classes} cannot be read in {folder}: {error}", _DOWNLOAD) from None
    train, test = (
        ImageSet(
            images=torch.from_numpy(split.data).permute(0, 3, 1, 2).contiguous(),
            labels=torch.tensor(split.targets),
            class_names=tuple(split.classes),
        )
        for split in splits
    )
    return memory_data(f"cifar{classes}", train, test)


def read_idx(folder: Path, name: str, *, axes: int) -> Tensor:
    """Read an idx file of bytes, gzipped or not.

    Its header is two zeros, type 8, the number of axes, and their sizes.
    """
    path = folder / name
    try:
        if path.exists():
            raw = path.read_bytes()
        else:
            raw = gzip.decompress(path.with_name(f"{name}.gz").read_bytes())
        if raw[:4] != bytes([0, 0, 8, axes]):
            raise ValueError(f"it begins with {raw[:4].hex()}, not 0000080{axes}")
        shape = np.frombuffer(raw, ">u4", axes, offset=4)
        data = np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}", "Download the file again.") from None
    return torch.from_numpy(data.copy())
