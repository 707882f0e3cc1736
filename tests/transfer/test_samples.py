"""What a detector is given: a function of (seed, epoch, image), boxes and masks moving together."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.ops import masks_to_boxes

from rbdc.errors import DataError, RecipeError
from rbdc.settings.detection import DetectionRecipe
from rbdc.transfer.batches import DetectionBatch, DetectionBatches, DetectionSamples, make_transform
from rbdc.transfer.coco import CocoSet, open_splits
from tests.transfer.scenes import write_scenes

RESIZED = DetectionRecipe(train_sizes=(40, 64, 90), max_size=120)
JITTERED = DetectionRecipe(jitter=(0.3, 4.0), jitter_size=80)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> CocoSet:
    return open_splits(write_scenes(tmp_path_factory.mktemp("scenes")))[0]


def samples_of(
    data: CocoSet, recipe: DetectionRecipe | None = None, seed: int = 1
) -> DetectionSamples:
    transform = make_transform(recipe) if recipe else None
    return DetectionSamples(data, data.class_names, transform, seed)


def same(first: tuple[Tensor, dict[str, Tensor]], second: tuple[Tensor, dict[str, Tensor]]) -> bool:
    return torch.equal(first[0], second[0]) and all(
        torch.equal(first[1][key], second[1][key]) for key in first[1]
    )


def test_a_sample_is_what_torchvision_takes(data: CocoSet) -> None:
    image, target = samples_of(data)[0, 1]
    assert image.shape == (3, 70, 50) and image.dtype == torch.float32
    assert type(image) is Tensor and all(type(value) is Tensor for value in target.values())
    with Image.open(data.pictures[1].location.path) as file:
        assert image[:, 3, 4].mul(255).round().tolist() == list(file.getpixel((4, 3)))  # type: ignore[arg-type]
    assert target["image_id"] == 5
    assert target["boxes"].tolist() == [[1, 1, 41, 31], [10, 40, 45, 65]]  # without the crowd
    assert target["labels"].tolist() == [2, 1] and target["labels"].dtype == torch.int64
    assert target["masks"].sum(dim=(1, 2)).tolist() == [40 * 30, 35 * 25]


@pytest.mark.parametrize("recipe", [None, RESIZED, JITTERED])
def test_an_image_without_objects_is_kept(data: CocoSet, recipe: DetectionRecipe | None) -> None:
    image, target = samples_of(data, recipe)[0, 2]
    assert target["boxes"].shape == (0, 4) and target["labels"].shape == (0,)
    assert target["masks"].shape == (0, *image.shape[1:])


@pytest.mark.parametrize("recipe", [RESIZED, JITTERED])
def test_a_sample_depends_on_seed_epoch_and_image_alone(
    data: CocoSet, recipe: DetectionRecipe
) -> None:
    samples, again = samples_of(data, recipe), samples_of(data, recipe)
    for token in [(0, 1), (3, 0), (2, 1)]:
        torch.rand(5)
        state = torch.get_rng_state()
        first = samples[token]
        assert torch.equal(torch.get_rng_state(), state)  # nor does it move the generators
        assert same(first, again[token])
    differ = [samples[epoch, 1][0].shape for epoch in range(8)]
    pixels = [samples[epoch, 1][0].sum().item() for epoch in range(8)]
    assert len(set(differ)) > 1 or len(set(pixels)) > 4
    other = samples_of(data, recipe, seed=2)
    assert not all(same(samples[epoch, 1], other[epoch, 1]) for epoch in range(8))


def test_workers_make_no_difference(data: CocoSet) -> None:
    def batches(workers: int) -> list[DetectionBatch]:
        of_all = DetectionBatches(
            samples=samples_of(data, RESIZED),
            batch_size=2,
            device=torch.device("cpu"),
            workers=workers,
        )
        return [batch for [batch] in of_all.from_step(1, 4)]

    for one, other in zip(batches(0), batches(2), strict=True):
        assert one.indices.equal(other.indices) and len(one.images) == len(one.targets) == 2
        for number in range(2):
            ours = one.images[number], one.targets[number]
            assert same(ours, (other.images[number], other.targets[number]))


@pytest.mark.parametrize("recipe", [RESIZED, JITTERED])
def test_boxes_masks_and_labels_stay_together(data: CocoSet, recipe: DetectionRecipe) -> None:
    samples, seen, lost = samples_of(data, recipe), 0, 0
    for epoch in range(20):
        image, target = samples[epoch, 1]
        count = len(target["boxes"])
        lost += 2 - count
        assert (target["boxes"][:, 2:] - target["boxes"][:, :2] >= 1).all()
        assert len(target["labels"]) == count and target["masks"].shape == (count, *image.shape[1:])
        for box, mask in zip(target["boxes"], target["masks"], strict=True):
            if mask.any():  # the objects are boxes: where the mask is, there the box is
                found = masks_to_boxes(mask[None])[0] + torch.tensor([0, 0, 1, 1])
                torch.testing.assert_close(found, box, atol=1.6, rtol=0)
                seen += 1
    assert seen > 20 and (lost > 0) == (recipe is JITTERED)  # what is cut away is gone


def test_a_mirror_image_has_mirrored_boxes(data: CocoSet) -> None:
    plain, mirrored = (
        samples_of(data, DetectionRecipe(min_size=50, max_size=70, flip=flip))[0, 1]
        for flip in (0.0, 1.0)
    )
    assert torch.equal(mirrored[0], plain[0].flip(-1))
    assert torch.equal(mirrored[1]["masks"], plain[1]["masks"].flip(-1))
    left, top, right, bottom = plain[1]["boxes"].unbind(1)
    assert torch.equal(mirrored[1]["boxes"], torch.stack([50 - right, top, 50 - left, bottom], 1))


def test_images_are_resized_as_asked(data: CocoSet) -> None:
    for epoch in range(10):
        height, width = samples_of(data, RESIZED)[epoch, 1][0].shape[1:]
        assert min(height, width) in (40, 64, 85) and max(height, width) <= 120
        assert height / width == pytest.approx(70 / 50, rel=0.03)
        assert samples_of(data, JITTERED)[epoch, 1][0].shape == (3, 80, 80)


def test_a_file_of_another_size_or_no_image_is_named(tmp_path: Path) -> None:
    train, _ = open_splits(write_scenes(tmp_path))
    first = train.pictures[0].location.path
    content = first.read_bytes()
    Image.new("RGB", (40, 60)).save(first)
    with pytest.raises(DataError, match=r"0011.png is 40 x 60 px, its annotations are for 60 x 40"):
        samples_of(open_splits(tmp_path)[0])[0, 0]
    first.write_bytes(content[:100])
    with pytest.raises(DataError, match=r"0011.png cannot be decoded"):
        samples_of(open_splits(tmp_path)[0])[0, 0]


@pytest.mark.parametrize(
    "settings",
    [
        *({"min_size": ()}, {"min_size": 2000}, {"train_sizes": (64, 2000)}, {"train_sizes": (0,)}),
        *({"flip": 2}, {"jitter": (2, 1)}, {"jitter": (0, 1)}, {"jitter_size": 0}),
    ],
)
def test_views_that_cannot_be_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(RecipeError):
        make_transform(DetectionRecipe(**settings))
