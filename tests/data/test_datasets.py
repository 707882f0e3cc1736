"""A Dataset of the user's own as data."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

import rbdc
from rbdc.errors import DataError
from tests.support import QUICK, TINY

GENERATOR = np.random.default_rng(0)
IMAGES = GENERATOR.integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)


class Pictures(Dataset[Any]):
    """Images with labels, and how often each was read."""

    def __init__(self, kind: str = "pil", *, listed: bool = False) -> None:
        self.kind, self.classes, self.read = kind, ["even", "odd"], 0
        if listed:
            self.targets = [index % 2 for index in range(20)]

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        image: Any = IMAGES[index]
        if self.kind == "pil":
            image = Image.fromarray(image)
        elif self.kind == "tensor":
            image = torch.from_numpy(image).permute(2, 0, 1)
        elif self.kind == "float":
            image = torch.from_numpy(image).permute(2, 0, 1) / 255
        elif self.kind == "random":
            image = Image.fromarray(GENERATOR.permutation(image))
        elif self.kind == "unlabelled":
            return image
        return image, "odd" if self.kind == "names" else index % 2


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


def test_all_kinds_of_images_are_the_same_data() -> None:
    first, *others = [
        rbdc.open_data((Pictures(kind), Pictures(kind))) for kind in ("pil", "array", "tensor")
    ]
    assert first.class_names == ("even", "odd") and len(first.train) == 20
    assert [other.fingerprint for other in others] == [first.fingerprint] * 2
    assert np.array_equal(np.asarray(first.train.read(3)), IMAGES[3])
    listed = rbdc.open_data((Pictures(listed=True), Subset(Pictures(listed=True), [4, 7])))
    assert list(listed.train.labels) == list(first.train.labels)
    assert list(listed.test.labels) == [0, 1]


def test_of_one_dataset_a_tenth_is_held_out() -> None:
    data = rbdc.open_data(Pictures())
    assert (len(data.train), len(data.test)) == (18, 2)


@dataclass(frozen=True)
class Wrong:
    dataset: Any
    problem: str
    remedy: str


WRONG = {
    "no length": Wrong(Stream(), "Stream has no length", "__len__"),
    "empty": Wrong(Subset(Pictures(), []), "is empty", "__len__"),
    "no labels": Wrong(Pictures("unlabelled"), "item 0 of Pictures is ndarray, expected", "label"),
    "floats": Wrong(Pictures("float"), "is a Tensor of torch.float32", "transform=None"),
    "random": Wrong(Pictures("random"), "another image each time", "transform=None"),
    "names": Wrong(Pictures("names"), "the label of item 0 of Pictures is a str", "label"),
    "tensors": Wrong(TensorDataset(torch.ones(3)), "is 1 values, expected an image", "label"),
}


@pytest.mark.parametrize("case", WRONG)
def test_datasets_that_are_refused(case: str) -> None:
    wrong = WRONG[case]
    with pytest.raises(DataError, match=wrong.problem) as caught:
        rbdc.open_data(wrong.dataset)
    assert wrong.remedy in caught.value.remedy


def test_classes_must_be_the_same() -> None:
    other = Pictures()
    other.classes = ["odd", "even"]
    with pytest.raises(DataError, match="in another order"):
        rbdc.open_data((Pictures(), other))


def test_a_tree_is_trained_on_a_dataset_and_the_same_call_goes_on(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model": "resnet18d", "model_kwargs": TINY["resnet18d"]}
    settings["grow"] = ("width",)
    settings |= {
        "epochs": 1.0,
        "grow": ("width",),
        "batch_size": 4,
        "rounding": "none",
        "machine": QUICK,
    }
    result = rbdc.train(tmp_path / "run", data=(Pictures(), Pictures()), **settings)
    again = rbdc.train(tmp_path / "run", data=(Pictures(), Pictures()), **settings)
    assert again == result and (again.model / "config.json").exists()
    assert "RBDC:" in repr(result) and "<pre" in result._repr_html_()
    with pytest.raises(rbdc.RbdcError, match="fingerprint"):
        rbdc.train(tmp_path / "run", data=Pictures(), **settings)
