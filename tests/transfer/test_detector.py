"""Mask R-CNN on a backbone: trains, answers in the image's pixels, and has a price."""

from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor

import rbdc
from rbdc.errors import ModelError, RecipeError
from rbdc.settings.detection import DetectionRecipe
from rbdc.transfer.detection import groups_of
from rbdc.transfer.detector import Detector, build_detector, detector_cost
from tests.transfer.scenes import classifier, resnet

LOSSES = {
    "loss_classifier", "loss_box_reg", "loss_mask", "loss_objectness", "loss_rpn_box_reg"
}  # fmt: skip


def detector_of(model: Any, **settings: Any) -> Detector:
    torch.manual_seed(0)
    recipe = DetectionRecipe(**{"min_size": 48, "max_size": 96, "window": 2, **settings})
    return build_detector(model, 3, recipe)[0]


def names_in(detector: Detector, group: dict[str, Any]) -> list[str]:
    names = {parameter: name for name, parameter in detector.named_parameters()}
    return [names[parameter] for parameter in group["params"]]


def batch() -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Two sizes; one image has an object, the other nothing."""
    images = [torch.rand(3, 40, 70), torch.rand(3, 66, 33)]
    mask = torch.zeros(1, 40, 70, dtype=torch.uint8)
    mask[:, 5:35, 10:50] = 1
    return images, [
        {"boxes": torch.tensor([[10.0, 5, 50, 35]]), "labels": torch.tensor([2]), "masks": mask},
        {
            "boxes": torch.zeros(0, 4),
            "labels": torch.zeros(0, dtype=torch.int64),
            "masks": torch.zeros(0, 66, 33, dtype=torch.uint8),
        },
    ]


@pytest.mark.parametrize("make", [classifier, resnet])
def test_a_batch_of_two_sizes_and_an_empty_image_trains_every_parameter(make: Any) -> None:
    detector = detector_of(make()).train()
    losses = detector(*batch())
    assert losses.keys() == LOSSES
    torch.stack(list(losses.values())).sum().backward()
    for name, parameter in detector.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


@torch.no_grad()
def test_images_are_resized_in_evaluation_only_and_padded_to_whole_cells() -> None:
    detector = detector_of(classifier())
    image = [torch.rand(3, 40, 70)]
    trained, _ = detector.train().transform(image)
    evaluated, _ = detector.eval().transform(image)
    assert trained.image_sizes == [(40, 70)] and trained.tensors.shape[2:] == (64, 128)
    assert evaluated.image_sizes == [(48, 84)] and evaluated.tensors.shape[2:] == (64, 128)
    output = detector(image)[0]
    assert output["masks"].shape[1:] == (1, 40, 70)
    assert (output["boxes"] <= torch.tensor([70, 40, 70, 40])).all()


@torch.no_grad()
def test_images_are_normalised_as_the_classifiers_were() -> None:
    model = classifier()
    model.pretrained_cfg.update(mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 0.125))
    image = torch.tensor([0.6, 0.45, 0.425])[:, None, None].expand(3, 64, 64)
    seen, _ = detector_of(model).train().transform([image])
    torch.testing.assert_close(seen.tensors, torch.ones(1, 3, 64, 64))


@pytest.mark.parametrize("size", [40, 70, 130, 400])
def test_a_region_is_read_where_it_is_however_much_the_image_was_padded(size: int) -> None:
    detector = detector_of(classifier())
    padded = -(-size // 64) * 64
    maps = {}
    for name, stride in (("0", 4), ("1", 8), ("2", 16), ("3", 32)):
        places = (torch.arange(padded // stride) + 0.5) * stride  # in the image's pixels
        maps[name] = places.expand(1, 1, len(places), len(places))
    box = torch.tensor([[4.0, 4.0, 32.0, 28.0]])
    for pool in (detector.roi_heads.box_roi_pool, detector.roi_heads.mask_roi_pool):
        read = pool(maps, [box], [(size, size)])
        # RoIAlign counts from the middle of the first cell, half a cell of stride 4 to the right
        assert read.mean().item() == pytest.approx(18.0 + 2.0, abs=0.01)


@pytest.mark.parametrize("make", [classifier, resnet])
def test_the_cost_counts_every_parameter_and_the_backbones_flops(make: Any) -> None:
    arguments = {} if make is resnet else {"class_token": False, "global_pool": "avg"}
    name = {} if make is resnet else {"name": "vit_small_patch16_224", "img_size": 64}
    model = make(**name, **arguments)
    detector = detector_of(model, window=0)
    cost = detector_cost(detector, 64, 64)
    assert cost.total_parameters == sum(p.numel() for p in detector.parameters())
    head = model.get_classifier()
    whole = rbdc.forward_flops(model, 64, counter="torch")
    assert cost.flops["backbone"] == whole - 2 * head.in_features * head.out_features
    assert (cost.height, cost.width, cost.proposals, cost.detections) == (64, 64, 1000, 100)
    box = detector.roi_heads
    linear = [box.box_head.fc6, box.box_head.fc7, *box.box_predictor.children()]
    each = sum(2 * layer.in_features * layer.out_features for layer in linear)
    assert cost.flops["box head"] == 1000 * each
    assert asdict(cost)["total_flops"] == sum(cost.flops.values())


def test_the_cost_is_of_the_padded_image() -> None:
    detector = detector_of(resnet())
    assert detector_cost(detector, 100, 65).flops == detector_cost(detector, 128, 128).flops


def test_windows_make_a_large_image_cheaper() -> None:
    windowed, whole = (detector_of(classifier(), window=window) for window in (2, 0))
    costs = [detector_cost(one, 256, 256).flops["backbone"] for one in (windowed, whole)]
    patches = 16 * 16
    saved = 2 * 4 * 32 * (patches * patches - patches * 4)  # two blocks of three, q k and a v
    assert costs[1] - costs[0] == saved


def test_settings_that_make_no_detector_are_refused() -> None:
    with pytest.raises(ModelError, match="min_size is 800 and max_size 600 px"):
        build_detector(classifier(), 3, DetectionRecipe(max_size=600))
    with pytest.raises(ModelError, match="cannot have 0 classes"):
        build_detector(classifier(), 0, DetectionRecipe())
    for name in ("channels", "regions", "proposals", "min_size"):
        nothing: dict[str, Any] = {name: 0}
        with pytest.raises(RecipeError, match=f"{name} is 0, expected at least 1"):
            DetectionRecipe(**nothing)


def test_layers_of_a_vit_learn_slower_the_deeper_they_lie() -> None:
    detector = detector_of(classifier())
    groups = groups_of(detector, DetectionRecipe())
    found: dict[str, Any] = {
        name: (group["lr_scale"], group["weight_decay"])
        for group in groups
        for name in names_in(detector, group)
    }
    body, heads = "backbone.body.", pytest.approx(1.0)
    assert found.keys() == {name for name, _ in detector.named_parameters()}
    assert found[body + "pos_embed"] == (pytest.approx(0.7**4), 0)
    assert found[body + "patch_embed.proj.weight"] == (pytest.approx(0.7**4), 0.1)
    assert found[body + "patch_embed.proj.bias"] == (pytest.approx(0.7**4), 0)
    for number, scale in enumerate((0.7**3, 0.7**2, 0.7)):
        block = {name: at for name, at in found.items() if f"body.blocks.{number}." in name}
        assert len(block) == 12
        for name, at in block.items():
            decay = 0.1 if name.endswith("weight") and "norm" not in name else 0.0
            assert at == (pytest.approx(scale), decay), name
    rest = {name: at for name, at in found.items() if not name.startswith(body)}
    for name, parameter in detector.named_parameters():
        if name in rest:
            assert rest[name] == (heads, 0.1 if parameter.ndim > 1 else 0.0), name


def test_stages_of_a_resnet_can_decay_too_and_frozen_norms_are_in_no_group() -> None:
    detector = detector_of(resnet())
    groups = groups_of(detector, DetectionRecipe(weight_decay=1e-4, layer_decay=0.5))
    found = {name: group["lr_scale"] for group in groups for name in names_in(detector, group)}
    assert sum(len(group["params"]) for group in groups) == len(found)
    assert found.keys() == {name for name, _ in detector.named_parameters()}
    assert not [name for name in found if "body" in name and "bn" in name]
    assert found["backbone.body.conv1.0.weight"] == 0.5**5
    for stage in (1, 2, 3, 4):
        assert found[f"backbone.body.layer{stage}.0.conv1.weight"] == 0.5 ** (5 - stage)
    assert found["backbone.fpn.layer_blocks.0.0.weight"] == found["rpn.head.cls_logits.bias"] == 1


def test_groups_go_into_an_optimizer_and_bad_decay_is_refused() -> None:
    detector = detector_of(resnet())
    scales = [group["lr_scale"] for group in groups_of(detector, DetectionRecipe())]
    optimizer = torch.optim.AdamW(groups_of(detector, DetectionRecipe()), lr=1e-4)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(
        list(detector.parameters())
    )
    assert [group["lr_scale"] for group in optimizer.param_groups] == scales
    with pytest.raises(RecipeError, match=r"layer_decay is 1\.5"):
        DetectionRecipe(layer_decay=1.5)
