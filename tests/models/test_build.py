"""Models by width."""

import json
from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rbdc
from rbdc.errors import ModelError, WidthError
from rbdc.models import ModelSpec, build_empty, build_meta, check_steps, families, scaled_widths
from tests.support import SMALL, SMALL_VIT, images, logits


def shapes(model: Any) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [
        ("deit_base_patch16_224", "deit_small_patch16_224"),
        ("deit_small_patch16_224", "deit_tiny_patch16_224"),
        ("deit_base_distilled_patch16_224", "deit_small_distilled_patch16_224"),
    ],
)
def test_half_a_deit_is_the_next_smaller_deit(wide: str, narrow: str) -> None:
    half = build_meta(ModelSpec(name=wide, width=0.5))
    assert shapes(half) == shapes(build_meta(ModelSpec(name=narrow)))
    assert half.blocks[0].attn.head_dim == 64  # type: ignore[index, union-attr]


def test_deit_large_is_halved_at_its_own_depth() -> None:
    half: Any = build_meta(ModelSpec(name="deit3_large_patch16_224", width=0.25))
    assert (half.embed_dim, len(half.blocks), half.blocks[0].attn.num_heads) == (256, 24, 4)


@pytest.mark.parametrize("width", [1.0, 0.5, 0.25, 0.125])
def test_resnet50d_widths(width: float) -> None:
    model: Any = build_meta(ModelSpec(name="resnet50d", width=width))
    assert model.conv1[0].out_channels == 32 * width
    assert model.bn1.num_features == 64 * width
    assert [model.layer1[0].conv2.out_channels, model.fc.in_features] == [64 * width, 2048 * width]


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet101"])
def test_a_plain_stem_scales_with_the_rest(name: str) -> None:
    full, half = build_meta(ModelSpec(name=name)), build_meta(ModelSpec(name=name, width=0.5))
    assert list(shapes(half)) == list(shapes(full))
    assert half.conv1.weight.shape == (32, 3, 7, 7)  # type: ignore[union-attr]
    explicit = ModelSpec(name=name, width=0.5, arguments={"stem_type": ""})
    assert shapes(build_meta(explicit)) == shapes(half)
    again = build_meta(ModelSpec(name=name, width=2.0))
    assert again.conv1.weight.shape == (128, 3, 7, 7)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", list(SMALL))
def test_a_model_is_rebuilt_from_its_spec_and_runs(name: str) -> None:
    model = rbdc.build(name, 0.5, **SMALL[name], drop_path_rate=0.1)
    spec = ModelSpec(**json.loads(json.dumps(rbdc.spec_of(model).to_json())))
    assert spec == rbdc.spec_of(model)
    assert shapes(rbdc.build(spec)) == shapes(model)
    assert logits(model, images(model)).shape == (3, 5)


def test_small_images_of_one_channel() -> None:
    for name, extra in (
        ("deit_tiny_patch16_224", {"patch_size": 4, "embed_dim": 64, "num_heads": 4, "depth": 3}),
        ("resnet18d", {"channels": (16, 32, 64, 128), "stem_width": 8}),
    ):
        model: Any = rbdc.build(name, 0.5, img_size=28, in_chans=1, num_classes=10, **extra)
        assert model.pretrained_cfg["input_size"] == (1, 28, 28)
        assert logits(model, images(model)).shape == (3, 10)


@pytest.mark.parametrize("name", list(SMALL))
def test_an_empty_model_has_the_shapes_of_a_built_one(name: str) -> None:
    spec = ModelSpec(name=name, width=0.5, arguments=SMALL[name])
    empty = build_empty(spec)
    assert shapes(empty) == shapes(rbdc.build(spec))
    assert not any(tensor.is_meta for tensor in empty.state_dict().values())


def test_buffers_that_no_state_dict_fills_are_not_left_empty() -> None:
    blurred = build_empty(ModelSpec(name="resnetblur18", arguments={"img_size": 32}))
    filt = blurred.get_buffer("layer2.0.aa.filt")
    assert float(filt[0, 0].sum()) == pytest.approx(1)


def test_how_often_an_architecture_can_be_halved() -> None:
    most = {
        "deit_base_patch16_224": 2,
        "deit_tiny_patch16_224": 0,
        "deit3_large_patch16_224": 4,
        "resnet50d": 5,
    }
    for name, steps in most.items():
        check_steps(ModelSpec(name=name), steps)
        with pytest.raises(WidthError, match=f"At most {steps} recursive step"):
            check_steps(ModelSpec(name=name), steps + 1)
    with pytest.raises(WidthError) as caught:
        check_steps(ModelSpec(name="deit_base_patch16_224"), 3)
    assert "num_heads is 12 at full width and would be 1.5 at width 0.125" in str(caught.value)
    assert "At most 2 recursive steps from deit_base_patch16_224" in str(caught.value)


@settings(max_examples=50, deadline=None)
@given(heads=st.integers(1, 24), head_dim=st.sampled_from([8, 16, 64]), steps=st.integers(0, 4))
def test_a_width_is_allowed_exactly_while_heads_stay_whole(
    heads: int, head_dim: int, steps: int
) -> None:
    arguments = SMALL_VIT | {"embed_dim": heads * head_dim, "num_heads": heads}
    spec = ModelSpec(name="deit_tiny_patch16_224", width=0.5**steps, arguments=arguments)
    if heads % 2**steps == 0:
        assert scaled_widths(spec) == {
            "embed_dim": heads * head_dim // 2**steps,
            "num_heads": heads // 2**steps,
        }
    else:
        with pytest.raises(WidthError, match=r"num_heads|embed_dim"):
            scaled_widths(spec)


@pytest.mark.parametrize(
    ("name", "width", "arguments", "expected"),
    [
        ("deit_bas_patch16_224", 1.0, {}, "Did you mean deit_base_patch16_224"),
        ("deit_base_patch16_224", 0.3, {}, "embed_dim is 768 at full width and would be 230.4"),
        ("deit_base_patch16_224", 0.0, {}, "width is 0"),
        ("deit_base_patch16_224", -1.0, {}, "width is -1"),
        ("deit_base_patch16_224", float("inf"), {}, "width is inf"),
        ("deit_base_patch16_224", 1.0, {"img_sise": 32}, "Did you mean img_size?"),
        ("deit_base_patch16_224", 1.0, {"embed_dim": 100, "num_heads": 3}, "timm cannot build"),
        (
            "deit_base_patch16_224",
            1.0,
            {"norm_layer": torch.nn.LayerNorm},
            "cannot be stored as JSON",
        ),
        ("resnet18", 1.0, {"pretrained": True}, "describes only an architecture"),
        ("deit_tiny_patch16_224", 0.5, {}, "num_heads is 3 at full width"),
        ("convnext_atto", 0.3, {}, "can only be halved"),
        ("swin_tiny_patch4_window7_224", 2**-6, {}, "SwinTransformer cannot be built at 1/64"),
        ("torchvision:resnet81", 1.0, {}, "Did you mean"),
    ],
)
def test_what_cannot_be_built_says_why(
    name: str, width: float, arguments: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ModelError) as caught:
        rbdc.build(name, width, **arguments)
    assert expected in str(caught.value)


def test_a_model_that_rbdc_did_not_build_has_no_spec() -> None:
    with pytest.raises(ModelError, match="has no record of what it was built from"):
        rbdc.spec_of(torch.nn.Linear(2, 2))


def test_a_user_registers_a_family_without_editing_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(families, "FAMILIES", [*families.FAMILIES])
    model = timm.create_model("test_convnext")
    own = replace(families.family_of(model), baseline_epochs=7)
    assert families.family_of(model).baseline_epochs != 7
    families.register_family(own)
    assert families.family_of(model) is own
