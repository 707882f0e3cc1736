"""A data set by name or path: found, read, known by its content, refused with its fault named."""

import gzip
import os
import pickle
import shutil
import socket
from collections.abc import Callable
from hashlib import md5
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from rbdc.data import DataSet, ImageSet, open_data, small
from rbdc.data.sources import read_rgb
from rbdc.errors import DataError
from tests.data.pictures import (
    CLASSES,
    damaged,
    encoded,
    idx,
    make_folder,
    make_idx,
    make_shards,
    make_table,
    pixels,
    shard,
    write,
    write_tar,
)

Maker = Callable[[Path], Path]


MAKERS: dict[str, Maker] = {
    "folder": make_folder,
    "shards": make_shards,
    "table": make_table,
    "idx": make_idx,
}


def pixels_of(data: DataSet) -> list[np.ndarray]:
    return [
        np.asarray(read_rgb(source, i))
        for source in (data.train, data.test)
        for i in range(len(source))
    ]


# What is found


def test_the_default_is_embedded() -> None:
    data = open_data("embedded")
    assert (len(data.train), len(data.test), len(data.class_names)) == (10_000, 2_000, 10)
    assert data.in_memory
    assert data.fingerprint == open_data("embedded").fingerprint
    assert data.to_json()["train_images"] == 10_000


@pytest.mark.parametrize("layout", ["folder", "shards", "table"])
def test_every_layout_gives_the_same_pictures(layout: str, tmp_path: Path) -> None:
    data = open_data(str(MAKERS[layout](tmp_path / "set")))
    assert data.class_names == CLASSES
    assert data.name == "set"
    assert not data.in_memory
    order = [0, 3, 1, 4, 2, 5] if layout == "folder" else range(6)  # folders stand class by class
    assert list(data.train.labels) == [i % 3 for i in order]
    assert list(data.test.labels) == [0, 1, 2]
    for found, seed in zip(pixels_of(data), [*order, 100, 101, 102], strict=True):
        assert np.array_equal(found, pixels(seed))


@pytest.mark.parametrize("layout", ["folder", "shards", "table"])
def test_in_memory_means_the_same_pictures_decoded_once(layout: str, tmp_path: Path) -> None:
    root = str(MAKERS[layout](tmp_path / "set"))
    files, memory = open_data(root), open_data(root, in_memory=True)
    assert isinstance(memory.train, ImageSet)
    assert memory.in_memory
    assert memory.train.images.shape == (6, 3, 12, 12)
    assert list(memory.train.labels) == list(files.train.labels)
    for one, other in zip(pixels_of(files), pixels_of(memory), strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("below", [".", "FashionMNIST/raw", "raw"])
def test_fashion_mnist_is_read_from_idx_files(zipped: bool, below: str, tmp_path: Path) -> None:
    make_idx(tmp_path / below, zipped=zipped)
    for data in (open_data(str(tmp_path)), open_data("fashion-mnist", folder=tmp_path)):
        assert isinstance(data.train, ImageSet)
        assert data.train.images.shape == (6, 1, 12, 12)
        assert data.train.labels.tolist() == [0, 1, 2, 3, 4, 5]
        assert np.array_equal(data.test.read(1), pixels(101)[:, :, 0])  # type: ignore[arg-type]
        assert data.class_names[9] == "Ankle boot"


@pytest.mark.skipif(not small.DEBIAN.exists(), reason="Debian's dataset-fashion-mnist is not here")
def test_fashion_mnist_is_found_where_debian_puts_it(tmp_path: Path) -> None:
    data = open_data("fashion-mnist", folder=tmp_path)
    assert (len(data.train), len(data.test)) == (60_000, 10_000)


@pytest.mark.parametrize("classes", [10, 100])
def test_cifar_is_read_in_torchvisions_layout(
    classes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision import datasets

    source = {10: datasets.CIFAR10, 100: datasets.CIFAR100}[classes]
    images = np.random.default_rng(0).integers(0, 256, (6, 3, 32, 32), dtype=np.uint8)
    key = "labels" if classes == 10 else "fine_labels"
    names = [f"class {i}" for i in range(classes)]
    for attribute, content in (
        ("train_list", {"data": images[:4].reshape(4, -1), key: [3, 1, 2, 0]}),
        ("test_list", {"data": images[4:].reshape(2, -1), key: [classes - 1, 0]}),
        ("meta", {"label_names" if classes == 10 else "fine_label_names": names}),
    ):
        raw = pickle.dumps(content)
        write(tmp_path / source.base_folder / attribute, raw)
        digest = md5(raw, usedforsecurity=False).hexdigest()
        known = {"filename": attribute, "key": next(iter(content)), "md5": digest}
        monkeypatch.setattr(
            source, attribute, known if attribute == "meta" else [[attribute, digest]]
        )
    for data in (open_data(str(tmp_path)), open_data(f"cifar{classes}", folder=tmp_path)):
        assert isinstance(data.train, ImageSet)
        assert isinstance(data.test, ImageSet)
        assert torch.equal(data.train.images, torch.from_numpy(images[:4]))
        assert data.train.labels.tolist() == [3, 1, 2, 0]
        assert data.test.labels.tolist() == [classes - 1, 0]
        assert data.class_names == tuple(names)


class _Canary:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["by path", "cifar10"])
def test_a_pickle_that_is_not_cifars_is_never_opened(name: str, tmp_path: Path) -> None:
    canary, raw = tmp_path / "canary", pickle.dumps(_Canary(tmp_path / "canary"))
    for i in range(1, 6):
        write(tmp_path / f"cifar-10-batches-py/data_batch_{i}", raw)
    for other in ("test_batch", "batches.meta"):
        write(tmp_path / "cifar-10-batches-py" / other, raw)
    with pytest.raises(DataError, match=r"CIFAR-10 cannot be read in .*not found or corrupted"):
        open_data(str(tmp_path) if name == "by path" else name, folder=tmp_path)
    assert not canary.exists()
    pickle.loads(raw)
    assert canary.exists()  # it would have sung


def test_image_folders_in_other_words(tmp_path: Path) -> None:
    make_folder(tmp_path, test_name="test")
    (tmp_path / "train/ant/000.png").rename(tmp_path / "train/ant/000.PNG")
    (tmp_path / "train/ant/003.png").rename(write(tmp_path / "train/ant/deep/er/x.png", b""))
    for rest in ("train/.ipynb_checkpoints/1.png", "train/bee/._1.png", "train/bee/.x/1.png"):
        write(tmp_path / rest, b"not an image")
    write(tmp_path / "train/bee/notes.txt", b"not an image")
    data = open_data(str(tmp_path))
    assert data.class_names == CLASSES
    assert [Path(data.train.name(i)).name for i in range(6)] == [
        *("000.PNG", "x.png", "001.png", "004.png", "002.png", "005.png")
    ]


def test_the_validation_split_goes_before_the_test_split(tmp_path: Path) -> None:
    make_folder(tmp_path / "folder", test=3)
    make_folder(tmp_path / "folder", test=6, test_name="test")
    assert len(open_data(str(tmp_path / "folder")).test) == 3
    make_shards(tmp_path / "shards")
    write_tar(tmp_path / "shards/test-0.tar", shard(0, 6))
    assert len(open_data(str(tmp_path / "shards")).test) == 3


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train-0.tar", "val-0.tar"),
        ("training.tar", "validation.tar"),
        ("train/0.tar", "test/0.tar"),
        ("training/0.tar", "valid/0.tar"),
    ],
)
@pytest.mark.parametrize("label", ["cls", "json"])
@pytest.mark.parametrize("prefix", ["", "./", "a/v1.5/"])
def test_shards_are_found_once_whatever_they_are_called(
    train: str, test: str, label: str, prefix: str, tmp_path: Path
) -> None:
    write_tar(tmp_path / train, shard(0, 4, label=label, prefix=prefix))
    write_tar(tmp_path / test, shard(100, 3, label=label, prefix=prefix))
    data = open_data(str(tmp_path))
    assert (list(data.train.labels), list(data.test.labels)) == ([0, 1, 2, 0], [0, 1, 2])
    assert data.class_names == ("0", "1", "2")
    assert np.array_equal(np.asarray(data.train.read(3)), pixels(3))
    assert data.train.name(3) == f"{tmp_path / train}:{prefix}003.png"


def test_what_else_a_shard_may_hold(tmp_path: Path) -> None:
    make_shards(tmp_path)
    members = shard(0, 3) | {
        "000.json": b'{"url": "no label here"}',
        "001.json": b'{"label": 77}',
        "000.seg.png": b"another picture",
        "README": b"?",
    }
    write_tar(tmp_path / "train-0000.tar", members)
    write(tmp_path / "classes.txt", b"ant\nbee\ncow\ndog\n\n")
    data = open_data(str(tmp_path))
    assert list(data.train.labels) == [0, 1, 2]  # .cls goes before .json
    assert data.class_names == (*CLASSES, "dog")  # a class may have no pictures


def test_a_saved_table_may_give_tensors_and_need_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_table(tmp_path / "set", format="torch", splits={"test": "validation"})
    _without_network(monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (str(tmp_path / "set"), f"hf:{tmp_path / 'set'}", "~/set"):
        data = open_data(name)
        assert np.array_equal(np.asarray(data.test.read(2)), pixels(102))
        assert data.train.name(4) == f"{tmp_path / 'set'} train row 4"


def _without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_data_of_the_hub_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    saved = str(MAKERS["table"](tmp_path / "set"))
    monkeypatch.setattr(datasets, "load_dataset", lambda _name: datasets.load_from_disk(saved))
    assert open_data("hf:some-one/set").name == "hf:some-one/set"


def test_nothing_is_fetched_unless_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    _without_network(monkeypatch)
    monkeypatch.setattr(small, "DEBIAN", tmp_path / "nowhere")
    with pytest.raises(DataError, match="nobody/nothing cannot be opened") as error:
        open_data("hf:nobody/nothing")
    assert "--data-download" in error.value.remedy
    assert "network was used" not in error.value.problem
    for name in ("fashion-mnist", "cifar10", "cifar100"):
        with pytest.raises(DataError, match=r"is not in|cannot be read") as error:
            open_data(name, folder=tmp_path)
        assert "--data-download" in error.value.remedy


@pytest.mark.parametrize("name", ["fashion-mnist", "cifar10"])
def test_a_download_that_fails_is_two_lines(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision import datasets

    nobody = "http://127.0.0.1:9/"  # the discard port: nothing listens
    monkeypatch.setattr(small, "DEBIAN", tmp_path / "nowhere")
    monkeypatch.setattr(datasets.FashionMNIST, "mirrors", [nobody])
    monkeypatch.setattr(datasets.CIFAR10, "url", nobody)
    with pytest.raises(DataError, match=r"cannot be (downloaded|read)"):
        open_data(name, folder=tmp_path, download=True)


def test_sixteen_bits_are_not_made_white(tmp_path: Path) -> None:
    deep = np.arange(144, dtype=np.uint16).reshape(12, 12) * 455
    for split in ("train", "val"):
        (tmp_path / split / "ant").mkdir(parents=True)
        Image.fromarray(deep).save(tmp_path / split / "ant/1.png")
    image = np.asarray(read_rgb(open_data(str(tmp_path)).train, 0))
    assert np.array_equal(image[:, :, 0], deep // 256)


# What it is known by


def fingerprint(root: Path, **options: Any) -> str:
    return open_data(str(root), **options).fingerprint


@pytest.mark.parametrize("layout", [*MAKERS])
def test_the_fingerprint_does_not_know_place_or_time(layout: str, tmp_path: Path) -> None:
    first = MAKERS[layout](tmp_path / "one")
    other = tmp_path / "elsewhere" / "two"
    shutil.copytree(first, other)
    for path in other.rglob("*"):
        os.utime(path, (1e9, 1e9))
    assert fingerprint(first) == fingerprint(other)
    assert fingerprint(first, in_memory=True) == fingerprint(other, in_memory=True)


def _same_size(root: Path) -> None:
    path = root / "train/bee/001.ppm"
    write(path, path.read_bytes()[:-1] + b"\x07")


def _other_label(root: Path) -> None:
    (root / "train/ant/000.ppm").rename(root / "train/bee/000.ppm")


def _other_split(root: Path) -> None:
    (root / "train/ant/000.ppm").rename(root / "val/ant/zzz.ppm")


def _other_class_name(root: Path) -> None:
    for split in ("train", "val"):
        (root / split / "cow").rename(root / split / "cox")


def _another_class(root: Path) -> None:
    (root / "train/dog").mkdir()


@pytest.mark.parametrize(
    "change", [_same_size, _other_label, _other_split, _other_class_name, _another_class]
)
def test_the_fingerprint_of_a_folder_knows_what_changes(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    root = make_folder(tmp_path / "set", kind="ppm")
    before, in_memory = fingerprint(root), fingerprint(root, in_memory=True)
    change(root)
    assert fingerprint(root) != before
    assert fingerprint(root, in_memory=True) != in_memory


def test_the_fingerprint_of_shards_knows_what_changes(tmp_path: Path) -> None:
    members = shard(0, 6)
    variants = {
        "the same": members,
        "pixels": members | {"001.png": encoded(77)},
        "label": members | {"001.cls": b"2"},
        "name": {name.replace("001.", "00x."): value for name, value in members.items()},
    }
    found = {}
    for number, (what, content) in enumerate(variants.items()):
        root = make_shards(tmp_path / f"{number}")
        write_tar(root / "train-0000.tar", content)
        found[what] = fingerprint(root)
    write(root / "classes.txt", b"ant\nbee\ncat")
    found["class name"] = fingerprint(root)
    assert len(set(found.values())) == len(found)
    assert found["the same"] == fingerprint(make_shards(tmp_path / "again"))


def test_the_fingerprint_of_shards_knows_the_split(tmp_path: Path) -> None:
    for root, second in (("a", "train"), ("b", "val")):
        write_tar(tmp_path / root / "train/0.tar", shard(0, 3))
        write_tar(tmp_path / root / second / "1.tar", shard(10, 3))
        write_tar(tmp_path / root / "val/2.tar", shard(20, 3))
    assert fingerprint(tmp_path / "a") != fingerprint(tmp_path / "b")


def test_the_fingerprint_of_a_table_knows_what_changes(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"label": 2},
        {"image": {"bytes": encoded(77), "path": None}},
        {"names": ("ant", "bee", "cat"), "test_names": ("ant", "bee", "cat")},
        {"train": 7},
    ]
    found = [
        fingerprint(make_table(tmp_path / f"{i}", **change)) for i, change in enumerate(changes)
    ]
    assert len(set(found)) == len(changes)


def test_the_fingerprint_of_idx_files_knows_what_changes(tmp_path: Path) -> None:
    before = fingerprint(make_idx(tmp_path))
    for name, size in (("t10k-images-idx3-ubyte", 1), ("train-labels-idx1-ubyte", 1)):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-size] + b"\x09" * size)
        assert fingerprint(tmp_path) != before
        before = fingerprint(tmp_path)


# What cannot be decoded

BAD = {
    "truncated.jpg": encoded(5, "jpg", (48, 48))[:-300],
    "text.jpg": b"<html>404</html>",
    "empty.jpg": b"",
    "one-byte.png": b"\x89",
    "cut.png": encoded(5, "png", (48, 48))[:-200],
    "text.webp": b"RIFF????",
}


def test_pictures_that_cannot_be_decoded_are_named_before_training(tmp_path: Path) -> None:
    for bad, content in BAD.items():
        root = make_folder(tmp_path / bad)
        path = write(root / "train/bee" / bad, content)
        with pytest.raises(DataError) as error:
            open_data(str(root))
        assert error.value.problem == f"1 image cannot be decoded: {path}"
        assert "--skip-bad" in error.value.remedy


def test_pictures_that_cannot_be_decoded_are_left_out_and_listed(tmp_path: Path) -> None:
    good = make_folder(tmp_path / "good")
    root = make_folder(tmp_path / "bad")
    paths = [write(root / "train/bee" / name, content) for name, content in BAD.items()]
    paths.append(write(root / "val/cow/gone.png", b""))
    paths[-1].unlink()
    paths[-1].symlink_to("nowhere")
    with pytest.raises(DataError, match=r"7 images cannot .*, .*, .* and 4 more"):
        open_data(str(root))
    data = open_data(str(root), skip_bad=True)
    assert sorted(data.skipped) == sorted(map(str, paths))
    assert data.to_json()["skipped"] == list(data.skipped)
    assert data.skip_bad
    for one, other in zip(pixels_of(data), pixels_of(open_data(str(good))), strict=True):
        assert np.array_equal(one, other)
    root.rename(tmp_path / "moved")
    assert open_data(str(tmp_path / "moved"), skip_bad=True).fingerprint == data.fingerprint
    assert data.fingerprint != open_data(str(good), skip_bad=True).fingerprint
    assert open_data(str(good), skip_bad=True).fingerprint == open_data(str(good)).fingerprint


def test_the_fingerprint_knows_what_was_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_folder(tmp_path)
    for size in (40, 60):
        write(root / f"train/bee/{size}.webp", encoded(1, "webp", (size, size)))
    found = []
    for limit in (3600, 1600, 700):  # PIL refuses what has more than twice as many pixels
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        found.append(open_data(str(root), skip_bad=True))
    assert [len(data.train) for data in found] == [8, 7, 6]
    assert len({data.fingerprint for data in found}) == 3


def test_members_of_shards_that_cannot_be_decoded_are_named_and_left_out(tmp_path: Path) -> None:
    root = make_shards(tmp_path)
    write_tar(root / "train-0000.tar", shard(0, 6) | {"004.png": encoded(4)[:-100]})
    with pytest.raises(DataError, match=r"1 image cannot be decoded: .*train-0000.tar:004.png"):
        open_data(str(root))
    data = open_data(str(root), skip_bad=True)
    assert data.skipped == (f"{root / 'train-0000.tar'}:004.png",)
    assert list(data.train.labels) == [0, 1, 2, 0, 2]
    assert np.array_equal(np.asarray(data.train.read(4)), pixels(5))


@pytest.mark.parametrize("kind", ["jpg", "png"])
def test_hidden_damage_is_met_when_pictures_are_read_into_memory(kind: str, tmp_path: Path) -> None:
    root = make_folder(tmp_path)
    path = write(root / f"train/bee/002.{kind}", damaged(kind))
    assert len(open_data(str(root)).train) == 7  # a quick look does not see it
    with pytest.raises(DataError) as error:
        open_data(str(root), in_memory=True)
    assert error.value.problem == f"1 image cannot be decoded: {path}"
    data = open_data(str(root), in_memory=True, skip_bad=True)
    assert data.skipped == (str(path),)
    assert len(data.train) == 6


def test_a_row_without_a_picture_is_named(tmp_path: Path) -> None:
    root = make_table(tmp_path / "set", image={"bytes": b"nonsense", "path": None})
    with pytest.raises(DataError, match=r"/set train row 2\n"):
        open_data(str(root), in_memory=True)
    other = make_table(tmp_path / "other", image=None)
    with pytest.raises(DataError, match=r"/other train row 2\n"):
        open_data(str(other), in_memory=True)
    data = open_data(str(other), in_memory=True, skip_bad=True)
    assert list(data.train.labels) == [0, 1, 0, 1, 2]


def test_a_split_of_which_nothing_is_left_is_refused(tmp_path: Path) -> None:
    root = make_folder(tmp_path, test=1)
    write(root / "val/ant/000.png", b"")
    with pytest.raises(DataError, match="has no test images"):
        open_data(str(root), skip_bad=True)


# What is refused


def refused(name: str | Path, **options: Any) -> DataError:
    with pytest.raises(DataError) as error:
        open_data(str(name), **options)
    assert str(error.value).count("\n") == 1, "two lines"
    return error.value


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    assert "Did you mean cifar10" in refused("cifar-10").remedy
    assert "Known are embedded, fashion-mnist" in refused("/no/such/place").remedy


def test_folders_that_hold_no_data_set(tmp_path: Path) -> None:
    assert "contains no data set" in refused(tmp_path).problem
    (tmp_path / "train/ant").mkdir(parents=True)
    assert "Expected train/CLASS" in refused(tmp_path).remedy  # no test split
    (tmp_path / "val/ant").mkdir(parents=True)
    assert "has no training images" in refused(tmp_path).problem
    write(tmp_path / "train/ant/1.png", encoded(1))
    assert "has no test images" in refused(tmp_path).problem


def test_a_class_of_the_test_split_must_be_known(tmp_path: Path) -> None:
    root = make_folder(tmp_path)
    write(root / "val/dog/1.png", encoded(1))
    assert refused(root).problem == f"{root / 'val/dog'} is a class that {root / 'train'} lacks"


@pytest.mark.parametrize(
    ("member", "content", "problem"),
    [
        ("001.cls", None, "001.png has no label"),
        ("001.cls", b"-1", "001.png .*has label -1, and there are 3 classes"),
        ("001.cls", b"bee", "001.cls holds no label: b'bee'"),
        ("001.cls", b"", "001.cls holds no label"),
        ("001.json", b"{", "001.json holds no label"),
        ("001.json", b"[1]", "001.json holds no label"),
        ("001.json", b'{"label": 1.5}', "001.json holds no label"),
        ("001.json", b'{"label": null}', "001.png has no label"),
        ("001.cls", b"3", "classes.txt names 3 classes, but label 3 occurs"),
    ],
)
def test_shards_with_wrong_labels(
    member: str, content: bytes | None, problem: str, tmp_path: Path
) -> None:
    root = make_shards(tmp_path)
    members = {name: value for name, value in shard(0, 3).items() if name != "001.cls"}
    write_tar(root / "train-0000.tar", members | ({} if content is None else {member: content}))
    with pytest.raises(DataError, match=problem):
        open_data(str(root))


def test_shards_that_are_no_tar_files(tmp_path: Path) -> None:
    root = make_shards(tmp_path)
    whole = (root / "train-0000.tar").read_bytes()
    for content in (b"", b"nonsense" * 200, gzip.compress(whole), whole[:3000]):
        write(root / "train-0000.tar", content)
        assert "train-0000.tar is not a readable shard" in refused(root).problem
    write_tar(root / "train-0000.tar", {"README": b"nothing"})
    assert "has no training images" in refused(root).problem


def test_tables_that_do_not_fit(tmp_path: Path) -> None:
    faults: list[tuple[dict[str, Any], str]] = [
        ({"label": -1}, "train row 1 .*has label -1, and there are 3 classes"),
        ({"label": None}, "train row 1 .*has label None"),
        ({"test_names": ("bee", "ant", "cow")}, "different classes for training"),
        ({"splits": {"test": "extra"}}, "no test split among train, extra"),
    ]
    for number, (change, problem) in enumerate(faults):
        root = make_table(tmp_path / f"{number}", **change)
        with pytest.raises(DataError, match=problem):
            open_data(str(root))


def test_a_table_without_pictures(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"text": ["a"], "label": [0]})
    datasets.DatasetDict(train=table, test=table).save_to_disk(str(tmp_path / "set"))
    assert "has no column of type Image" in refused(tmp_path / "set").problem


def test_idx_files_that_are_damaged(tmp_path: Path) -> None:
    zipped = make_idx(tmp_path / "zipped", zipped=True) / "train-images-idx3-ubyte.gz"
    plain = make_idx(tmp_path / "plain") / "train-images-idx3-ubyte"
    raw, bare = zipped.read_bytes(), plain.read_bytes()
    middle = len(raw) // 2
    for path, content in (
        (zipped, raw[:middle]),
        (zipped, raw[:middle] + b"\0" * 20 + raw[middle + 20 :]),
        (zipped, raw[:10] + b"\xff" * 20 + raw[30:]),
        (zipped, b"not zipped"),
        (plain, b""),
        (plain, bare[:-1]),
        (plain, b"\0\0\x0d\x03" + bare[4:]),  # of floats
        (plain, idx(np.zeros(6, np.uint8))),  # labels
    ):
        write(path, content)
        assert "train-images-idx3-ubyte cannot be read" in refused(path.parent).problem
    write(plain, bare)
    (tmp_path / "plain/t10k-labels-idx1-ubyte").unlink()
    assert "t10k-labels-idx1-ubyte" in refused(tmp_path / "plain").problem


def test_idx_files_that_do_not_fit_each_other(tmp_path: Path) -> None:
    labels = make_idx(tmp_path) / "train-labels-idx1-ubyte"
    for count in (5, 7):
        write(labels, idx(np.zeros(count, np.uint8)))
        assert f"6 images and {count} labels" in refused(tmp_path).problem
    write(labels, idx(np.array([0, 1, 2, 3, 10, 5], np.uint8)))
    assert "image 4 of the training images" in refused(tmp_path).problem


def test_pictures_of_different_sizes_are_not_kept_in_memory(tmp_path: Path) -> None:
    root = make_folder(tmp_path)
    odd = write(root / "train/bee/odd.png", encoded(1, size=(12, 16)))
    assert refused(root, in_memory=True).problem == f"{odd} is 16 x 12 px, other images 12 x 12"
    odd.unlink()
    for path in (root / "val").rglob("*.png"):
        write(path, encoded(1, size=(12, 16)))
    assert "px, other images 12 x 12" in refused(root, in_memory=True).problem
    assert len(open_data(str(root)).train) == 6  # decoded one by one they may differ
