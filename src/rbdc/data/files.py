"""Images on disk, decoded when needed: class folders and tar shards."""

import json
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import IO

from PIL import Image

from rbdc.data.images import DataSet, check_splits, listed_fingerprint
from rbdc.errors import DataError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".tif", ".tiff")
TRAIN, TEST = ("train", "training"), ("val", "validation", "valid", "test")
_ENDS = {  # how a whole file begins and ends
    b"\xff\xd8": b"\xff\xd9",  # JPEG
    b"\x89P": b"IEND\xaeB`\x82",  # PNG
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where the bytes of an image are: a whole file, or a stretch of a shard."""

    path: Path
    offset: int = 0
    size: int
    member: str = ""

    def read(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.size)

    def looks_whole(self) -> bool:
        """Begins and ends as its format does; what this cannot say is decoded to know."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                end = _ENDS.get(file.read(2))
                if end is None or self.size < len(end):
                    return False
                file.seek(self.offset + self.size - len(end))
                return file.read(len(end)) == end
        except OSError:
            return False

    def __str__(self) -> str:
        return f"{self.path}:{self.member}" if self.member else str(self.path)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredImages:
    """An ImageSource of places on disk."""

    places: tuple[Place, ...]
    labels: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.places)

    def read(self, index: int) -> Image.Image:
        image = Image.open(BytesIO(self.places[index].read()))
        image.load()
        return image

    def name(self, index: int) -> str:
        return str(self.places[index])

    def suspects(self) -> list[int]:
        return [i for i, place in enumerate(self.places) if not place.looks_whole()]

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
    classes = tuple(sorted(path.name for path in folders[0].iterdir() if path.is_dir()))
    known = {name: label for label, name in enumerate(classes)}
    splits, lines = [], []
    for folder in folders:
        places, labels = [], []
        for entry in sorted(path for path in folder.iterdir() if path.is_dir()):
            if entry.name not in known:
                raise DataError(
                    f"{entry} is a class that {folders[0]} has not", "Both splits share classes."
                )
            for path in sorted(p for p in entry.rglob("*") if p.suffix.lower() in EXTENSIONS):
                places.append(Place(path=path, size=path.stat().st_size))
                labels.append(known[entry.name])
        splits.append(StoredImages(places=tuple(places), labels=tuple(labels)))
        lines += [f"{place.path.relative_to(root)} {place.size}" for place in places]
    check_splits(str(root), *splits)
    return DataSet(
        name=root.name,
        train=splits[0],
        test=splits[1],
        class_names=classes,
        fingerprint=listed_fingerprint(classes, lines),
    )


def find_shards(root: Path) -> tuple[list[Path], list[Path]] | None:
    """WebDataset's tar files of both splits: `train-0000.tar`, or `train/0000.tar`."""
    found = [
        sorted(
            p for name in names for p in (*root.glob(f"{name}*.tar"), *root.glob(f"{name}/*.tar"))
        )
        for names in (TRAIN, TEST)
    ]
    return (found[0], found[1]) if found[0] and found[1] else None


def shards(root: Path) -> DataSet:
    """WebDataset shards: NAME.jpg (or png, webp) with NAME.cls, or NAME.json with "label".

    A plain tar can be read at any place, so that shards are shuffled over as freely as files are.
    `classes.txt`, a line a class, gives the classes their names.
    """
    found = find_shards(root)
    assert found is not None
    splits = [_index(paths) for paths in found]
    check_splits(str(root), *splits)
    count = 1 + max(max(split.labels) for split in splits)
    listed = root / "classes.txt"
    names = tuple(listed.read_text().splitlines()) if listed.exists() else ()
    if names and len(names) < count:
        raise DataError(
            f"{listed} names {len(names)} classes, but label {count - 1} occurs",
            "Give it a line a class.",
        )
    classes = names or tuple(map(str, range(count)))
    lines = [
        f"{place.path.name}:{place.member} {place.size} {label}"
        for split in splits
        for place, label in zip(split.places, split.labels, strict=True)
    ]
    return DataSet(
        name=root.name,
        train=splits[0],
        test=splits[1],
        class_names=classes,
        fingerprint=listed_fingerprint(classes, lines),
    )


def _index(paths: Iterable[Path]) -> StoredImages:
    places: list[Place] = []
    labels: list[int] = []
    for path in paths:
        images: dict[str, Place] = {}
        classes: dict[str, int] = {}
        try:
            with tarfile.open(path, "r:") as archive:
                for member in archive:
                    key, _, extension = member.name.partition(".")
                    if f".{extension.lower()}" in EXTENSIONS:
                        images[key] = Place(
                            path=path,
                            offset=member.offset_data,
                            size=member.size,
                            member=member.name,
                        )
                    elif extension in ("cls", "json"):
                        classes[key] = _label(archive.extractfile(member), extension)
        except (tarfile.TarError, ValueError, KeyError, OSError) as error:
            raise DataError(f"{path} is not a readable shard: {error}", "Write it again.") from None
        for key in images:
            if key not in classes:
                raise DataError(
                    f"{images[key]} has no label", f"Add {key}.cls, or {key}.json with a label."
                )
        places += images.values()
        labels += [classes[key] for key in images]
    return StoredImages(places=tuple(places), labels=tuple(labels))


def _label(file: IO[bytes] | None, extension: str) -> int:
    content = (file.read() if file else b"").decode()
    label = int(json.loads(content)["label"]) if extension == "json" else int(content)
    if label < 0:
        raise ValueError(f"label {label}")
    return label
