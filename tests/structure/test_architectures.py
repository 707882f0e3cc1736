"""Architectures of timm and torchvision: each is halved, coupled and proved on random weights."""

from contextlib import suppress
from typing import Any

import pytest

from rbdc.errors import CouplingError, WidthError
from rbdc.models import ModelSpec, shapes_of
from rbdc.models.explain import explain

pytestmark = pytest.mark.numeric

EXACT: dict[str, dict[str, Any]] = {
    "cait_xxs24_224": {"depth": 1, "img_size": 64},
    "coatnet_nano_rw_224": {"img_size": 64},
    "convnext_atto": {"img_size": 64, "depths": [1, 1, 2, 1]},
    "convnext_atto_ols": {"img_size": 64, "depths": [1, 1, 1, 1]},  # rounds its stem's channels
    "convnextv2_atto": {"img_size": 64, "depths": [1, 1, 1, 1]},
    "cspresnet50": {"img_size": 64},
    "densenet121": {"img_size": 64, "block_config": [2, 2, 2, 2]},
    "dla34": {"img_size": 64},
    "edgenext_xx_small": {"img_size": 64, "depths": [2, 2, 2, 2]},
    "efficientnet_b0": {"img_size": 64},
    "fastvit_t8": {"img_size": 64, "layers": [1, 1, 1, 1]},
    "ghostnet_050": {"img_size": 64},
    "hrnet_w18_small": {"img_size": 64},
    "levit_128s": {"depth": [1, 1, 1]},
    "lowformer_b0": {"img_size": 64, "depth_list": [0, 1, 1, 1, 1]},  # remembers heads
    "mobilenetv3_small_100": {"img_size": 64},
    "pit_ti_224": {"heads": [2, 4, 8], "img_size": 64},
    "poolformer_s12": {"img_size": 64},
    "repvgg_a0": {"img_size": 64},
    "resnet50_gn": {"img_size": 64, "layers": [1, 1, 1, 1]},  # groups of norms double
    "resnext50_32x4d": {"img_size": 64, "layers": [1, 1, 1, 1]},
    "skresnet18": {"img_size": 64, "layers": [1, 1, 1, 1]},
    "swin_tiny_patch4_window7_224": {"num_heads": [2, 4, 8, 16], "embed_dim": 64, "img_size": 56,
                                     "depths": [2, 2, 1, 1]},
    "tinynet_e": {"img_size": 64},
    "torchvision:regnet_y_400mf": {"img_size": 64},
    "torchvision:mobilenet_v3_small": {"img_size": 64},
    "vit_relpos_medium_patch16_224": {"img_size": 64, "depth": 1},  # an MLP of fixed size
    "xcit_nano_12_p16_224": {"depth": 1, "img_size": 64},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("deit_tiny_patch16_224", {"depth": 1, "img_size": 64}),  # three heads
        ("rexnet_100", {"img_size": 64}),  # odd numbers of channels
        (
            "coat_lite_tiny",
            {"img_size": 64, "serial_depths": [1, 1, 1, 1]},
        ),  # heads that are distributed over windows
    ],
)
def test_what_cannot_be_halved_couples_into_twice_its_width(
    name: str, arguments: dict[str, Any]
) -> None:
    named = ModelSpec(name=name, arguments=arguments)
    with suppress(WidthError):
        assert not explain(named).proof.holds
    doubled = explain(named.scaled(2))
    assert doubled.proof.holds and doubled.proof.error < 1e-9 and not doubled.structure.inexact
    assert dict(shapes_of(doubled.spec.scaled(0.5))).keys() == dict(shapes_of(named)).keys()


@pytest.mark.parametrize("name", EXACT)
def test_these_couple_exactly(name: str) -> None:
    found = explain(ModelSpec(name=name, arguments=EXACT[name]))
    assert not found.structure.inexact
    assert found.proof.holds and found.proof.error < 1e-9
    assert bool(found.proof.drift > 1e-9) == bool(found.structure.joint)


@pytest.mark.parametrize(
    ("name", "arguments", "cause"),
    [
        ("eca_resnet33ts", {"img_size": 64}, "both branches share it"),
        ("gmlp_ti16_224", {"img_size": 64}, "both branches share it"),
        ("swin_tiny_patch4_window7_224", {"img_size": 56, "depths": [1, 1, 1, 1]}, "mixes"),
        ("pvt_v2_b0", {"img_size": 64, "depths": [1, 1, 1, 1]}, "mixes the branches"),
        ("torchvision:squeezenet1_1", {"img_size": 64}, "relu in classifier.2 follows the mean"),
    ],
)
def test_these_do_not_and_say_why(name: str, arguments: dict[str, Any], cause: str) -> None:
    found = explain(ModelSpec(name=name, arguments=arguments))
    assert any(cause in text for text in found.structure.inexact.values())
    assert not found.proof.holds and found.proof.error > 1e-4


def test_what_has_no_layout_or_no_half_is_refused() -> None:
    with pytest.raises(CouplingError, match="axis 0 doubles, but both branches use it"):
        explain(ModelSpec(name="mixer_s32_224", arguments={"img_size": 64}))
    with pytest.raises(WidthError, match="cannot be built at 1/2"):
        explain(ModelSpec(name="rexnet_100"))
