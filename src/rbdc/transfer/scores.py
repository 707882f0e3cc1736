"""Mean average precision by pycocotools, and predictions in COCO's results format.

Boxes and masks are written to separate files. If a file had both, pycocotools would use the area of
the box, not of the mask, to tell small, medium and large masks apart.
"""

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from rbdc.disk import write_text
from rbdc.errors import DataError
from rbdc.transfer.coco import CocoSet, Region, pycocotools, read_annotations, region_of

BOXES, MASKS = "boxes.json", "masks.json"
Kind = Literal["bbox", "segm"]
Entry = dict[str, Any]  # a prediction as COCO writes it
_MASK_THRESHOLD = 0.5  # probability above which a pixel belongs to a mask
_HUNDREDTHS = 2  # decimal places of box coordinates, as in COCO's own files


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """pycocotools' twelve numbers, in its order, as fractions; None if there are no such objects.

    `ap` is the mean over categories and the IoU thresholds 0.50, 0.55, ..., 0.95. Small objects are
    below 32 x 32 pixels, large ones above 96 x 96. `arN` is the recall with N detections per image.
    """

    ap: float | None
    ap50: float | None
    ap75: float | None
    ap_small: float | None
    ap_medium: float | None
    ap_large: float | None
    ar1: float | None
    ar10: float | None
    ar100: float | None
    ar_small: float | None
    ar_medium: float | None
    ar_large: float | None
    by_class: Mapping[str, float | None] = field(default_factory=dict)
    """`ap` of each category; empty unless requested."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DetectionScores:
    """The precision of boxes and of masks."""

    boxes: Precision
    masks: Precision

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        """Return a table in percent for boxes and masks, and for each class if requested."""
        names = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
        lines = [f"{'':6}" + "".join(f"{head:>7}" for head in ("mAP", "50", "75", "S", "M", "L"))]
        for title, scores in (("box", self.boxes), ("mask", self.masks)):
            lines.append(f"{title:6}" + "".join(_percent(getattr(scores, n)) for n in names))
        if self.boxes.by_class:
            wide = max(map(len, self.boxes.by_class))
            lines += ["", f"{'':{wide}}{'box':>7}{'mask':>7}"]
            for name, box in self.boxes.by_class.items():
                mask = self.masks.by_class.get(name)
                lines.append(f"{name:{wide}}{_percent(box)}{_percent(mask)}")
        return "\n".join(lines)


def _percent(value: float | None) -> str:
    return f"{'–' if value is None else f'{100 * value:.1f}':>7}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """Predictions in COCO's results format.

    An entry has image_id, category_id, score, and bbox (left, top, width, height) or segmentation
    (a compressed run-length code).
    """

    boxes: tuple[Entry, ...] = ()
    masks: tuple[Entry, ...] = ()

    def __add__(self, other: "Results") -> "Results":
        return Results(boxes=self.boxes + other.boxes, masks=self.masks + other.masks)

    def write(self, folder: Path) -> None:
        """Write `boxes.json` and `masks.json`, which pycocotools' loadRes can read."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, entries in ((BOXES, self.boxes), (MASKS, self.masks)):
            write_text(folder / name, json.dumps(entries))


def read_results(folder: Path) -> Results:
    """Read `boxes.json` and `masks.json` in COCO's results format."""
    return Results(boxes=_entries(folder / BOXES, "bbox"), masks=_entries(folder / MASKS, "segm"))


def _entries(path: Path, kind: Kind) -> tuple[Entry, ...]:
    remedy = "COCO's results are a list of objects with image_id, category_id, score and "
    remedy += "bbox." if kind == "bbox" else "segmentation."
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as results: {error}", remedy) from None
    keys = {"image_id", "category_id", "score", "bbox" if kind == "bbox" else "segmentation"}
    if not isinstance(content, list) or not all(
        isinstance(entry, dict) and keys <= entry.keys() for entry in content
    ):
        raise DataError(f"{path} is not in COCO's results format", remedy)
    return tuple(content)


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
    boxes: list[Entry] = []
    masks: list[Entry] = []
    for output, image in zip(outputs, image_ids, strict=True):
        shapes = (output["masks"][:, 0] > _MASK_THRESHOLD).cpu().numpy().astype(np.uint8)
        corners, labels, scores = (output[key].tolist() for key in ("boxes", "labels", "scores"))
        for (x1, y1, x2, y2), label, score, shape in zip(
            corners, labels, scores, shapes, strict=True
        ):
            if label not in category:
                continue
            entry = {"image_id": int(image), "category_id": category[label], "score": score}
            box = [round(side, _HUNDREDTHS) for side in (x1, y1, x2 - x1, y2 - y1)]
            code = encode(np.asfortranarray(shape))
            boxes.append(entry | {"bbox": box})
            masks.append(
                entry | {"segmentation": {"size": code["size"], "counts": code["counts"].decode()}}
            )
    return Results(boxes=tuple(boxes), masks=tuple(masks))


def score(annotations: Path, results: Results, *, by_class: bool = False) -> DetectionScores:
    """Evaluate `results` with pycocotools on all images of the JSON file.

    Objects that `read_coco` drops are not counted.
    """
    truth = _truth(annotations)
    return DetectionScores(
        boxes=_precision(truth, results.boxes, "bbox", by_class),
        masks=_precision(truth, results.masks, "segm", by_class),
    )


def _precision(truth: Any, entries: Iterable[Entry], kind: Kind, by_class: bool) -> Precision:
    entries = [dict(entry) for entry in entries]  # pycocotools changes them
    with redirect_stdout(io.StringIO()):  # pycocotools prints its progress
        evaluation = pycocotools("cocoeval").COCOeval(truth, _detections(truth, entries), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    names = [entry.name for entry in fields(Precision) if entry.name != "by_class"]
    numbers = dict(zip(names, map(_known, evaluation.stats), strict=True))
    return Precision(**numbers, by_class=_by_class(truth, evaluation) if by_class else {})


def _by_class(truth: Any, evaluation: Any) -> dict[str, float | None]:
    precision = evaluation.eval["precision"]  # thresholds, recalls, categories, areas, detections
    values = {}
    for number, category in enumerate(truth.loadCats(evaluation.params.catIds)):
        known = precision[:, :, number, 0, -1]
        known = known[known > -1]
        name = str(category.get("name", category["id"]))
        values[name] = float(known.mean()) if known.size else None
    return values


def _known(value: float) -> float | None:
    return (
        None if value < 0 else float(value)
    )  # pycocotools returns -1 if there are no such objects


def _detections(truth: Any, entries: list[Entry]) -> Any:
    if entries:
        known = set(truth.getImgIds())
        unknown = [entry["image_id"] for entry in entries if entry["image_id"] not in known]
        if unknown:
            raise DataError(
                f"the results are for image {unknown[0]}, which the annotations do not list",
                "Score them against the annotations they were made for.",
            )
        return truth.loadRes(entries)
    return _coco({**truth.dataset, "annotations": []})  # loadRes fails on an empty list


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
    with redirect_stdout(io.StringIO()):
        truth = pycocotools("coco").COCO()
        truth.dataset = content
        truth.createIndex()
    return truth
