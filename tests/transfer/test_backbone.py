"""A classifier as a backbone: the same features, on any image, with windows or without."""

from math import ceil
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import ResPostBlock
from torch import Tensor

import rbdc
from rbdc.errors import ModelError
from rbdc.settings.detection import DetectionRecipe
from rbdc.transfer.backbone import backbone_of, vit_body
from rbdc.transfer.pyramid import Norm, SimpleFPN
from tests.transfer.scenes import classifier, resnet

pytestmark = [pytest.mark.numeric, pytest.mark.usefixtures("double_precision")]
VITS: dict[str, dict[str, Any]] = {
    "deit_tiny_patch16_224": {},
    "deit_tiny_distilled_patch16_224": {},
    "deit3_small_patch16_224": {},  # layer scale; a class token without a position
    "vit_base_patch16_clip_quickgelu_224": {},  # a norm before the blocks, another activation
    "vit_small_patch16_224": {"qk_norm": True, "reg_tokens": 4, "qkv_bias": False},
}


def features(model: Any, images: Tensor) -> Tensor:
    """The classifier's own layers on its patches, the tokens before them left out."""
    patches = model.patch_embed(images)
    positions = model.pos_embed[:, -patches.shape[1] :]
    return model.blocks(model.norm_pre(patches + positions))  # type: ignore[no-any-return]


def as_tokens(maps: Tensor) -> Tensor:
    return maps.flatten(2).transpose(1, 2)


def noise(height: int, width: int, count: int = 2) -> Tensor:
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", VITS)
@torch.no_grad()
def test_without_windows_the_backbone_gives_the_classifiers_features(name: str) -> None:
    model = classifier(name, **VITS[name])
    body, _ = vit_body(model, DetectionRecipe(window=0))
    images = noise(32, 48)
    torch.testing.assert_close(as_tokens(body.eval()(images)), features(model, images))


@torch.no_grad()
def test_a_classifier_without_a_class_token_gives_the_same_from_end_to_end() -> None:
    model = classifier("vit_small_patch16_224", class_token=False, global_pool="avg")
    body, _ = vit_body(model, DetectionRecipe(window=0))
    images = noise(32, 48)
    expected = model.forward_intermediates(images, norm=False, intermediates_only=True)[-1]
    torch.testing.assert_close(body.eval()(images), expected)


@torch.no_grad()
def test_a_window_as_large_as_the_grid_is_no_window() -> None:
    model = classifier(img_size=32)
    images = noise(32, 32)
    whole, windowed = (
        vit_body(model, DetectionRecipe(window=window))[0].eval() for window in (0, 2)
    )
    torch.testing.assert_close(whole(images), windowed(images))


@pytest.mark.parametrize(("depth", "spreads"), [(2, False), (3, True)])
@torch.no_grad()
def test_windows_keep_to_themselves_until_a_global_block(depth: int, spreads: bool) -> None:
    body, _ = vit_body(classifier(depth=depth), DetectionRecipe(window=2))
    images = noise(64, 64, 1)
    changed = images.clone()
    changed[..., :16, :16] += 1  # the first patch, of the first of four windows
    difference = (body.eval()(images) - body(changed)).abs().amax(dim=(0, 1))
    assert difference[:2, :2].min() > 1e-3
    assert (difference[2:].max() > 1e-4) == spreads
    assert spreads or difference[:, 2:].max() == difference[2:].max() == 0


def test_every_third_block_is_global_the_papers_for_twelve() -> None:
    body, _ = vit_body(classifier(depth=12), DetectionRecipe(window=14))
    windows = [block.window_size for block in body.blocks]
    assert [number for number, size in enumerate(windows) if size] == [0, 1, 3, 4, 6, 7, 9, 10]
    assert {size for size in windows if size} == {14}


@pytest.mark.parametrize("size", [(16, 16), (37, 50), (250, 31)])
@torch.no_grad()
def test_images_of_any_size_go_through(size: tuple[int, int]) -> None:
    body, _ = vit_body(classifier(), DetectionRecipe(window=2))
    assert body.eval()(noise(*size)).shape == (2, 32, ceil(size[0] / 16), ceil(size[1] / 16))


@torch.no_grad()
def test_positions_are_resampled_to_the_grid_of_the_input() -> None:
    model = classifier()
    with torch.no_grad():
        model.pos_embed[:] = torch.arange(32.0) / 32  # everywhere: resampling changes nothing
    body, _ = vit_body(model, DetectionRecipe(window=0))
    images = noise(48, 80)
    patches = model.patch_embed.proj(images).flatten(2).transpose(1, 2)
    expected = model.blocks(patches + torch.arange(32.0) / 32)
    # timm resamples in float32: a few roundings of 6e-8 each, of positions up to 1
    torch.testing.assert_close(as_tokens(body.eval()(images)), expected, atol=1e-5, rtol=0)


def test_patches_of_14_pixels_become_16_because_strides_are_powers_of_two() -> None:
    model = classifier("vit_base_patch14_dinov2", patch_size=14, img_size=28)
    backbone: Any
    backbone, report = backbone_of(model, DetectionRecipe())
    assert backbone.body.patch_embed.patch_size == (16, 16)
    assert "14 x 14 resampled to 16 x 16" in report.changed["patch_embed.proj.weight"]
    assert [m.shape[-1] for m in backbone(noise(64, 64)).values()] == [16, 8, 4, 2, 1]


@pytest.mark.parametrize("patch", [4, 8, 16, 32])
@pytest.mark.parametrize("norm", ["layer", "batch", "none"])
def test_the_pyramid_has_strides_4_to_64_whatever_the_patch(patch: int, norm: Norm) -> None:
    pyramid = SimpleFPN(32, patch, out_channels=24, norm=norm)
    maps = pyramid(torch.randn(2, 32, 128 // patch, 192 // patch))
    shapes = {name: tuple(m.shape) for name, m in maps.items()}
    assert shapes == {
        name: (2, 24, 128 // stride, 192 // stride)
        for name, stride in (("0", 4), ("1", 8), ("2", 16), ("3", 32), ("pool", 64))
    }


@torch.no_grad()
def test_a_pyramid_of_layer_norms_is_normed_at_every_place() -> None:
    maps = SimpleFPN(32, 16, out_channels=24)(7 * torch.randn(1, 32, 4, 4) + 3)
    for scale in maps.values():
        torch.testing.assert_close(
            scale.mean(dim=1), torch.zeros_like(scale[:, 0]), atol=1e-12, rtol=0
        )


@pytest.mark.parametrize("frozen", [True, False])
@torch.no_grad()
def test_a_resnet_keeps_its_features_and_gets_torchvisions_pyramid(frozen: bool) -> None:
    model = resnet()
    backbone: Any
    backbone, _ = backbone_of(model, DetectionRecipe(frozen_norms=frozen))
    images = noise(64, 128)
    stages = backbone.eval().body(images)
    torch.testing.assert_close(stages["3"], model.forward_features(images))
    assert [tuple(m.shape[1:]) for m in backbone(images).values()] == [
        (256, 64 // stride, 128 // stride) for stride in (4, 8, 16, 32, 64)
    ]


@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_norms_keep_their_statistics_in_training(frozen: bool) -> None:
    model = resnet()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    backbone: Any
    backbone, _ = backbone_of(model, DetectionRecipe(frozen_norms=frozen))
    backbone.train()(noise(64, 64))
    after = backbone.body.state_dict()
    same = all(torch.equal(after[name], before[name]) for name in after if "running" in name)
    assert same == frozen
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_what_cannot_be_a_backbone_is_refused() -> None:
    with pytest.raises(ModelError, match="takes images of 1 channels"):
        backbone_of(classifier(in_chans=1), DetectionRecipe())
    with pytest.raises(ModelError, match=r"have strides \(4, 8, 16, 16\), \(4, 8, 16, 32\)"):
        backbone_of(resnet(output_stride=16), DetectionRecipe())
    with pytest.raises(ModelError, match="block 0 of the classifier is ResPostBlock with Mlp"):
        model: Any = classifier()
        model.blocks[0] = ResPostBlock(32, 2)  # the keys of Block, and another computation
        backbone_of(model, DetectionRecipe())
    with pytest.raises(ModelError, match="is not an architecture"):
        backbone_of(torch.nn.Linear(2, 2), DetectionRecipe())


def test_a_backbone_can_have_any_width() -> None:
    for width in (0.5, 1.0):
        model = rbdc.build("deit_tiny_patch16_224", width, embed_dim=32, num_heads=2, depth=2)
        backbone: Any = backbone_of(model, DetectionRecipe())[0]
        assert backbone.body.embed_dim == 32 * width
