"""Images are changed as the settings say: batches as in a plain reference, single ones by timm."""

import io
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor

from rbdc.data import ImageFormat, augment
from rbdc.data.augment import BatchChanges, TrainingTransform, Transform, Windows, to_tensor
from rbdc.data.randomness import derive_seed, generator, preserve_generators, set_seeds
from rbdc.settings import Augmentation
from tests.data.pictures import IMAGE, image_set, pixels

pytestmark = pytest.mark.numeric
PLAIN: dict[str, Any] = {"scale": None, "color_jitter": 0.0}
PLACE = (0, 0, 0)  # seed, epoch, step


def _training(settings: Augmentation, image: ImageFormat) -> Callable[[Image.Image], Tensor]:
    return partial(_tensor, TrainingTransform(settings, image))


def _tensor(transform: Transform, image: Image.Image) -> Tensor:
    crop = transform.draw(image)
    return to_tensor([transform.apply(image, crop)], 3)[0]


def normalized(images: Tensor) -> Tensor:
    return IMAGE.normalize(images)


def test_pixels_are_normalized_a_channel() -> None:
    images = image_set(2).images
    expected = np.stack(
        [(images[:, c].numpy() / 255 - IMAGE.mean[c]) / IMAGE.std[c] for c in range(3)], axis=1
    )
    assert np.allclose(normalized(images).numpy(), expected, atol=1e-5)
    assert images.dtype == torch.uint8


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize(("hflip", "vflip"), [(0.5, 0.0), (0.5, 0.25), (1.0, 0.0)])
def test_batched_crops_and_flips_are_those_of_a_plain_reference(
    padding: int, hflip: float, vflip: float
) -> None:
    """Every image is one of the crops of the padded image, flipped or not; all of them occur."""
    settings = Augmentation(**PLAIN, crop_padding=padding, hflip=hflip, vflip=vflip)
    images, count = image_set(4).images, 2000
    chosen = torch.arange(count) % 4
    found = Windows(images, settings).batch(chosen, torch.arange(count), count, *PLACE)
    candidates = [_crops(image.numpy(), padding) for image in images]
    drawn = [candidates[i % 4][found[i].numpy().tobytes()] for i in range(count)]
    offsets = [where[:2] for where in drawn]
    assert len(set(offsets)) == (2 * padding + 1) ** 2
    assert max(map(offsets.count, set(offsets))) < 2 * count / (2 * padding + 1) ** 2 or not padding
    for axis, probability in ((2, hflip), (3, vflip)):
        assert np.mean([where[axis] for where in drawn]) == pytest.approx(probability, abs=0.04)
    both = np.mean([where[2] and where[3] for where in drawn])
    assert both == pytest.approx(hflip * vflip, abs=0.04)  # drawn apart


def _crops(image: np.ndarray, padding: int) -> dict[bytes, tuple[int, int, bool, bool]]:
    height, width = image.shape[1:]
    padded = np.zeros((3, height + 2 * padding, width + 2 * padding), dtype=np.uint8)
    padded[:, padding : padding + height, padding : padding + width] = image
    crops = {}
    for top in range(2 * padding + 1):
        for left in range(2 * padding + 1):
            crop = padded[:, top : top + height, left : left + width]
            for h in (False, True):
                for v in (False, True):
                    flipped = crop[:, :: -1 if v else 1, :: -1 if h else 1]
                    crops[flipped.tobytes()] = (top, left, h, v)
    return crops


@pytest.mark.parametrize("mode", ["const", "rand", "pixel"])
def test_erasing_changes_about_as_many_images_as_asked(mode: str) -> None:
    count, settings = 600, Augmentation(reprob=0.25, remode=mode)  # type: ignore[arg-type]
    images = normalized(image_set(1).images).expand(count, -1, -1, -1)
    labels, positions = torch.zeros(count, dtype=torch.long), torch.arange(count)
    found, targets = BatchChanges(settings, 3)(images.clone(), labels, positions, count, *PLACE)
    changed = (found != images).flatten(1).any(dim=1)
    assert changed.float().mean() == pytest.approx(0.25, abs=0.05)
    assert torch.equal(targets, labels)
    for image in found[changed][:50]:
        rows, columns = (image != images[0]).any(dim=0).nonzero().T
        box = image[:, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        assert 0 < box[0].numel() < 100  # of 144
        assert (mode == "const") == bool((box == 0).all())
        if box[0].numel() > 1:
            assert (mode == "pixel") == bool((box != box[:, :1, :1]).any())


def test_erased_images_differ_from_each_other_and_with_the_place() -> None:
    settings = Augmentation(reprob=1.0)
    images = torch.zeros(8, 3, 12, 12)
    labels, positions = torch.zeros(8, dtype=torch.long), torch.arange(8)
    change = BatchChanges(settings, 3)
    batches = [change(images.clone(), labels, positions, 8, 0, 0, step)[0] for step in (0, 1)]
    every = torch.cat(batches).flatten(1)
    assert len({tuple(row) for row in every.tolist()}) == 16


def test_mixup_mixes_a_batch_with_its_reverse() -> None:
    images, labels, found, targets = _mixed(Augmentation(mixup=0.8))
    share = float(targets[0, labels[0]])
    assert 0 < share < 1
    assert torch.allclose(found, share * images + (1 - share) * images.flip(0), atol=1e-6)
    _check_targets(labels, targets, share)


def test_cutmix_takes_a_rectangle_from_the_reverse() -> None:
    images, labels, found, targets = _mixed(Augmentation(cutmix=1.0))
    taken = (found == images.flip(0)).all(dim=1)
    assert torch.equal(taken | (found == images).all(dim=1), torch.ones_like(taken))
    assert torch.equal(taken, taken[:1].expand_as(taken))
    rows, columns = taken[0].any(dim=1), taken[0].any(dim=0)
    assert torch.equal(taken[0], rows[:, None] & columns)
    _check_targets(labels, targets, 1 - float(taken[0].float().mean()))


def _mixed(settings: Augmentation) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    images, labels = normalized(image_set(6).images), torch.tensor([0, 1, 2, 0, 2, 1])
    change = BatchChanges(settings, 3)
    return images, labels, *change(images.clone(), labels, torch.arange(6), 6, 1, 2, 3)


def _check_targets(labels: Tensor, targets: Tensor, share: float) -> None:
    one_hot = torch.eye(3)[labels]
    assert torch.allclose(targets, share * one_hot + (1 - share) * one_hot.flip(0), atol=1e-6)


def test_mixing_happens_as_often_and_in_the_way_asked() -> None:
    settings = Augmentation(mixup=1.0, cutmix=1.0, mixup_prob=0.5, mixup_switch_prob=0.25)
    change, images = BatchChanges(settings, 3), normalized(image_set(2).images)
    counts = {"none": 0, "mixup": 0, "cutmix": 0}
    for step in range(400):
        found, _ = change(images.clone(), torch.tensor([0, 1]), torch.arange(2), 2, 0, 0, step)
        kept = (found == images).all(dim=1) | (found == images.flip(0)).all(dim=1)
        equal = torch.equal(found, images)
        counts["none" if equal else "cutmix" if bool(kept.all()) else "mixup"] += 1
    # a cutmix of nothing looks like none: seldom
    assert counts["none"] == pytest.approx(200, abs=40)
    assert counts["mixup"] == pytest.approx(150, abs=35)
    assert counts["cutmix"] == pytest.approx(50, abs=25)


@pytest.mark.parametrize(
    "settings",
    [
        Augmentation(),
        Augmentation(scale=(0.5, 0.9), aspect_ratio=(1.0, 1.0), train_interpolation="bilinear"),
        Augmentation(hflip=1.0, vflip=1.0, color_jitter=0.0),
        Augmentation(color_jitter=0.9),
        Augmentation(aa="rand-m9-mstd0.5-inc1", train_interpolation="bicubic"),
    ],
    ids=["default", "crop", "flips", "jitter", "randaugment"],
)
def test_single_images_are_changed_as_by_timm(settings: Augmentation) -> None:
    ours = _training(settings, IMAGE)
    theirs = create_transform(
        (3, 12, 12),
        is_training=True,
        scale=settings.scale,
        ratio=settings.aspect_ratio,
        hflip=settings.hflip,
        vflip=settings.vflip,
        color_jitter=settings.color_jitter or None,
        auto_augment=settings.aa,
        interpolation=settings.train_interpolation,
        mean=IMAGE.mean,
        std=IMAGE.std,
    )
    differing = 0
    for seed in range(20):
        image = Image.fromarray(pixels(seed, (30, 20)))
        with preserve_generators():
            set_seeds(seed)
            mine = ours(image)
            differing += not torch.equal(mine, ours(image))
            set_seeds(seed)
            expected = theirs(image)
        assert mine.dtype == torch.uint8
        assert torch.allclose(normalized(mine[None])[0], expected, atol=1e-5)
    assert differing > 10 or settings.hflip == 1.0  # it is random at all


def test_randaugment_takes_what_pillow_gives_and_pillow_what_it_draws() -> None:
    """Its strength varies, down to posterizing to no bits: Pillow 13 would refuse that."""
    ours = _training(Augmentation(aa="rand-m10-n8-mstd101-inc1"), IMAGE)
    with preserve_generators():
        for seed in range(60):
            set_seeds(seed)
            ours(Image.fromarray(pixels(seed, (30, 20))))


def test_without_a_scale_images_are_resized_padded_and_cropped() -> None:
    settings = Augmentation(scale=None, color_jitter=0.0, crop_padding=2)
    transform = _training(settings, IMAGE)
    crops = _crops(np.moveaxis(pixels(0), -1, 0), 2)
    with preserve_generators():
        set_seeds(0)
        drawn = {crops[transform(Image.fromarray(pixels(0))).numpy().tobytes()] for _ in range(300)}
        assert transform(Image.fromarray(pixels(0, (30, 20)))).shape == (3, 12, 12)
    assert {where[:2] for where in drawn} == {(t, s) for t in range(5) for s in range(5)}
    assert {where[2:] for where in drawn} == {(False, False), (True, False)}


def _jpeg(size: tuple[int, int]) -> Image.Image:
    """A smooth picture that is not decoded yet: each place in it has a colour of its own."""
    x, y = np.meshgrid(*(np.linspace(0, 1, side) for side in size))
    waves = np.stack([x, y, 0.5 + 0.5 * np.sin(4 * x + 3 * y)], axis=-1)
    file = io.BytesIO()
    Image.fromarray((255 * waves).astype(np.uint8)).save(file, "jpeg", quality=95)
    return Image.open(file)


@pytest.mark.parametrize("scale", [(0.08, 1.0), (0.5, 0.9), None])
@pytest.mark.parametrize("size", [(203, 151), (97, 300), (60, 61)])
def test_a_reduced_jpeg_has_the_pixels_that_the_model_needs(
    size: tuple[int, int], scale: tuple[float, float] | None
) -> None:
    full = TrainingTransform(Augmentation(color_jitter=0.0, scale=scale, decode="full"), IMAGE)
    reduced = TrainingTransform(replace(full.settings, decode="reduced"), IMAGE)
    factors = set()
    for seed in range(40):
        pixels, crops = [], []
        for transform in (full, reduced):
            image = _jpeg(size)
            with preserve_generators():
                set_seeds(seed)
                crops.append(transform.draw(image))
                pixels.append(np.asarray(transform.apply(image, crops[-1])).astype(float))
        (left, upper, right, lower), factor = crops[1].box, crops[1].factor
        assert replace(crops[1], factor=1) == crops[0]
        assert image.size == tuple(-(-side // factor) for side in size)
        if factor == 1:
            assert np.array_equal(pixels[0], pixels[1])
        else:
            assert min(right - left, lower - upper) >= 12 * factor
            assert np.abs(pixels[0] - pixels[1]).mean() < 2
        assert factor == 8 or min(right - left, lower - upper) < 24 * factor
        factors.add(factor)
    assert scale is None or max(factors) >= 4


def test_only_jpegs_larger_than_the_model_needs_are_reduced() -> None:
    transform = TrainingTransform(Augmentation(), IMAGE)
    small, loaded, picture = _jpeg((23, 23)), _jpeg((99, 99)), Image.fromarray(pixels(0, (99, 99)))
    loaded.load()
    for image in (small, loaded, picture):
        with preserve_generators():
            assert {transform.draw(image).factor for _ in range(30)} == {1}


@pytest.mark.parametrize("crop_pct", [1.0, 0.75])
def test_evaluation_sees_what_timm_would_show(crop_pct: float) -> None:
    image = replace(IMAGE, crop_pct=crop_pct)
    theirs = create_transform(
        (3, 12, 12), crop_pct=crop_pct, interpolation="bicubic", mean=IMAGE.mean, std=IMAGE.std
    )
    picture = Image.fromarray(pixels(0, (30, 20)))
    mine = _tensor(augment.EvaluationTransform(image), picture)
    assert torch.allclose(normalized(mine[None])[0], theirs(picture), atol=1e-5)


def test_seeds_differ_with_every_part_of_the_place() -> None:
    places: list[tuple[int | str, ...]] = [
        (0, "order", 1),
        (1, "order", 0),
        (0, "order", 11),
        (0, 1, "order"),
        (0, "crop", 1),
    ]
    assert len({derive_seed(*place) for place in places}) == len(places)
    assert derive_seed(0, "order", 1) == 7770329341107549510  # on every machine, for ever
    first, again = (torch.rand(3, generator=generator(1, "x")) for _ in range(2))
    assert torch.equal(first, again)
