"""Small pictures, and data sets of them in every layout."""

import gzip
import io
import json
import struct
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from rbdc.data import ImageFormat, ImageSet

CLASSES = ("ant", "bee", "cow")
IMAGE = ImageFormat(
    channels=3,
    height=12,
    width=12,
    mean=(0.5, 0.4, 0.3),
    std=(0.2, 0.25, 0.3),
    crop_pct=1.0,
    interpolation="bicubic",
)


def pixels(seed: int, size: tuple[int, int] = (12, 12)) -> np.ndarray:
    """Noise: no two crops of it are equal."""
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)


def encoded(seed: int, kind: str = "png", size: tuple[int, int] = (12, 12)) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels(seed, size)).save(file, {"jpg": "jpeg"}.get(kind, kind))
    return file.getvalue()


def damaged(kind: str) -> bytes:
    """Begins and ends as it should, and cannot be decoded."""
    raw = encoded(0, kind, (48, 48))
    start = raw.index(b"\xff\xc4" if kind == "jpg" else b"IDAT") + 6  # the codes, the pixels
    return raw[:start] + bytes(255 - byte for byte in raw[start : start + 80]) + raw[start + 80 :]


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def make_folder(
    root: Path, train: int = 6, test: int = 3, *, kind: str = "png", test_name: str = "val"
) -> Path:
    """Class folders of pictures; picture number i is of class i modulo 3."""
    for split, count, first in (("train", train, 0), (test_name, test, 100)):
        for i in range(count):
            write(root / split / CLASSES[i % 3] / f"{i:03}.{kind}", encoded(first + i, kind))
    return root


def write_tar(path: Path, members: Mapping[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def shard(first: int, count: int, *, prefix: str = "", label: str = "cls") -> dict[str, bytes]:
    """Members of a shard: pictures with consecutive numbers and their labels."""
    members = {}
    for i in range(count):
        members[f"{prefix}{i:03}.png"] = encoded(first + i)
        text = str(i % 3) if label == "cls" else json.dumps({"label": i % 3, "url": "x"})
        members[f"{prefix}{i:03}.{label}"] = text.encode()
    return members


def make_shards(root: Path, train: int = 6, test: int = 3) -> Path:
    write_tar(root / "train-0000.tar", shard(0, train))
    write_tar(root / "val-0000.tar", shard(100, test))
    write(root / "classes.txt", "\n".join(CLASSES).encode())
    return root


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def make_idx(folder: Path, *, zipped: bool = False, train: int = 6, test: int = 3) -> Path:
    """Fashion-MNIST's four files, small."""
    for prefix, count, first in (("train", train, 0), ("t10k", test, 100)):
        images = np.stack([pixels(first + i)[:, :, 0] for i in range(count)])
        for name, array in (
            (f"{prefix}-images-idx3-ubyte", images),
            (f"{prefix}-labels-idx1-ubyte", (np.arange(count) % 10).astype(np.uint8)),
        ):
            content = idx(array)
            if zipped:
                write(folder / f"{name}.gz", gzip.compress(content))
            else:
                write(folder / name, content)
    return folder


def image_set(count: int, first: int = 0, *, channels: int = 3) -> ImageSet:
    images = np.stack([pixels(first + i) for i in range(count)])
    return ImageSet(
        images=torch.from_numpy(images).permute(0, 3, 1, 2)[:, :channels].contiguous(),
        labels=torch.arange(count) % 3,
        class_names=CLASSES,
    )


def make_table(root: Path, train: int = 6, test: int = 3, **changes: Any) -> Path:
    """What `datasets` saves. Changes: names, test_names, label, image, row, splits, format."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    splits = {}
    for split, count, first in (("train", train, 0), ("test", test, 100)):
        names = changes.get("test_names" if split == "test" else "names", CLASSES)
        rows: dict[str, list[Any]] = {
            "picture": [{"bytes": encoded(first + i), "path": None} for i in range(count)],
            "kind": [i % 3 for i in range(count)],
        }
        if split == "train":
            rows["kind"][1] = changes.get("label", 1)
            rows["picture"][2] = changes.get("image", rows["picture"][2])
        features = datasets.Features(
            {"picture": datasets.Image(), "kind": datasets.ClassLabel(names=list(names))}
        )
        table = datasets.Dataset.from_dict(rows, features=features)
        splits[changes.get("splits", {}).get(split, split)] = table.with_format(
            changes.get("format")
        )
    datasets.DatasetDict(splits).save_to_disk(str(root))
    if "row" in changes:
        _replace_row(next(root.glob("*rain*/*.arrow")), 2, changes["row"])
    return root


def _replace_row(path: Path, index: int, row: Mapping[str, Any]) -> None:
    """Replace an image of a saved table; `datasets` would read the file that it names."""
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.ipc.open_stream(path.read_bytes()).read_all()
    field, at = table.schema.field("picture"), table.schema.get_field_index("picture")
    rows = table["picture"].to_pylist()
    rows[index] = row
    table = table.set_column(at, field, pyarrow.array(rows, field.type))
    with path.open("wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
