"""Scores are pycocotools' own, and so are those of anyone who reads the written predictions."""

import contextlib
import io
import json
import math
import tarfile
from pathlib import Path

import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor

from rbdc.errors import DataError
from rbdc.transfer.coco import CocoSet, open_splits, read_coco
from rbdc.transfer.pictures import draw_objects, draw_sheet
from rbdc.transfer.scores import Results, Scores, results_of, score, write_results
from tests.transfer.scenes import Content, perfect, read_results, write_scenes, write_split

ONE = pytest.approx(1, abs=1e-9)  # its means end a rounding below
REAL = Path(__file__).parents[3] / "shared" / "data" / "coco-tiny.tar"


@pytest.fixture(scope="module")
def val(tmp_path_factory: pytest.TempPathFactory) -> CocoSet:
    return open_splits(write_scenes(tmp_path_factory.mktemp("scenes")))[1]


def shuffled(outputs: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """One object in each image is given another class, and masks have holes."""
    changed = []
    for output in outputs:
        labels = output["labels"].clone()
        labels[:1] = labels[:1] % 3 + 1
        masks = output["masks"].clone()
        masks[..., ::2, ::2] = 0
        changed.append(output | {"labels": labels, "masks": masks})
    return changed


def by_pycocotools(
    annotations: Path, results: Path, kind: str, categories: list[int] | None = None
) -> list[float | None]:
    """As anyone would do it, from the files."""
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(annotations))
        evaluation = COCOeval(truth, truth.loadRes(str(results)), kind)
        evaluation.params.catIds = categories or evaluation.params.catIds
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return [None if value < 0 else float(value) for value in evaluation.stats]


def twelve(scores: Scores) -> tuple[list[float | None], list[float | None]]:
    boxes, masks = (
        [value for key, value in scores[kind].items() if key != "by_class"]
        for kind in ("boxes", "masks")
    )
    return boxes, masks


def test_perfect_predictions_score_one(val: CocoSet) -> None:
    _, outputs, ids = perfect(val, val.class_names)
    scores = score(val.annotations, results_of(outputs, ids, val, val.class_names))
    for precision in scores.values():
        for name in ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ar100"):
            assert precision[name] == ONE
        assert precision["ap_large"] is None  # there is nothing so large
        assert precision["by_class"] == {"dog": ONE, "kite": ONE, "cat": ONE}


def test_wrong_labels_score_what_pycocotools_says_of_the_files(tmp_path: Path) -> None:
    def from_one(content: Content) -> None:
        for annotation in content["annotations"]:
            annotation["id"] += 1

    path = write_split(tmp_path, "val", from_one)
    val = read_coco(path, tmp_path / "val")
    _, outputs, ids = perfect(val, val.class_names)
    results = results_of(shuffled(outputs), ids, val, val.class_names)
    write_results(results, tmp_path)
    scores = score(path, results)
    boxes, masks = twelve(scores)
    assert boxes == by_pycocotools(path, tmp_path / "boxes.json", "bbox")
    assert masks == by_pycocotools(path, tmp_path / "masks.json", "segm")
    assert boxes != masks and boxes[0] is not None and 0 < boxes[0] < 1
    for id, name in val.categories.items():
        alone = by_pycocotools(path, tmp_path / "masks.json", "segm", [id])[0]
        assert scores["masks"]["by_class"][name] == pytest.approx(alone)
    assert len(set(scores["boxes"]["by_class"].values())) > 1
    assert not [entry for entry in results["masks"] if "bbox" in entry]  # see rbdc.transfer.scores
    assert read_results(tmp_path) == results
    assert twelve(score(path, read_results(tmp_path))) == (boxes, masks)


def test_no_predictions_score_zero(val: CocoSet) -> None:
    scores = score(val.annotations, {"boxes": [], "masks": []})
    assert scores["boxes"]["ap"] == scores["masks"]["ap"] == 0
    assert scores["boxes"]["by_class"] == {"dog": 0, "kite": 0, "cat": 0}


def test_detections_in_a_crowd_do_not_count_against(val: CocoSet) -> None:
    _, outputs, ids = perfect(val, val.class_names)
    crowd = {
        "boxes": torch.tensor([[20.0, 2, 30, 12]]),
        "labels": torch.tensor([1]),
        "scores": torch.tensor([0.99]),
        "masks": torch.zeros(1, 1, 70, 50),
    }
    crowd["masks"][:, :, 2:12, 20:30] = 1
    outputs[1] = {key: torch.cat([crowd[key], outputs[1][key]]) for key in crowd}
    results = results_of(outputs, ids, val, val.class_names)
    assert len(results["boxes"]) == 5
    assert score(val.annotations, results)["boxes"]["ap"] == ONE
    elsewhere = [entry | {"image_id": 8} for entry in results["boxes"]]
    more: Results = {"boxes": [*results["boxes"], *elsewhere], "masks": []}
    assert score(val.annotations, more)["boxes"]["ap"] != ONE


def test_results_have_the_ids_of_the_file_and_classes_it_has_not_are_left_out(
    val: CocoSet,
) -> None:
    _, outputs, ids = perfect(val, ("bird", "cat", "dog"))
    outputs[0] = {key: torch.cat([value, value]) for key, value in outputs[0].items()}
    outputs[0]["labels"] = torch.tensor([1, 2, 3, 1])  # bird is in no file
    results = results_of(outputs, ids, val, ("bird", "cat", "dog"))
    found = [(entry["image_id"], entry["category_id"]) for entry in results["boxes"]]
    assert found == [(11, 90), (11, 3), (5, 3)]
    assert len(results["masks"]) == 3 and json.dumps(results["masks"])


def test_dropped_objects_are_not_scored(tmp_path: Path) -> None:
    def spoil(content: Content) -> None:
        content["annotations"][0]["bbox"][2] = 0
        del content["annotations"][1]["area"], content["annotations"][1]["iscrowd"]

    path = write_split(tmp_path, "val", spoil)
    val = read_coco(path, tmp_path / "val")
    _, outputs, ids = perfect(val, val.class_names)
    assert sum(val.dropped.values()) == 1
    scores = score(path, results_of(outputs, ids, val, val.class_names))
    assert scores["boxes"]["ap"] == ONE and scores["masks"]["ap"] == ONE


def test_results_for_other_images_are_refused(val: CocoSet) -> None:
    stray = {"image_id": 99, "category_id": 3, "score": 1.0, "bbox": [0, 0, 1, 1]}
    with pytest.raises(DataError, match="for image 99, which the annotations do not list"):
        score(val.annotations, {"boxes": [stray], "masks": []})


def test_a_sheet_shows_objects_where_they_are(val: CocoSet, tmp_path: Path) -> None:
    images, outputs, _ = perfect(val, val.class_names)
    drawn = draw_objects(images[0], outputs[0])
    before = (images[0] * 255).round().to(torch.uint8)
    changed = (drawn != before).any(dim=0)
    inside = (outputs[0]["masks"][:, 0] > 0).any(dim=0)
    assert changed[inside].float().mean() > 0.95  # a pixel may have the colour already
    border = torch.nn.functional.max_pool2d(inside[None, None].float(), 5, 1, 2)[0, 0] > 0
    assert not changed[~border].any()
    nothing = {key: value[:0] for key, value in outputs[0].items()}
    assert torch.equal(draw_objects(images[0], nothing), before)
    for kind in ("png", "svg"):
        path = tmp_path / f"sheet.{kind}"
        draw_sheet(images, outputs, val.class_names, path, titles=["a", "$b", "c"], columns=2)
        assert path.stat().st_size > 1000
    text = path.read_text()
    assert all(f"<!-- {name} -->" in text for name in ("dog 90", "cat 60", "kite 90", "dog 60"))
    draw_sheet(images, outputs, val.class_names, path, least_score=0.95)
    assert path.read_text().count("<!-- ") < text.count("<!-- ")
    assert "<!-- dog 90 -->" in path.read_text()  # the best of each, if none is good
    with pytest.raises(DataError, match="no image"):
        draw_sheet([], [], val.class_names, path)


@pytest.mark.skipif(not REAL.exists(), reason="real COCO images are not at hand")
def test_coco_itself_is_read_and_found(tmp_path: Path) -> None:
    with tarfile.open(REAL) as archive:
        archive.extractall(tmp_path, filter="data")
    train, val = open_splits(tmp_path / "coco-tiny")
    assert len(train.class_names) == 80 and not train.dropped
    _, outputs, ids = perfect(val, train.class_names)
    scores = score(val.annotations, results_of(outputs, ids, val, train.class_names))
    assert scores["boxes"]["ap"] == ONE and scores["masks"]["ap"] == ONE
    assert not any(value is None or math.isnan(value) for value in twelve(scores)[0])
