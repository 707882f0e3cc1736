"""Mean average precision by pycocotools, and predictions in COCO's results format.

Boxes and masks are written to separate files. If a file had both, pycocotools would use the area of
the box, not of the mask, to tell small, medium and large masks apart.
"""

import io
import json
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from rbdc.disk import write_text
from rbdc.errors import DataError
from rbdc.transfer.coco import CocoSet, Region, pycocotools, read_annotations, region_of

Entry = dict[str, Any]  # a prediction as COCO writes it


Results = dict[str, list[Entry]]
"""Predictions in COCO's results format: "boxes" and "masks". An entry has image_id, category_id,
score, and bbox (left, top, width, height) or segmentation (a compressed run-length code)."""
Scores = dict[str, dict[str, Any]]
"""The precision of "boxes" and of "masks": STATS by name, and "by_class", each category's `ap`.
Values are fractions, or None if there are no such objects."""
KINDS = {"boxes": "bbox", "masks": "segm"}  # pycocotools' names
# pycocotools' twelve numbers, in its order. `ap` is the mean over categories and the IoU thresholds
# 0.50, 0.55, ..., 0.95. Small objects are below 32 x 32 pixels, large ones above 96 x 96. `arN` is
# the recall with N detections per image.
STATS = (
    "ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large",
    "ar1", "ar10", "ar100", "ar_small", "ar_medium", "ar_large",
)  # fmt: skip


def join_results(parts: Sequence[Results]) -> Results:
    """Return the predictions of all parts, in their order."""
    return {kind: [entry for part in parts for entry in part[kind]] for kind in KINDS}


def write_results(results: Results, folder: Path) -> None:
    """Write `boxes.json` and `masks.json`, which pycocotools' loadRes can read."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind, entries in results.items():
        write_text(folder / f"{kind}.json", json.dumps(entries))


def results_of(
    outputs: Sequence[Mapping[str, Tensor]],
    image_ids: Sequence[int],
    data: CocoSet,
    class_names: Sequence[str],
) -> Results:
    """Convert a detector's outputs to COCO's results format with the ids of `data`.

    `class_names` are the names of the labels from 1. Objects of classes that `data` lacks are left
    out.
    """
    category = {label: id for id, label in data.labels(class_names).items()}
    encode = pycocotools("mask").encode
    results = join_results([])
    for output, image in zip(outputs, image_ids, strict=True):
        shapes = (output["masks"][:, 0] > 0.5).cpu().numpy().astype(np.uint8)
        objects = zip(*(output[key].tolist() for key in ("boxes", "labels", "scores")), strict=True)
        for ((x1, y1, x2, y2), label, score), shape in zip(objects, shapes, strict=True):
            if label not in category:
                continue
            entry = {"image_id": int(image), "category_id": category[label], "score": score}
            box = [round(side, 2) for side in (x1, y1, x2 - x1, y2 - y1)]  # as COCO's own files
            code = encode(np.asfortranarray(shape))
            code |= {"counts": code["counts"].decode()}
            results["boxes"].append(entry | {"bbox": box})
            results["masks"].append(entry | {"segmentation": code})
    return results


def score(annotations: Path, results: Results) -> Scores:
    """Evaluate `results` with pycocotools on all images of the JSON file.

    Objects that `read_coco` drops are not counted.
    """
    with redirect_stdout(io.StringIO()):  # pycocotools prints its progress
        truth = _truth(annotations)
        return {kind: _precision(truth, results[kind], name) for kind, name in KINDS.items()}


def _precision(truth: Any, entries: list[Entry], kind: str) -> dict[str, Any]:
    for entry in entries:
        if entry["image_id"] not in truth.imgs:
            raise DataError(
                f"the results are for image {entry['image_id']}, which the annotations do not list",
                "Score them against the annotations they were made for.",
            )
    if entries:
        found = truth.loadRes([dict(entry) for entry in entries])  # it changes them
    else:  # loadRes fails on an empty list
        found = _coco({**truth.dataset, "annotations": []})
    evaluation = pycocotools("cocoeval").COCOeval(truth, found, kind)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    # pycocotools returns -1 if there are no such objects.
    stats = [None if value < 0 else float(value) for value in evaluation.stats]
    classes: dict[str, float | None] = {}
    precision = evaluation.eval["precision"]  # thresholds, recalls, category, area, detections
    for number, category in enumerate(truth.loadCats(evaluation.params.catIds)):
        known = precision[:, :, number, 0, -1]
        known = known[known > -1]
        name = str(category.get("name", category["id"]))
        classes[name] = float(known.mean()) if known.size else None
    return dict(zip(STATS, stats, strict=True)) | {"by_class": classes}


def _truth(annotations: Path) -> Any:
    """Return the annotations as a COCO object of pycocotools.

    Objects that `read_coco` drops are removed, and fields that some files lack are added.
    """
    content = read_annotations(annotations)
    sizes = {image["id"]: (image["height"], image["width"]) for image in content["images"]}
    kept = [
        entry
        for entry in content["annotations"]
        if isinstance(region_of(entry, *sizes[entry["image_id"]]), Region)
    ]
    for number, entry in enumerate(kept, start=1):
        entry["id"] = number  # pycocotools would treat an id of 0 as unmatched
        entry.setdefault("iscrowd", 0)
        entry.setdefault("area", entry["bbox"][2] * entry["bbox"][3])
    return _coco({**content, "annotations": kept})


def _coco(content: Mapping[str, Any]) -> Any:
    truth = pycocotools("coco").COCO()
    truth.dataset = content
    truth.createIndex()
    return truth
