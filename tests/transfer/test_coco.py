"""COCO's format: what is read from it, and what is refused."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rbdc.errors import DataError
from rbdc.transfer.coco import NO_AREA, NO_SHAPE, OUTSIDE, CocoSet, masks_of, open_splits, read_coco
from tests.transfer.scenes import (
    SIZES,
    Content,
    compressed,
    polygon,
    runs,
    write_scenes,
    write_split,
)


def read(root: Path, change: Callable[[Content], Any] | None = None) -> CocoSet:
    return read_coco(write_split(root, "train", change), root / "train")


def test_cocos_layout_is_opened(tmp_path: Path) -> None:
    train, val = open_splits(write_scenes(tmp_path))
    assert train.annotations.name == "instances_train2017.json"
    assert val.pictures[0].location.path.parent == tmp_path / "val2017"
    assert {picture.id: len(picture.regions) for picture in train.pictures} == {11: 2, 5: 3, 8: 0}
    facts = train.to_json()
    assert (facts["images"], facts["objects"], facts["crowds"]) == (3, 4, 1)
    assert facts["without_objects"] == 1 and facts["dropped"] == {}


def test_labels_have_no_gaps_and_go_by_name(tmp_path: Path) -> None:
    train = read(tmp_path)
    assert train.class_names == ("dog", "kite", "cat")  # in the order of their ids
    assert train.labels(train.class_names) == {3: 1, 7: 2, 90: 3}
    assert train.labels(("cat", "bird")) == {90: 1}


@pytest.mark.parametrize("shape", [runs, compressed])
def test_polygons_and_both_codes_of_a_box_are_the_same_pixels(shape: Any, tmp_path: Path) -> None:
    box = (4, 6, 20, 15)

    def change(content: Content) -> None:
        content["annotations"][1] |= {"bbox": list(box), "segmentation": shape(*box, SIZES[11])}

    first, second = read(tmp_path, change).pictures[0].regions
    assert first.counts == second.counts and list(first.box) == list(second.box) == [4, 6, 24, 21]
    expected = torch.zeros(40, 60, dtype=torch.uint8)
    expected[6:21, 4:24] = 1
    assert torch.equal(masks_of([first, second], 40, 60), expected.expand(2, 40, 60))


def test_a_shape_in_two_parts_is_one_region(tmp_path: Path) -> None:
    parts = [[1.0, 2.0, 3.0, 4.0], *polygon(2, 2, 10, 10), *polygon(30, 20, 5, 5)]
    data = read(tmp_path, lambda c: c["annotations"][0].update(segmentation=parts))
    assert masks_of(data.pictures[0].regions[:1], 40, 60).sum() == 125  # two points are no part


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bbox": [5, 5, 0, 9]}, NO_AREA),
        ({"bbox": [5, 5, 9, -1]}, NO_AREA),
        ({"bbox": [5, 5, float("nan"), 3]}, NO_AREA),
        ({"bbox": [1, 2, 3]}, NO_AREA),
        ({"bbox": None}, NO_AREA),
        ({"bbox": [60, 5, 9, 9]}, OUTSIDE),
        ({"bbox": [-9, 5, 9, 9]}, OUTSIDE),
        ({"segmentation": []}, NO_SHAPE),
        ({"segmentation": None}, NO_SHAPE),
        ({"segmentation": [[1, 2, 3, 4]]}, NO_SHAPE),
        ({"segmentation": [["a"] * 8]}, NO_SHAPE),
        ({"segmentation": {"size": [9, 9], "counts": [81]}}, NO_SHAPE),
        ({"segmentation": compressed(1, 1, 5, 5, (50, 40))}, NO_SHAPE),
        ({"segmentation": {"size": [40, 60], "counts": [7, 7]}}, NO_SHAPE),
        ({"segmentation": {"size": [40, 60], "counts": [40 * 60]}}, NO_SHAPE),
    ],
)
def test_an_object_of_no_use_is_dropped_and_counted(
    change: Content, reason: str, tmp_path: Path
) -> None:
    data = read(tmp_path, lambda content: content["annotations"][0].update(change))
    assert data.dropped == {reason: 1}
    assert data.objects == 3 and len(data.pictures[0].regions) == 1


def test_a_box_that_reaches_out_of_the_image_is_cut(tmp_path: Path) -> None:
    data = read(tmp_path, lambda c: c["annotations"][0].update(bbox=[-5, 30, 100, 50]))
    assert data.pictures[0].regions[0].box == (0.0, 30.0, 60.0, 40.0)
    assert not data.dropped


def without(key: str) -> Callable[[Content], Any]:
    return lambda content: content.pop(key)


def entry(key: str, **change: Any) -> Callable[[Content], Any]:
    return lambda content: content[key][0].update(change)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (without("images"), "is not in COCO's format: it has no images"),
        (without("categories"), "is not in COCO's format: it has no categories"),
        (lambda c: c.update(annotations={}), "annotations is not a list of objects"),
        (lambda c: c.update(images=[1]), "images is not a list of objects"),
        (lambda c: c.update(images=[]), "has no images"),
        (entry("images", id="x"), "id is 'x', a whole number was expected"),
        (entry("images", id=5), "two images with the id 5"),
        (entry("images", width=None), "does not give file_name, height and width of image 11"),
        (entry("images", height=0), "gives image 11 a size of 60 x 0 px"),
        (entry("images", file_name="none.png"), "none.png is missing"),
        (entry("annotations", image_id=4), "an object in image 4, which it does not list"),
        (entry("annotations", category_id=4), "an object of category 4, which it does not list"),
        (entry("categories", name="dog"), "more than one category called dog"),
    ],
)
def test_what_contradicts_itself_is_an_error(
    change: Callable[[Content], Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=problem):
        read(tmp_path, change)


def test_files_that_are_not_cocos_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for text, problem in (("[1", "is not JSON"), ("[1]", "contains no JSON object")):
        path.write_text(text)
        with pytest.raises(DataError, match=problem):
            read_coco(path, tmp_path)
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_coco(tmp_path / "none.json", tmp_path)
    with pytest.raises(DataError, match=r"has 0 files annotations/instances_train\*.json"):
        open_splits(tmp_path)


def test_splits_must_share_a_category_and_both_have_objects(tmp_path: Path) -> None:
    write_split(tmp_path, "train")

    def rename(content: Content) -> None:
        for category in content["categories"]:
            category["name"] += "s"

    write_split(tmp_path, "val", rename)
    with pytest.raises(DataError, match="no category in common: dog, kite, cat against dogs"):
        open_splits(tmp_path)
    for change in (without("annotations"), lambda c: c.update(annotations=[])):
        write_split(tmp_path, "val", change)
        with pytest.raises(DataError, match=r"instances_val.json has no objects\n") as caught:
            open_splits(tmp_path)
        assert "cannot be scored" in caught.value.remedy
    boxes_only: list[Content] = [{"segmentation": []} for _ in range(5)]
    write_split(
        tmp_path,
        "val",
        lambda c: [a.update(b) for a, b in zip(c["annotations"], boxes_only, strict=True)],
    )
    with pytest.raises(DataError, match=r"no objects left \(5 x no usable shape\)"):
        open_splits(tmp_path)


def test_the_fingerprint_knows_content_and_not_places(tmp_path: Path) -> None:
    first = read(tmp_path / "a").fingerprint
    assert read(tmp_path / "b").fingerprint == first
    changes: list[Callable[[Content], Any]] = [
        entry("annotations", bbox=[4, 6, 20, 16]),
        entry("annotations", segmentation=polygon(4, 6, 20, 14)),
        entry("annotations", category_id=90),
        entry("annotations", iscrowd=1),
        entry("categories", name="lion"),
        lambda content: content["images"].reverse(),
    ]
    prints = [read(tmp_path / "c", change).fingerprint for change in changes]
    path = write_split(tmp_path / "d", "train")
    image = tmp_path / "d" / "train" / "0008.png"
    image.write_bytes(image.read_bytes() + b"x")
    prints.append(read_coco(path, image.parent).fingerprint)
    assert len({first, *prints}) == len(changes) + 2


def test_without_pycocotools_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_split(tmp_path, "train")
    monkeypatch.setitem(sys.modules, "pycocotools.mask", None)
    with pytest.raises(DataError) as caught:
        read_coco(path, tmp_path / "train")
    assert "rbdc[transfer]" in caught.value.remedy


def test_ids_may_be_in_any_order_and_a_name_may_be_missing(tmp_path: Path) -> None:
    path = write_split(tmp_path, "train", lambda c: c["categories"][0].pop("name"))
    assert json.loads(path.read_text())["categories"][0] == {"id": 90}
    assert read_coco(path, tmp_path / "train").class_names == ("dog", "kite", "90")
