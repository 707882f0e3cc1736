"""A batch is a function of (seed, epoch, step): of nothing else, whoever reads it."""

import gc
import multiprocessing
import os
import random
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from timm.data import create_transform
from torch import Tensor
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from rbdc.data import (
    Batch,
    DataSet,
    EvaluationBatches,
    ImageFormat,
    TrainingBatches,
    check_batch_size,
    open_data,
)
from rbdc.data.augment import EvaluationTransform
from rbdc.data.batches import micro_batch_positions
from rbdc.data.images import ImageSource, memory_data
from rbdc.data.loader import LOST_WORKERS, _loader
from rbdc.data.samples import Read, Samples, epoch_order
from rbdc.errors import DataError
from rbdc.settings import Augmentation
from tests.data.pictures import (
    CLASSES,
    IMAGE,
    damaged,
    encoded,
    image_set,
    make_folder,
    pixels,
    write,
)
from tests.support import folder_data

BATCHED = Augmentation(scale=None, color_jitter=0.0, crop_padding=2)
SINGLE = Augmentation(color_jitter=0.4, aa=None)
MIXED: dict[str, Any] = {"mixup": 0.8, "cutmix": 1.0, "reprob": 0.5}
GRAY = replace(IMAGE, channels=1, mean=(0.3,), std=(0.4,))
IMAGES = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> DataSet:
    return open_data(str(make_folder(tmp_path_factory.mktemp("data"), IMAGES, 7)))


@pytest.fixture(scope="module")
def memory() -> DataSet:
    return memory_data("memory", image_set(IMAGES), image_set(7, 100))


@pytest.fixture(params=["batched", "single", "files"])
def way(request: pytest.FixtureRequest, folder: DataSet, memory: DataSet) -> tuple[Any, ...]:
    """Data and settings of the two ways, in memory and not."""
    return {
        "batched": (memory, BATCHED),
        "single": (memory, SINGLE),
        "files": (folder, replace(SINGLE, aa="rand-m9-mstd0.5-inc1")),
    }[str(request.param)]


def batches(
    data: DataSet,
    how: Augmentation,
    start: int = 0,
    stop: int = 9,
    *,
    seed: int = 0,
    batch_size: int = 8,
    image: ImageFormat = IMAGE,
    **options: Any,
) -> list[list[Batch]]:
    made = TrainingBatches(data, how, image, seed=seed, batch_size=batch_size, **options)
    return list(made.from_step(start, stop))


def equal(one: Sequence[Sequence[Batch]], other: Sequence[Sequence[Batch]]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(getattr(a, field), getattr(b, field))
        for first, second in zip(one, other, strict=True)
        for a, b in zip(first, second, strict=True)
        for field in ("images", "targets", "indices")
    )


# A function of seed, epoch and step


def test_batches_are_the_same_again_and_have_the_right_labels(way: Any) -> None:
    data, how = way
    first = batches(data, how)
    assert equal(first, batches(data, how))
    for (batch,) in first:
        assert batch.images.shape == (8, 3, 12, 12)
        assert batch.images.dtype == torch.float32
        assert batch.targets.tolist() == [int(data.train.labels[i]) for i in batch.indices]


@pytest.mark.parametrize("start", [1, 2, 3, 4, 6, 8])
def test_batches_are_the_same_from_any_step(way: Any, start: int) -> None:
    data, how = way  # an epoch has three steps
    assert equal(batches(data, how, start), batches(data, how)[start:])


@pytest.mark.parametrize("start", [0, 4])
def test_batches_are_the_same_with_workers(folder: DataSet, start: int) -> None:
    how = replace(SINGLE, **MIXED)
    shares = (2, (0, 1))
    assert equal(
        batches(folder, how, start, micro_batches=shares, workers=2),
        batches(folder, how, start, micro_batches=shares),
    )


def test_batches_differ_with_seed_epoch_and_step(way: Any) -> None:
    data, how = way
    one, other = batches(data, how), batches(data, how, seed=1)
    every = [tuple(batch.images.flatten().tolist()) for (batch,) in [*one, *other]]
    assert len(set(every)) == len(every)
    orders = [torch.cat([batch.indices for (batch,) in one[i : i + 3]]).tolist() for i in (0, 3, 6)]
    assert len(set(map(tuple, orders))) == 3


def test_the_global_generators_neither_change_nor_matter(way: Any) -> None:
    data, how = way
    _check_global_generators(data, how, workers=0)


def test_nor_do_they_with_workers(folder: DataSet) -> None:
    _check_global_generators(folder, SINGLE, workers=2)


def _check_global_generators(data: DataSet, how: Augmentation, workers: int) -> None:
    how = replace(how, **MIXED)
    made = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        torch.manual_seed(seed)
        before = _global_states()
        made.append(batches(data, how, stop=4, workers=workers))
        list(EvaluationBatches(data, IMAGE, batch_size=4, workers=workers))
        for one, other in zip(before, _global_states(), strict=True):
            assert one == other
    assert equal(*made)


def _global_states() -> list[Any]:
    return [random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()]  # noqa: NPY002


def test_the_order_differs_with_seed_and_epoch() -> None:
    orders = [tuple(epoch_order(50, s, e, 0).tolist()) for s in range(3) for e in range(3)]
    assert len(set(orders)) == 9


@pytest.mark.parametrize(
    "how",
    [
        BATCHED,
        SINGLE,
        replace(BATCHED, crop_padding=0, hflip=0.0, reprob=0.5, remode="const"),
        replace(BATCHED, crop_padding=0, hflip=0.0, mixup=0.8),
    ],
    ids=["batched", "single", "erased", "mixup"],
)
def test_what_is_drawn_differs_with_seed_epoch_and_step(how: Augmentation) -> None:
    """All images are equal here, and their order makes no difference."""
    one = replace(image_set(1), class_names=tuple(map(str, range(IMAGES))))
    train = replace(one, images=one.images.repeat(IMAGES, 1, 1, 1), labels=torch.arange(IMAGES))
    data = memory_data("equal", train, one)
    found = [batch for seed in range(2) for (batch,) in batches(data, how, seed=seed)]
    if how.mixes:  # how much is mixed shows in the targets
        drawn = [tuple(batch.targets.unique().tolist()) for batch in found]
    else:
        drawn = [tuple(batch.images.flatten().tolist()) for batch in found]
    assert len(set(drawn)) == len(drawn) == 18


def test_which_images_are_erased_differs_with_the_place(memory: DataSet) -> None:
    plain = replace(BATCHED, crop_padding=0, hflip=0.0)
    places = set()
    for seed in range(2):
        erased = batches(memory, replace(plain, reprob=0.5), seed=seed)
        for (one,), (other,) in zip(erased, batches(memory, plain, seed=seed), strict=True):
            changed = (one.images != other.images).flatten(1).any(dim=1)
            places.add(tuple(changed.tolist()))
    assert len(places) > 12  # of 18, and of 256 that there are


# What an epoch shows


@pytest.mark.parametrize("batch_size", [8, 5])
def test_an_epoch_shows_every_image_once_or_not_at_all(way: Any, batch_size: int) -> None:
    data, how = way
    steps = IMAGES // batch_size
    for epoch in range(2):
        shown = torch.cat(
            [
                batch.indices
                for (batch,) in batches(
                    data, how, epoch * steps, (epoch + 1) * steps, batch_size=batch_size
                )
            ]
        ).tolist()
        assert len(set(shown)) == len(shown) == steps * batch_size
    assert batch_size == 5 or sorted(shown) == [*range(IMAGES)]


def test_repeated_augmentation_shows_fewer_images_three_times_each(way: Any) -> None:
    data, how = way
    shown = batches(data, replace(how, aug_repeats=3), stop=3)
    indices = torch.cat([batch.indices for (batch,) in shown]).view(-1, 3)
    images = torch.cat([batch.images for (batch,) in shown]).reshape(-1, 3, 3 * 12 * 12)
    assert torch.equal(indices, indices[:, :1].expand(-1, 3))
    assert len(indices[:, 0].unique()) == IMAGES // 3
    assert (images[:, 0] != images[:, 1]).any(dim=1).sum() >= 6  # each in its own way


def test_repeats_of_zero_and_one_are_off() -> None:
    orders = [epoch_order(10, 3, 4, repeats).tolist() for repeats in (0, 1)]
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == [*range(10)]


# Shares


@given(st.integers(1, 6), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_shares_are_parts_of_a_batch_that_are_closed_under_reversal(shares: int, half: int) -> None:
    size = 2 * half * shares
    parts = [micro_batch_positions(size, shares, share).tolist() for share in range(shares)]
    assert sorted(chain(*parts)) == [*range(size)]
    for part in parts:
        assert len(part) == 2 * half
        assert [size - 1 - position for position in reversed(part)] == part


@pytest.mark.parametrize("shares", [2, 4])
@pytest.mark.parametrize("repeats", [0, 3])
def test_all_shares_together_are_the_batch_of_one_process(
    way: Any, shares: int, repeats: int
) -> None:
    data, how = way
    how = replace(how, **MIXED, aug_repeats=repeats)
    whole = batches(data, how, 1, 5)
    mine = [batches(data, how, 1, 5, micro_batches=(shares, (share,))) for share in range(shares)]
    both = batches(data, how, 1, 5, micro_batches=(shares, range(shares)))
    for step, (batch,) in enumerate(whole):
        assert batch.targets.shape == (8, 3)
        for share in range(shares):
            (part,) = mine[share][step]
            positions = micro_batch_positions(8, shares, share)
            for field in ("images", "targets", "indices"):
                assert torch.equal(getattr(part, field), getattr(batch, field)[positions])
            assert equal([[part]], [[both[step][share]]])
    assert any((batch.targets.max(dim=1).values < 1).any() for (batch,) in whole)  # mixed at all


# What single images look like


def test_files_of_any_size_are_shown_to_a_model_of_any_size(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for i, size in enumerate([(12, 12), (40, 20), (9, 33)]):
            write(tmp_path / split / "ant" / f"{i}.png", encoded(i, size=size))
    data = open_data(str(tmp_path))
    wide = replace(IMAGE, width=16)
    for how in (SINGLE, BATCHED):  # without a scale: resized to what the model takes
        for (batch,) in batches(data, how, stop=2, batch_size=3, image=wide):
            assert batch.images.shape == (3, 3, 12, 16)
    for batch in EvaluationBatches(data, wide, batch_size=3):
        assert batch.images.shape == (3, 3, 12, 16)


def test_a_model_of_one_channel_sees_all_colours(tmp_path: Path, memory: DataSet) -> None:
    data = open_data(str(make_folder(tmp_path, IMAGES, 7)))
    plain = replace(BATCHED, crop_padding=0, hflip=0.0)
    (batch,) = batches(data, plain, stop=1, image=GRAY)[0]
    assert batch.images.shape == (8, 1, 12, 12)
    for index, image in zip(batch.indices, batch.images, strict=True):
        assert torch.allclose(image, _gray(Image.open(data.train.name(int(index)))), atol=1e-5)
    for found in EvaluationBatches(memory, GRAY, batch_size=7):
        for i in range(7):
            expected = _gray(Image.fromarray(pixels(100 + i)))
            assert torch.allclose(found.images[i], expected, atol=1e-5)


def _gray(image: Image.Image) -> Tensor:
    pixels = torch.from_numpy(np.array(image.convert("L"))).float() / 255
    return (pixels[None] - 0.3) / 0.4


@pytest.mark.parametrize("how", [BATCHED, SINGLE, replace(SINGLE, aa="rand-m9-mstd0.5-inc1")])
def test_gray_images_are_for_models_of_one_channel(how: Augmentation) -> None:
    data = memory_data("gray", image_set(8, channels=1), image_set(4, 100, channels=1))
    (batch,) = batches(data, replace(how, **MIXED), stop=1, image=GRAY)[0]
    assert batch.images.shape == (8, 1, 12, 12)


# Evaluation


@pytest.mark.parametrize("kind", ["memory", "folder"])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_test_image_is_evaluated_exactly_once(
    kind: str, parts: int, workers: int, request: pytest.FixtureRequest
) -> None:
    data = request.getfixturevalue(kind)
    shown = [
        batch
        for part in range(parts)
        for batch in EvaluationBatches(
            data, IMAGE, batch_size=2, part=(parts, part), workers=workers
        )
    ]
    indices = torch.cat([batch.indices for batch in shown]).tolist()
    assert sorted(indices) == [*range(7)]
    assert parts > 1 or indices == [*range(7)]
    labels = torch.cat([batch.targets for batch in shown]).tolist()
    assert labels == [int(data.test.labels[i]) for i in indices]
    images = torch.cat([batch.images for batch in shown])
    for index, image in zip(indices, images, strict=True):
        found = torch.from_numpy(np.array(data.test.read(index))).permute(2, 0, 1)
        assert torch.equal(image, IMAGE.normalize(found[None])[0])


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_evaluation_crops_as_timm_would(kind: str, request: pytest.FixtureRequest) -> None:
    """Also images in memory: an exported model says how its images are to be cropped."""
    data = request.getfixturevalue(kind)
    theirs = create_transform(
        (3, 12, 12), crop_pct=0.75, interpolation="bicubic", mean=IMAGE.mean, std=IMAGE.std
    )
    (batch,) = EvaluationBatches(data, replace(IMAGE, crop_pct=0.75), batch_size=7)
    for index, image in zip(batch.indices, batch.images, strict=True):
        assert torch.allclose(image, theirs(data.test.read(int(index))), atol=1e-5)


# Images that cannot be decoded


@pytest.fixture
def spoiled(tmp_path: Path) -> tuple[Path, str]:
    """A folder with a picture whose damage a quick look does not see."""
    root = make_folder(tmp_path / "spoiled", 12, 6)
    return root, str(write(root / "train/bee/001.png", damaged("png")))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("split", ["train", "val"])
def test_hidden_damage_is_named_when_met(
    spoiled: tuple[Path, str], workers: int, split: str
) -> None:
    root, path = spoiled
    if split == "val":
        write(Path(path), encoded(1))
        path = str(write(root / "val/cow/002.jpg", damaged("jpg")))
    data = open_data(str(root))
    with pytest.raises(DataError) as error:
        if split == "train":
            batches(data, SINGLE, stop=3, batch_size=4, workers=workers)
        else:
            list(EvaluationBatches(data, IMAGE, batch_size=3, workers=workers))
    assert str(error.value).count("\n") == 1, "two lines"
    assert error.value.problem.startswith(f"{path} cannot be decoded: ")
    assert "--skip-bad" in error.value.remedy


def test_hidden_damage_is_replaced_by_the_next_image(spoiled: tuple[Path, str]) -> None:
    root, path = spoiled
    data = open_data(str(root), skip_bad=True)
    bad = next(i for i in range(12) if data.train.name(i) == path)
    found = []
    for workers in (0, 2):
        with pytest.warns(UserWarning) as warned:
            found.append(batches(data, SINGLE, stop=3, batch_size=4, workers=workers))
        (warning,) = warned
        assert str(warning.message).startswith(f"{path} cannot be decoded: ")
    assert equal(*found)
    indices = torch.cat([batch.indices for (batch,) in found[0]]).tolist()
    assert sorted(indices) == sorted([*range(bad), bad + 1, *range(bad + 1, 12)])
    for (batch,) in found[0]:
        assert batch.targets.tolist() == [int(data.train.labels[i]) for i in batch.indices]


def test_when_no_image_can_be_decoded_that_is_said(tmp_path: Path) -> None:
    for split in ("train", "val"):
        for i in range(4):
            write(tmp_path / split / "ant" / f"{i}.png", damaged("png"))
    data = open_data(str(tmp_path), skip_bad=True)
    with pytest.raises(DataError, match="cannot be decoded"):
        batches(data, SINGLE, stop=1, batch_size=4)


# Workers that die


@pytest.fixture
def _quick_look_after_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch looks every five seconds whether its workers live; a test need not wait so long."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.2,))


@pytest.mark.usefixtures("_quick_look_after_workers")
@pytest.mark.parametrize("kills", [1, 3])
def test_killed_workers_do_not_change_the_batches(folder: DataSet, kills: int) -> None:
    how = replace(SINGLE, **MIXED)
    expected = batches(folder, how, stop=60)
    found: list[list[Batch]] = []
    others = multiprocessing.active_children()
    with pytest.warns(UserWarning, match="died and is replaced") as warned:
        made = TrainingBatches(folder, how, IMAGE, seed=0, batch_size=8, workers=2)
        for micro in made.from_step(0, 60):
            found.append(micro)
            if len(found) % 10 == 3 and len(found) < 10 * kills:
                _kill_one(set(multiprocessing.active_children()).difference(others))
    assert equal(found, expected)
    assert len(warned) == kills


def _kill_one(workers: set[Any]) -> None:
    """It is dead when this returns, and is left for its parent to find."""
    victim = workers.pop().pid
    os.kill(victim, signal.SIGKILL)
    os.waitid(os.P_PID, victim, os.WEXITED | os.WNOWAIT)


@dataclass(frozen=True)
class _Deadly(ImageSource):
    """Images; reading one of them ends the process."""

    deadly: int
    main: int
    labels: tuple[int, ...] = (0,) * IMAGES

    def read(self, index: int) -> Image.Image:
        if index == self.deadly and os.getpid() != self.main:
            os.kill(os.getpid(), signal.SIGKILL)
        return Image.fromarray(pixels(index))

    def name(self, index: int) -> str:
        return f"image {index}"


def unlike(data: DataSet, train: ImageSource) -> DataSet:
    """Other images, and a fingerprint that says so: tests beside this one must not share theirs."""
    return replace(data, train=train, fingerprint=type(train).__name__)


@pytest.mark.usefixtures("_quick_look_after_workers")
def test_workers_that_keep_dying_are_an_error_after_all_that_could_be_read(memory: DataSet) -> None:
    deadly = int(epoch_order(IMAGES, 0, 0, 0)[13])  # in the second batch
    data = unlike(memory, _Deadly(deadly=deadly, main=os.getpid()))
    expected = batches(data, SINGLE, stop=1)
    found = []
    with (
        pytest.warns(UserWarning, match="died and is replaced") as warned,
        pytest.raises(DataError, match="data workers keep dying: DataLoader worker") as error,
    ):
        made = TrainingBatches(data, SINGLE, IMAGE, seed=0, batch_size=8, workers=2)
        for micro in made.from_step(0, 3):
            found.append(micro)
    assert equal(found, expected)
    assert len(warned) == LOST_WORKERS - 1
    assert "fewer workers" in error.value.remedy


class _Broken(_Deadly):
    def read(self, index: int) -> Image.Image:
        raise RuntimeError(f"a mistake of ours with {index}")


@pytest.mark.usefixtures("_quick_look_after_workers")
@pytest.mark.parametrize("workers", [0, 1])
def test_mistakes_of_ours_are_not_taken_for_dead_workers(memory: DataSet, workers: int) -> None:
    data = unlike(memory, _Broken(deadly=0, main=0))
    with warnings.catch_warnings(), pytest.raises(RuntimeError, match="a mistake of ours"):
        warnings.simplefilter("error")
        batches(data, SINGLE, stop=1, workers=workers)
    gc.collect()  # torch's exception holds its loader


def test_reading_can_be_given_up_at_any_step(folder: DataSet) -> None:
    others = multiprocessing.active_children()
    made = TrainingBatches(folder, SINGLE, IMAGE, seed=0, batch_size=8, workers=2)
    reading: Iterator[list[Batch]] = made.from_step(0, 100)
    next(reading)
    workers = set(multiprocessing.active_children()).difference(others)
    assert len(workers) == 2
    del reading
    assert workers.isdisjoint(multiprocessing.active_children())


# What is refused


@pytest.mark.parametrize(
    ("batch_size", "shares", "mixes", "problem"),
    [
        (0, 1, False, "the batch size is 0, and there are 24 training images"),
        (-2, 1, False, "the batch size is -2"),
        (25, 1, False, "the batch size is 25, and there are 24 training images"),
        (5, 1, True, "the batch size 5 is not a multiple of 2: mixup and cutmix mix pairs"),
        (
            6,
            2,
            False,
            "the batch size 6 is not a multiple of 4: it is divided into 2 micro-batches",
        ),
    ],
)
def test_batch_sizes_that_cannot_be(
    batch_size: int, shares: int, mixes: bool, problem: str, memory: DataSet
) -> None:
    with pytest.raises(DataError, match=problem):
        check_batch_size(IMAGES, batch_size, shares, mixes=mixes)
    with pytest.raises(DataError, match=problem):
        TrainingBatches(
            memory,
            replace(BATCHED, mixup=0.8 if mixes else 0.0),
            IMAGE,
            seed=0,
            batch_size=batch_size,
            micro_batches=(shares, (0,)),
        )


def test_batch_sizes_that_can_be(memory: DataSet) -> None:
    for batch_size, shares, mixes in ((1, 1, False), (5, 1, False), (24, 1, True), (12, 3, True)):
        check_batch_size(IMAGES, batch_size, shares, mixes=mixes)
    assert len(batches(memory, BATCHED, 0, 2, batch_size=24)) == 2


def test_images_must_have_the_size_that_the_model_takes(memory: DataSet) -> None:
    for image, found in ((replace(IMAGE, height=16), "(3, 16, 12)"), (GRAY, "(1, 12, 12)")):
        with pytest.raises(DataError) as error:
            TrainingBatches(memory, BATCHED, image, seed=0, batch_size=8)
        assert "images are (3, 12, 12)" in error.value.problem
        assert found in error.value.problem
        assert TrainingBatches(memory, SINGLE, image, seed=0, batch_size=8)  # it resizes


def test_the_classes_are_those_of_the_pictures(memory: DataSet) -> None:
    assert memory.class_names == CLASSES


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere workers are not forked")
def test_workers_are_forked_whatever_started_the_training(tmp_path: Path) -> None:
    """A server's workers would not see that their parent was killed, and wait for ever."""
    data = folder_data(tmp_path)
    samples = Samples(data.test, EvaluationTransform(IMAGE), 3, False)
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        loader: Any = _loader(samples, iter([[(0, 0, 0)]]), 1)
        assert type(loader._workers[0]).__name__ == "ForkProcess"
        assert next(loader).indices == [0]
        loader._shutdown_workers()
    finally:
        multiprocessing.set_start_method(before, force=True)


def test_batches_of_workers_are_pinned_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none here: torch asks the object, and the object its images."""
    monkeypatch.setattr(Tensor, "pin_memory", lambda images: images + 1)
    read = Read(images=torch.zeros(2), labels=[1, 2], indices=[3, 4], decoded=2)
    pinned = pin_memory(read)
    assert pinned.images.tolist() == [1, 1]
    assert replace(pinned, images=read.images) == read


@pytest.mark.parametrize("most", [0, 1 << 20])
def test_small_test_sets_are_decoded_once(
    folder: DataSet, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rbdc.data.batches.CACHE_BYTES", most)
    test = EvaluationBatches(folder, IMAGE, batch_size=3, workers=1)
    next(iter(test))  # given up at once: nothing is kept
    passes = [list(test) for _ in range(3)]
    for again in passes[1:]:
        assert equal([again], [passes[0]])
    decoded = [sum(batch.decoded for batch in found) for found in passes]
    assert decoded == ([7, 0, 0] if most else [7, 7, 7])


def test_a_stage_of_lower_resolution_sees_the_same_crops_smaller(memory: DataSet) -> None:
    small = replace(IMAGE, height=IMAGE.height // 2, width=IMAGE.width // 2)
    for (full,), (half,) in zip(
        batches(memory, BATCHED), batches(memory, BATCHED, image=small), strict=True
    ):
        assert torch.equal(full.targets, half.targets)
        assert half.images.shape[-2:] == (small.height, small.width)
        expected = torch.nn.functional.avg_pool2d(full.images, 2)
        assert (half.images - expected).abs().mean() < 0.5 * full.images.std()
    tested = list(EvaluationBatches(memory, small, batch_size=4))
    assert all(batch.images.shape[-2:] == (small.height, small.width) for batch in tested)


def test_held_out_images_are_in_one_part_and_the_test_images_in_none(
    folder: DataSet, memory: DataSet
) -> None:
    for data in (folder, memory):
        parts = data.held_out(0.25)
        assert (len(parts.train), len(parts.test)) == (IMAGES - 6, 6)
        assert parts.fingerprint != data.fingerprint
        seen = [
            part.read(index).convert("RGB").tobytes()
            for part in (parts.train, parts.test)
            for index in range(len(part))
        ]
        known = [data.train.read(index).convert("RGB").tobytes() for index in range(IMAGES)]
        assert sorted(seen) == sorted(known)
