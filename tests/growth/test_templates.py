"""Weights as mixtures of templates: the same model, and an ordinary one when it is folded."""

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import rbdc
from rbdc.growth.mixture_growth import Templates, mixtures_of
from rbdc.models import fold_parametrizations
from tests.support import SMALL, images, logits, randomized

pytestmark = [pytest.mark.numeric, pytest.mark.usefixtures("double_precision")]
PLAIN = {
    "deit_tiny_patch16_224": {"patch_embed.proj", "head"},
    "deit_tiny_distilled_patch16_224": {"patch_embed.proj", "head", "head_dist"},
    "resnet18d": {"conv1.0", "fc"},
    "resnet50d": {"conv1.0", "fc"},
}
"""The layers with an image at one end, or classes at the other."""


def templated(name: str, count: int = 2, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = Templates(count=count).apply(rbdc.build(name, 0.5, **SMALL[name]))
    generator = torch.Generator().manual_seed(seed)
    for part in model.parameters():  # as if trained: nothing is where it started
        part.data += 0.1 * part.data.std() * torch.randn(part.shape, generator=generator)
    return model


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", PLAIN)
def test_folded_it_is_the_same_function_and_an_ordinary_model(
    name: str, count: int, tmp_path: Path
) -> None:
    model = templated(name, count)
    before = copy.deepcopy(model.state_dict())
    plain = fold_parametrizations(model)
    x = images(model)
    torch.testing.assert_close(logits(plain, x), logits(model, x), rtol=0, atol=1e-10)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    for folder, exported in ((tmp_path / "plain", plain), (tmp_path / "folded", model)):
        rbdc.export(exported, folder)
        loaded = timm.create_model(f"local-dir:{folder}", pretrained=True)
        assert torch.equal(logits(loaded, images(model)), logits(plain, images(model)))


@pytest.mark.parametrize("name", PLAIN)
def test_every_layer_has_templates_but_those_at_the_ends(name: str) -> None:
    model = templated(name)
    layers = {
        path
        for path, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear | torch.nn.Conv2d)
    }
    mixtures = mixtures_of(model.state_dict())
    assert {weight.removesuffix(".weight") for weight in mixtures} == layers - PLAIN[name]


@pytest.mark.parametrize("count", [2, 4])
def test_coefficients_start_as_a_row_of_an_orthogonal_matrix(count: int) -> None:
    torch.manual_seed(0)
    model = Templates(count=count).apply(rbdc.build("resnet18d", 0.5, **SMALL["resnet18d"]))
    mixtures = mixtures_of(model.state_dict())
    for name, mixed in mixtures.items():
        torch.testing.assert_close(mixed.rows @ mixed.rows.T, torch.eye(count))
        assert torch.equal(mixed.coefficients, mixed.rows[0]) and len(mixed.templates) == count
        assert not torch.equal(*mixed.templates[:2]), name
    wide = mixtures["layer4.1.conv2.weight"]  # large enough to measure
    fan = wide.templates[0][0].numel()
    for tensor in (*wide.templates, wide.weight()):
        assert float(tensor.std()) == pytest.approx((2 / fan) ** 0.5, rel=0.1)
    assert len({mixed.rows.flatten().sum().item() for mixed in mixtures.values()}) > 1


def test_a_plain_model_is_folded_already() -> None:
    model = randomized(rbdc.build("resnet18d", 0.5, **SMALL["resnet18d"]), 1)
    assert fold_parametrizations(model) is model


def test_what_a_model_carries_goes_with_it() -> None:
    model = templated("deit_tiny_patch16_224")
    model.pretrained_cfg.update(label_names=list("abcde"), mean=(0.1, 0.2, 0.3))
    record: Any = fold_parametrizations(model).pretrained_cfg
    assert record["label_names"] == list("abcde") and record["mean"] == (0.1, 0.2, 0.3)


def test_channels_last() -> None:
    model = templated("resnet18d").to(memory_format=torch.channels_last)
    x, plain = images(model), fold_parametrizations(model)
    torch.testing.assert_close(logits(plain, x), logits(model, x), rtol=0, atol=1e-10)
