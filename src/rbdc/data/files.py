"""Images on disk, decoded on demand: class folders and tar shards."""

import os
import re
import tarfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, cast
from zlib import crc32

from PIL import Image

from rbdc.data.images import DataSet, ImageSource, check_splits, listed_fingerprint
from rbdc.disk import Json, check_shape, open_file, parse_json, read_bytes
from rbdc.errors import DataError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".tif", ".tiff")
# for some other formats PIL would run Ghostscript
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF")
TRAIN, TEST = ("train", "training"), ("val", "validation", "valid", "test")
_ENDS = {  # first bytes of a format: last bytes of a complete file
    b"\xff\xd8": b"\xff\xd9",  # JPEG
    b"\x89P": b"IEND\xaeB`\x82",  # PNG
}
MOST_CLASSES = 10**6
_MOST_LABEL = 2**20  # bytes of a member that holds a label
_LOOK = 256  # bytes at both ends of a file that are read when the data set is opened
MOST_READ = 2**34  # bytes of all images up to which every byte is read then, and not its ends only
ENDS = f"its size, and its first and last {_LOOK} bytes"
_MEMBER = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)")  # WebDataset: the key ends at the first dot


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageLocation:
    """Location of an image's bytes: a file, or a range of a tar shard."""

    path: Path
    offset: int
    size: int
    member: str
    complete: bool
    """Whether the file begins and ends as its format demands; others are decoded to check them."""
    checksum: int
    """CRC-32 of all bytes, or of the first and last ones."""

    def read(self) -> bytes:
        descriptor = os.open(self.path, os.O_RDONLY)  # takes a third of the time of a file object
        try:
            return os.pread(descriptor, self.size, self.offset)
        finally:
            os.close(descriptor)

    def __str__(self) -> str:
        return f"{self.path}:{self.member}" if self.member else str(self.path)


def locate_image(
    path: Path, *, whole: bool, offset: int = 0, size: int | None = None, member: str = ""
) -> ImageLocation:
    """Return the location of an image after reading it, or its first and last bytes.

    A file that cannot be read is not complete, so it is decoded later, which reports the error.
    """
    head = tail = b""
    try:
        with open_file(path) as file:
            there = os.fstat(file.fileno()).st_size
            size = there if size is None else size
            if offset + size > there:  # a size that the shard only claims
                raise ValueError(f"{member} is cut off")
            ends = size if whole else min(size, _LOOK)
            file.seek(offset)
            head = file.read(ends)
            file.seek(offset + size - ends)
            tail = head if whole else file.read(ends)
    except OSError:
        size = size or 0
    except ValueError as error:
        raise DataError(f"{path} cannot be read: {error}", "Remove it.") from None
    end = _ENDS.get(head[:2])
    return ImageLocation(
        path=path,
        offset=offset,
        size=size,
        member=member,
        complete=end is not None and tail.endswith(end),
        checksum=crc32(head if whole else head + tail),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredImages(ImageSource):
    """Files or members of tar shards."""

    locations: tuple[ImageLocation, ...]
    labels: tuple[int, ...]

    def read(self, index: int) -> Image.Image:
        return Image.open(BytesIO(self.locations[index].read()), formats=FORMATS)

    def name(self, index: int) -> str:
        return str(self.locations[index])

    def suspects(self) -> list[int]:
        return [i for i, location in enumerate(self.locations) if not location.complete]


_Labelled = list[tuple[ImageLocation, int]]


def split_folders(root: Path) -> tuple[Path, Path] | None:
    """Return the folders of the training and test split in ImageNet's layout, or None."""
    train, test = (
        next(filter(Path.is_dir, (root / name for name in names)), None) for names in (TRAIN, TEST)
    )
    return (train, test) if train and test else None


def image_folders(root: Path, folders: tuple[Path, Path]) -> DataSet:
    """Open `train/CLASS/*.jpg` and `val/CLASS/*.jpg` (or test), classes in alphabetical order."""
    classes = tuple(path.name for path in _folders(folders[0]))
    images = {entry: _images(entry) for folder in folders for entry in _folders(folder)}
    whole = read_whole(path for paths in images.values() for path in paths)
    splits = []
    for folder in folders:
        found: _Labelled = []
        for entry in _folders(folder):
            if entry.name not in classes:
                raise DataError(
                    f"{entry} is a class that {folders[0]} lacks",
                    "Both splits must have the same classes.",
                )
            label = classes.index(entry.name)
            found += [(locate_image(path, whole=whole), label) for path in images[entry]]
        splits.append(found)
    return _data(root, splits, classes, whole)


def read_whole(paths: Iterable[Path]) -> bool:
    """Return whether every byte of these files is read to compare them with those of before.

    Up to 16 GiB that takes less than to decode them once, and finds them in memory afterwards.
    """
    total = 0
    for path in paths:
        with suppress(OSError):  # reading it reports the error
            total += path.stat().st_size
    return total <= MOST_READ


def _folders(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _images(folder: Path) -> list[Path]:
    """Return the image files below a folder. Notebooks and macOS leave hidden files: skip them."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in EXTENSIONS
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def _data(
    root: Path, splits: Sequence[_Labelled], classes: tuple[str, ...], whole: bool
) -> DataSet:
    train, test = (
        StoredImages(locations=tuple(at for at, _ in split), labels=tuple(n for _, n in split))
        for split in splits
    )
    lines = [  # without the path of `root` or any time
        f"{at.path.relative_to(root)}:{at.member} {at.size} {at.checksum} {label}"
        for split in splits
        for at, label in split
    ]
    check_splits(str(root), train, test, len(classes))
    found = listed_fingerprint(classes, lines)
    return DataSet(
        name=root.name,
        train=train,
        test=test,
        class_names=classes,
        fingerprint=found,
        compared="every byte" if whole else ENDS,
    )


def find_shards(root: Path) -> tuple[list[Path], list[Path]] | None:
    """Return the tar files of both splits (`train-0000.tar` or `train/0000.tar`), or None."""
    train, test = (
        next(filter(None, ([*root.glob(f"{n}*.tar"), *root.glob(f"{n}/*.tar")] for n in names)), [])
        for names in (TRAIN, TEST)
    )
    return (sorted(train), sorted(test)) if train and test else None


def shards(root: Path, found: tuple[list[Path], list[Path]]) -> DataSet:
    """Open WebDataset shards: NAME.jpg (or png, webp) with NAME.cls, or NAME.json with "label".

    An uncompressed tar file allows random access, so images are shuffled across all shards.
    `classes.txt`, with one line per class, names the classes.
    """
    whole = read_whole(path for paths in found for path in paths)
    splits = [_index(paths, whole) for paths in found]
    count = 1 + max((label for split in splits for _, label in split), default=-1)
    listed = root / "classes.txt"
    names = _class_names(listed) if listed.exists() else ()
    if names and len(names) < count:
        raise DataError(
            f"{listed} names {len(names)} classes, but label {count - 1} occurs",
            "Write one line per class.",
        )
    return _data(root, splits, names or tuple(map(str, range(count))), whole)


def _class_names(path: Path) -> tuple[str, ...]:
    try:
        return tuple(read_bytes(path).decode().strip().splitlines())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}", "Write one class per line.") from None


def _index(paths: Iterable[Path], whole: bool) -> _Labelled:
    found: _Labelled = []
    for path in paths:
        try:
            images, known = _read_shard(path, whole)
        except (tarfile.TarError, OSError, ValueError) as error:
            raise DataError(f"{path} is not a readable shard: {error}", "Write it again.") from None
        for key, location in images.items():
            if key not in known:
                raise DataError(
                    f"{location} has no label", f"Add {key}.cls, or {key}.json with a label."
                )
            found.append((location, known[key]))
    return found


def _read_shard(path: Path, whole: bool) -> tuple[dict[str, ImageLocation], dict[str, int]]:
    """Return the images and the labels of a shard, by key. Other members are ignored."""
    images: dict[str, ImageLocation] = {}
    labels: dict[str, int] = {}
    with open_file(path) as file, tarfile.open(fileobj=file, mode="r:") as archive:
        for member in archive:
            match = _MEMBER.fullmatch(member.name)
            if not match or not member.isfile():
                continue
            key, extension = match[1], match[2].lower()
            if f".{extension}" in EXTENSIONS:
                images[key] = locate_image(
                    path,
                    whole=whole,
                    offset=member.offset_data,
                    size=member.size,
                    member=member.name,
                )
            elif extension in ("cls", "json"):
                content = cast(IO[bytes], archive.extractfile(member)).read(_MOST_LABEL)
                try:
                    if (label := _label(content, extension)) is None:
                        continue
                except ValueError:
                    raise DataError(
                        f"{path}:{member.name} holds no label: {content[:40]!r}",
                        f"Write a whole number from 0 to {MOST_CLASSES:,}.",
                    ) from None
                if extension == "cls" or key not in labels:  # NAME.cls has precedence
                    labels[key] = label
    return images, labels


def _label(content: bytes, extension: str) -> int | None:
    """Return the label in a member of a shard; None if it is a JSON object without one."""
    if extension == "cls":
        label = int(content)
    else:
        facts = check_shape(parse_json(content), Json, "it", DataError, "")
        if facts.get("label") is None:
            return None
        label = int(str(facts["label"]))
    if label > MOST_CLASSES:
        raise ValueError(f"{label} is no index of a class")
    return label
