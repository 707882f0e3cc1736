"""A small data set in COCO's format that has everything COCO has, and classifiers for it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import rbdc
from rbdc.transfer.batches import DetectionSamples
from rbdc.transfer.coco import CocoSet, pycocotools
from rbdc.transfer.scores import Results
from tests.support import randomized

CATEGORIES = [{"id": 90, "name": "cat"}, {"id": 3, "name": "dog"}, {"id": 7, "name": "kite"}]
SIZES = {11: (60, 40), 5: (50, 70), 8: (33, 47)}  # image id -> width, height
Content = dict[str, Any]

VIT: dict[str, Any] = {
    "img_size": (32, 48),  # patches of a grid that is not square
    "patch_size": 16,
    "depth": 3,
    "embed_dim": 32,
    "num_heads": 2,
    "num_classes": 5,
}


def classifier(name: str = "deit_tiny_patch16_224", **arguments: Any) -> Any:
    """A small one with telling weights."""
    return randomized(rbdc.build(name, **{**VIT, **arguments}), seed=1).eval()


def resnet(**arguments: Any) -> Any:
    small: dict[str, Any] = {"channels": [8, 16, 16, 32], "stem_width": 4, "num_classes": 5}
    return randomized(rbdc.build("resnet18d", **small, **arguments), seed=1).eval()


def polygon(x: float, y: float, w: float, h: float) -> list[list[float]]:
    return [[x, y, x + w, y, x + w, y + h, x, y + h]]


def runs(x: int, y: int, w: int, h: int, size: tuple[int, int]) -> Content:
    """A box of pixels as an uncompressed run-length code: columns, from the left."""
    mask = np.zeros((size[1], size[0]), dtype=np.uint8)
    mask[y : y + h, x : x + w] = 1
    flat = mask.flatten(order="F")
    edges = np.flatnonzero(np.diff(flat)) + 1
    counts = np.diff([0, *edges, len(flat)]).tolist()
    return {"size": [size[1], size[0]], "counts": counts if flat[0] == 0 else [0, *counts]}


def compressed(x: int, y: int, w: int, h: int, size: tuple[int, int]) -> Content:
    code = pycocotools("mask").frPyObjects(runs(x, y, w, h, size), size[1], size[0])
    return {"size": list(code["size"]), "counts": code["counts"].decode()}


def content() -> Content:
    """Three images: polygons, both run-length codes and a crowd; one has nothing in it."""
    shapes: list[tuple[int, int, tuple[int, int, int, int], Any, int]] = [
        (11, 3, (4, 6, 20, 15), polygon(4, 6, 20, 15), 0),
        (11, 90, (30, 2, 24, 34), runs(30, 2, 24, 34, SIZES[11]), 0),
        (5, 7, (1, 1, 40, 30), compressed(1, 1, 40, 30, SIZES[5]), 0),
        (5, 3, (10, 40, 35, 25), polygon(10, 40, 35, 25), 0),
        (5, 3, (0, 0, 50, 20), runs(0, 0, 50, 20, SIZES[5]), 1),
    ]
    return {
        "images": [
            {"id": id, "file_name": f"{id:04}.png", "width": width, "height": height}
            for id, (width, height) in SIZES.items()
        ],
        "annotations": [
            {
                "id": number,  # from 0: pycocotools takes that for "not found"
                "image_id": image,
                "category_id": category,
                "bbox": list(map(float, box)),
                "area": float(box[2] * box[3]),
                "segmentation": shape,
                "iscrowd": crowd,
            }
            for number, (image, category, box, shape, crowd) in enumerate(shapes)
        ],
        "categories": [dict(category) for category in CATEGORIES],
    }


def write_split(root: Path, split: str, change: Callable[[Content], Any] | None = None) -> Path:
    """A split in COCO's layout; `change` may spoil it first. Returns the JSON's path."""
    folder = root / split
    folder.mkdir(parents=True, exist_ok=True)
    for id, (width, height) in SIZES.items():
        pixels = np.random.default_rng(id).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{id:04}.png")
    made = content()
    if change:
        change(made)
    path = root / "annotations" / f"instances_{split}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(made))
    return path


def write_scenes(root: Path) -> Path:
    for split in ("train2017", "val2017"):
        write_split(root, split)
    return root


def read_results(folder: Path) -> Results:
    """What a run wrote, in COCO's results format."""
    return {kind: json.loads((folder / f"{kind}.json").read_text()) for kind in ("boxes", "masks")}


def perfect(
    data: CocoSet, class_names: tuple[str, ...]
) -> tuple[list[Tensor], list[dict[str, Tensor]], list[int]]:
    """Images, what a perfect detector gives for them, and their ids."""
    samples = DetectionSamples(data, class_names)
    images, outputs, ids = [], [], []
    for index in range(len(samples)):
        image, target = samples[0, index]
        images.append(image)
        ids.append(int(target["image_id"]))
        outputs.append(
            {
                "boxes": target["boxes"],
                "labels": target["labels"],
                "scores": torch.linspace(0.9, 0.6, len(target["boxes"])),
                "masks": target["masks"][:, None].float(),
            }
        )
    return images, outputs, ids
