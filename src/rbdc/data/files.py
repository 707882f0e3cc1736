"""Images on disk, decoded when needed: class folders and tar shards."""

import json
import os
import re
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from zlib import crc32

from PIL import Image

from rbdc.data.images import DataSet, check_splits, listed_fingerprint
from rbdc.errors import DataError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".tif", ".tiff")
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF")  # PIL would run Ghostscript on some others
TRAIN, TEST = ("train", "training"), ("val", "validation", "valid", "test")
_ENDS = {  # how a whole file begins and ends
    b"\xff\xd8": b"\xff\xd9",  # JPEG
    b"\x89P": b"IEND\xaeB`\x82",  # PNG
}
_LOOK = 256  # bytes at either end that are read beforehand
_MEMBER = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)")  # as in WebDataset: up to the name's first dot


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where the bytes of an image are: a whole file, or a stretch of a shard."""

    path: Path
    offset: int
    size: int
    member: str
    whole: bool
    """Begins and ends as its format does; what this cannot say is decoded to know."""
    ends: int
    """Checksum of the first and the last bytes."""

    def read(self) -> bytes:
        descriptor = os.open(self.path, os.O_RDONLY)  # a third of what a file object takes
        try:
            return os.pread(descriptor, self.size, self.offset)
        finally:
            os.close(descriptor)

    def __str__(self) -> str:
        return f"{self.path}:{self.member}" if self.member else str(self.path)

    def line(self, root: Path, label: int) -> str:
        """What the fingerprint knows of it: not where `root` lies, nor when it was written."""
        name = f"{self.path.relative_to(root)}:{self.member}"
        return f"{name} {self.size} {self.ends} {label}"


def look_at(path: Path, *, offset: int = 0, size: int | None = None, member: str = "") -> Place:
    """The place of an image after a quick look at both its ends; one that cannot be read has none,
    and is found out when it is decoded."""
    head = tail = b""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size if size is None else size
            ends = min(size, _LOOK)
            file.seek(offset)
            head = file.read(ends)
            file.seek(offset + size - ends)
            tail = file.read(ends)
    except OSError:
        size = size or 0
    end = _ENDS.get(head[:2])
    return Place(
        path=path,
        offset=offset,
        size=size,
        member=member,
        whole=end is not None and tail.endswith(end),
        ends=crc32(head + tail),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredImages:
    """An ImageSource of places on disk."""

    places: tuple[Place, ...]
    labels: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.places)

    def read(self, index: int) -> Image.Image:
        return Image.open(BytesIO(self.places[index].read()), formats=FORMATS)

    def name(self, index: int) -> str:
        return str(self.places[index])

    def suspects(self) -> list[int]:
        return [i for i, place in enumerate(self.places) if not place.whole]

    def without(self, indices: Sequence[int]) -> "StoredImages":
        out = set(indices)
        kept = [i for i in range(len(self)) if i not in out]
        return replace(
            self,
            places=tuple(self.places[i] for i in kept),
            labels=tuple(self.labels[i] for i in kept),
        )


def split_folders(root: Path) -> tuple[Path, Path] | None:
    """The folders of the training and the test split: ImageNet's layout."""
    found = [
        next((root / name for name in names if (root / name).is_dir()), None)
        for names in (TRAIN, TEST)
    ]
    return (found[0], found[1]) if found[0] and found[1] else None


def image_folders(root: Path) -> DataSet:
    """`train/CLASS/*.jpg` and `val/CLASS/*.jpg` (or test); classes in alphabetical order."""
    folders = split_folders(root)
    assert folders is not None
    classes = tuple(path.name for path in _folders(folders[0]))
    known = {name: label for label, name in enumerate(classes)}
    splits = []
    for folder in folders:
        places, labels = [], []
        for entry in _folders(folder):
            if entry.name not in known:
                raise DataError(
                    f"{entry} is a class that {folders[0]} has not", "Both splits share classes."
                )
            images = [look_at(path) for path in _images(entry)]
            places += images
            labels += [known[entry.name]] * len(images)
        splits.append(StoredImages(places=tuple(places), labels=tuple(labels)))
    return _data(root, splits[0], splits[1], classes)


def _folders(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _images(folder: Path) -> list[Path]:
    """Hidden files are not images: notebooks and macOS leave such beside them."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in EXTENSIONS
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def _data(root: Path, train: StoredImages, test: StoredImages, classes: tuple[str, ...]) -> DataSet:
    check_splits(str(root), train, test, classes=len(classes))
    lines = [
        place.line(root, label)
        for split in (train, test)
        for place, label in zip(split.places, split.labels, strict=True)
    ]
    return DataSet(
        name=root.name,
        train=train,
        test=test,
        class_names=classes,
        fingerprint=listed_fingerprint(classes, lines),
    )


def find_shards(root: Path) -> tuple[list[Path], list[Path]] | None:
    """WebDataset's tar files of both splits: `train-0000.tar`, or `train/0000.tar`."""
    train, test = (
        next(filter(None, (_tars(root, name) for name in names)), []) for names in (TRAIN, TEST)
    )
    return (train, test) if train and test else None


def _tars(root: Path, split: str) -> list[Path]:
    return sorted([*root.glob(f"{split}*.tar"), *root.glob(f"{split}/*.tar")])


def shards(root: Path) -> DataSet:
    """WebDataset shards: NAME.jpg (or png, webp) with NAME.cls, or NAME.json with "label".

    A plain tar can be read at any place, so that shards are shuffled over as freely as files are.
    `classes.txt`, a line a class, gives the classes their names.
    """
    found = find_shards(root)
    assert found is not None
    train, test = (_index(paths) for paths in found)
    count = 1 + max((*train.labels, *test.labels), default=-1)
    listed = root / "classes.txt"
    names = tuple(listed.read_text().strip().splitlines()) if listed.exists() else ()
    if names and len(names) < count:
        raise DataError(
            f"{listed} names {len(names)} classes, but label {count - 1} occurs",
            "Give it a line a class.",
        )
    return _data(root, train, test, names or tuple(map(str, range(count))))


def _index(paths: Iterable[Path]) -> StoredImages:
    places: list[Place] = []
    labels: list[int] = []
    for path in paths:
        images: dict[str, Place] = {}
        known: dict[str, int] = {}
        try:
            with tarfile.open(path, "r:") as archive:
                for member in archive:
                    _add_member(path, archive, member, images, known)
        except (tarfile.TarError, OSError) as error:
            raise DataError(f"{path} is not a readable shard: {error}", "Write it again.") from None
        for key, place in images.items():
            if key not in known:
                raise DataError(
                    f"{place} has no label", f"Add {key}.cls, or {key}.json with a label."
                )
            places.append(place)
            labels.append(known[key])
    return StoredImages(places=tuple(places), labels=tuple(labels))


def _add_member(
    path: Path,
    archive: tarfile.TarFile,
    member: tarfile.TarInfo,
    images: dict[str, Place],
    labels: dict[str, int],
) -> None:
    """A member of a shard is an image, a label, or of no use."""
    match = _MEMBER.fullmatch(member.name)
    if not match or not member.isfile():
        return
    key, extension = match[1], match[2].lower()
    if f".{extension}" in EXTENSIONS:
        images[key] = look_at(path, offset=member.offset_data, size=member.size, member=member.name)
    elif extension in ("cls", "json"):
        file = archive.extractfile(member)
        assert file is not None, "it is a file"
        content = file.read()
        try:
            if extension == "cls":
                labels[key] = int(content)
            elif (facts := json.loads(content)).get("label") is not None:
                labels.setdefault(key, int(str(facts["label"])))  # NAME.cls goes before
        except (ValueError, AttributeError):
            raise DataError(
                f"{path}:{member.name} holds no label: {content[:40]!r}", "Write a whole number."
            ) from None
