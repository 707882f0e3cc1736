"""Read images with boxes and masks in COCO's format.

Everything is checked on reading, so that no error appears in the middle of a training: ids,
categories, image files, boxes and masks. All masks become run-length codes. Objects without a
usable box or mask are dropped and counted. Inconsistent files are refused.
"""

import json
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeGuard
from zlib import crc32

import torch
from torch import Tensor

from rbdc.data.files import ImageLocation, locate_image, read_whole
from rbdc.data.images import listed_fingerprint
from rbdc.disk import open_file
from rbdc.errors import DataError, nearest, not_installed

Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels
_MOST_PIXELS = 100_000  # of a side
NO_AREA, OUTSIDE, NO_SHAPE = "box without area", "box outside the image", "no usable shape"


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """An object, or a crowd of them, in an image."""

    category: int
    """Category id of the file. Ids may have gaps."""
    box: Box
    """Box clipped to the image, with a positive area."""
    counts: bytes
    """Mask: the counts of a compressed run-length code in the image's size."""
    crowd: bool
    """Whether it is a crowd of objects, COCO's `iscrowd`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """An image and its regions, of which there may be none."""

    id: int
    location: ImageLocation
    height: int
    width: int
    regions: tuple[Region, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CocoSet:
    """One split of a data set."""

    annotations: Path
    pictures: tuple[Picture, ...]
    categories: Mapping[int, str]
    """Category names by id, in the order of ids."""
    dropped: Mapping[str, int]
    """Number of dropped objects, by reason."""
    fingerprint: str
    """Digest that changes when images, regions or categories change."""

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(self.categories.values())

    @property
    def objects(self) -> int:
        """Number of objects, without crowds."""
        return sum(not region.crowd for picture in self.pictures for region in picture.regions)

    def labels(self, class_names: Sequence[str]) -> dict[int, int]:
        """Return a detector's label, from 1, for each category id. Categories match by name."""
        known = {name: label for label, name in enumerate(class_names, start=1)}
        return {id: known[name] for id, name in self.categories.items() if name in known}

    def to_json(self) -> dict[str, Any]:
        return {
            "annotations": self.annotations.name,
            "images": len(self.pictures),
            "objects": self.objects,
            "crowds": sum(r.crowd for picture in self.pictures for r in picture.regions),
            "without_objects": sum(not picture.regions for picture in self.pictures),
            "dropped": dict(self.dropped),
            "class_names": list(self.class_names),
            "fingerprint": self.fingerprint,
        }


class Splits(NamedTuple):
    """The training and validation images. The classes are those of the training images."""

    train: CocoSet
    val: CocoSet

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.train.class_names

    def to_json(self) -> dict[str, Any]:
        return {"train": self.train.to_json(), "val": self.val.to_json()}


def open_splits(data: str | Path, *others: str | Path) -> Splits:
    """Open a folder in COCO's layout; or annotations and images of training, then of validation.

    In COCO's layout, `annotations/instances_train2017.json` belongs to `train2017/`, and likewise
    for val. The year may be different or missing. Splits on which a detector cannot be trained or
    evaluated are refused.
    """
    if others:
        images, val_annotations, val_images = others
        splits = Splits(read_coco(data, images), read_coco(val_annotations, val_images))
    else:
        splits = Splits(*(_open_split(Path(data), split) for split in ("train", "val")))
    for split in splits:
        if not split.objects:
            reasons = ", ".join(f"{count} x {why}" for why, count in split.dropped.items())
            raise DataError(
                f"{split.annotations} has no objects" + (f" left ({reasons})" if reasons else ""),
                "Both splits need objects with boxes and masks; test sets without annotations "
                "cannot be scored.",
            )
    train, val = splits
    if not val.labels(train.class_names):
        ours, theirs = (", ".join(split.class_names[:5]) for split in splits)
        raise DataError(
            f"{train.annotations} and {val.annotations} have no category in common: "
            f"{ours} against {theirs}",
            nearest(val.class_names[0], train.class_names)
            or "Categories match if their names are equal.",
        )
    return splits


def _open_split(root: Path, split: str) -> CocoSet:
    found = list(root.glob(f"annotations/instances_{split}*.json"))
    if len(found) != 1:
        raise DataError(
            f"{root} has {len(found)} files annotations/instances_{split}*.json, one was expected",
            "Give a folder in COCO's layout, or name each split's JSON and image folder.",
        )
    return read_coco(found[0], root / found[0].stem.removeprefix("instances_"))


def read_coco(annotations: str | Path, images: str | Path) -> CocoSet:
    """Read one split: a JSON file in COCO's format, and the folder of its images."""
    path, folder = Path(annotations), Path(images)
    content = read_annotations(path)
    categories = _categories(path, content["categories"])
    by_image: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    sizes = _sizes(path, content["images"])
    for annotation in content["annotations"]:
        image, category = (_id(path, annotation, key) for key in ("image_id", "category_id"))
        if image not in sizes:
            raise _wrong(path, f"has an object in image {image}, which it does not list")
        if category not in categories:
            raise _wrong(path, f"has an object of category {category}, which it does not list")
        by_image[image].append(annotation)
    dropped: Counter[str] = Counter()
    pictures, lines = [], []
    whole = read_whole(folder / entry["file_name"] for entry in content["images"])
    for entry in content["images"]:
        height, width = sizes[entry["id"]]
        found = [region_of(one, height, width) for one in by_image[entry["id"]]]
        dropped.update(reason for reason in found if isinstance(reason, str))
        regions = tuple(region for region in found if isinstance(region, Region))
        file = folder / entry["file_name"]
        if not file.is_file():
            raise DataError(
                f"{file} is missing, but {path} lists it",
                "Put the image there, or give the folder that contains the images.",
            )
        at = locate_image(file, whole=whole)
        pictures.append(
            Picture(id=entry["id"], location=at, height=height, width=width, regions=regions)
        )
        lines.append(f"{entry['id']} {at.size} {at.checksum} {height} {width}")
        lines += [f"{r.category} {r.box} {crc32(r.counts)} {r.crowd}" for r in regions]
    return CocoSet(
        annotations=path,
        pictures=tuple(pictures),
        categories=categories,
        dropped=dict(dropped),
        fingerprint=listed_fingerprint([f"{id} {name}" for id, name in categories.items()], lines),
    )


def region_of(annotation: Mapping[str, Any], height: int, width: int) -> Region | str:
    """Return an annotation's region clipped to the image, or the reason why it is unusable."""
    box = annotation.get("bbox")
    if not _numbers(box, 4) or min(box[2:]) <= 0:
        return NO_AREA
    left, top, wide, high = map(float, box)
    cut = (max(left, 0.0), max(top, 0.0), min(left + wide, width), min(top + high, height))
    if cut[0] >= cut[2] or cut[1] >= cut[3]:
        return OUTSIDE
    counts = shape_of(annotation.get("segmentation"), height, width)
    if counts is None:
        return NO_SHAPE
    return Region(
        category=annotation["category_id"],
        box=cut,
        counts=counts,
        crowd=bool(annotation.get("iscrowd", 0)),
    )


def shape_of(segmentation: Any, height: int, width: int) -> bytes | None:
    """Convert polygons or a run-length code to the counts of a compressed run-length code.

    Return None if it is neither of these, or has no pixels.
    """
    masks = pycocotools("mask")
    try:
        if isinstance(segmentation, dict):
            if list(segmentation["size"]) != [height, width]:
                return None
            counts = segmentation["counts"]
            if isinstance(counts, list):
                if sum(counts) != height * width:
                    return None
                code = masks.frPyObjects(segmentation, height, width)
            else:
                counts = counts.encode() if isinstance(counts, str) else counts
                code = {"size": [height, width], "counts": counts}
        else:  # pycocotools would turn fewer than three points into a box, or fail
            polygons = [p for p in segmentation if len(p) >= 6 and _numbers(p, len(p) // 2 * 2)]
            if not polygons:
                return None
            code = masks.merge(masks.frPyObjects(polygons, height, width))
        return code["counts"] if masks.area(code) > 0 else None
    except (TypeError, KeyError, AttributeError, ValueError):  # not a mask
        return None


def masks_of(regions: Sequence[Region], height: int, width: int) -> Tensor:
    """Decode the masks of regions to uint8 (regions, height, width) of 0 and 1."""
    if not regions:
        return torch.zeros(0, height, width, dtype=torch.uint8)
    codes = [{"size": (height, width), "counts": region.counts} for region in regions]
    with warnings.catch_warnings():  # its arrays do not support numpy 2's `copy` yet
        warnings.simplefilter("ignore", DeprecationWarning)
        decoded = pycocotools("mask").decode(codes)
    return torch.from_numpy(decoded).permute(2, 0, 1).contiguous()


def pycocotools(part: str) -> ModuleType:
    """Import a module of pycocotools, an optional dependency."""
    try:
        return import_module(f"pycocotools.{part}")
    except ImportError:
        raise not_installed("pycocotools", "transfer", DataError) from None


def read_annotations(path: Path) -> dict[str, Any]:
    """Read a JSON file, and check that it has COCO's lists. Test sets have no annotations."""
    try:
        with open_file(path) as file:
            content = json.load(file)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "Name a file.") from None
    except (ValueError, RecursionError) as error:
        raise _wrong(path, f"is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise _wrong(path, "is not in COCO's format: it contains no JSON object")
    content.setdefault("annotations", [])
    for key in ("images", "annotations", "categories"):
        if key not in content:
            raise _wrong(path, f"is not in COCO's format: it has no {key}")
        if not isinstance(content[key], list) or not all(isinstance(e, dict) for e in content[key]):
            raise _wrong(path, f"is not in COCO's format: {key} is not a list of objects")
        if not content[key] and key != "annotations":
            raise _wrong(path, f"has no {key}")
    return content


def _categories(path: Path, entries: Iterable[Mapping[str, Any]]) -> dict[int, str]:
    found = {_id(path, entry, "id"): str(entry.get("name", entry["id"])) for entry in entries}
    twice = [name for name, count in Counter(found.values()).items() if count > 1]
    if twice:
        raise DataError(
            f"{path} has more than one category called {twice[0]}",
            "Use unique names: splits are matched by name.",
        )
    return dict(sorted(found.items()))


def _sizes(path: Path, entries: Iterable[Mapping[str, Any]]) -> dict[int, tuple[int, int]]:
    """Return (height, width) by image id."""
    sizes: dict[int, tuple[int, int]] = {}
    for entry in entries:
        id = _id(path, entry, "id")
        if id in sizes:
            raise DataError(f"{path} has two images with the id {id}", "Give each its own.")
        height, width, name = (entry.get(key) for key in ("height", "width", "file_name"))
        if not (type(height) is int and type(width) is int and isinstance(name, str)):
            raise _wrong(path, f"does not give file_name, height and width of image {id}")
        if not (0 < height <= _MOST_PIXELS and 0 < width <= _MOST_PIXELS):
            raise _wrong(path, f"gives image {id} a size of {width} x {height} px")
        sizes[id] = (height, width)
    return sizes


def _id(path: Path, entry: Mapping[str, Any], key: str) -> int:
    value = entry.get(key)
    if type(value) is not int:  # True is an int too, but no id
        expected = f"{key} is {value!r}, a whole number was expected"
        raise _wrong(path, f"is not in COCO's format: {expected}")
    return value


def _numbers(values: Any, count: int) -> TypeGuard[list[float]]:
    return (
        isinstance(values, list)
        and len(values) == count
        and all(isinstance(value, int | float) and abs(value) < 1e9 for value in values)
    )


def _wrong(path: Path, problem: str) -> DataError:
    return DataError(
        f"{path} {problem}",
        "COCO's instances_*.json has images, annotations and categories, each a list of objects.",
    )
