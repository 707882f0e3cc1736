"""The loader, key by key: used, changed or left, and nothing else."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import rbdc
from rbdc.errors import CheckpointError, ModelError
from rbdc.settings.detection import DetectionRecipe
from rbdc.transfer.backbone import backbone_of, vit_body
from rbdc.transfer.weights import open_classifier
from tests.transfer.scenes import VIT, classifier, resnet

PLAIN, DISTILLED = "deit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"
TOKENS = {PLAIN: ["cls_token"], DISTILLED: ["cls_token", "dist_token"]}
HEADS = {PLAIN: ["head"], DISTILLED: ["head", "head_dist"]}


@pytest.mark.parametrize("name", [PLAIN, DISTILLED])
def test_every_key_of_a_deit_is_accounted_for(name: str) -> None:
    model = classifier(name)
    body, report = vit_body(model, DetectionRecipe())
    layers = [*HEADS[name], "norm"]
    left = {f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}
    assert set(report.left) == left | set(TOKENS[name])
    assert set(report.changed) == {"pos_embed"}
    assert " and ".join(TOKENS[name]) in report.changed["pos_embed"]
    assert sorted([*report.used, *report.changed, *report.left]) == sorted(model.state_dict())
    assert {*report.used, *report.changed} == set(body.state_dict())


@pytest.mark.parametrize("name", [PLAIN, DISTILLED])
def test_used_tensors_are_copies_and_each_patch_keeps_its_position(name: str) -> None:
    model = classifier(name)
    body, report = vit_body(model, DetectionRecipe())
    given, taken = model.state_dict(), body.state_dict()
    for key in report.used:
        assert torch.equal(taken[key], given[key]), key
        assert taken[key].data_ptr() != given[key].data_ptr(), key
    prefix = len(TOKENS[name])
    for row in range(2):
        for column in range(3):
            position = given["pos_embed"][0, prefix + 3 * row + column]
            assert torch.equal(taken["pos_embed"][0, row, column], position)


def test_every_key_of_a_resnet_is_accounted_for() -> None:
    model = resnet()
    for frozen in (True, False):
        backbone: Any
        backbone, report = backbone_of(model, DetectionRecipe(frozen_norms=frozen))
        state = model.state_dict()
        counters = {key for key in state if "num_batches" in key}
        assert set(report.left) == {"fc.weight", "fc.bias"} | (counters if frozen else set())
        assert sorted([*report.used, *report.left]) == sorted(state) and not report.changed
        for key in report.used:
            assert torch.equal(backbone.body.state_dict()[key], state[key])


def test_keys_that_do_not_fit_are_listed_five_of_them() -> None:
    model = classifier(scale_attn_norm=True)
    with pytest.raises(ModelError) as caught:
        vit_body(model, DetectionRecipe())
    keys = [f"blocks.{n}.attn.norm.{kind}" for n in range(3) for kind in ("weight", "bias")]
    for key in keys[:5]:
        assert f"{key} was not expected" in caught.value.problem
    assert keys[5] not in caught.value.problem and "and 1 more" in caught.value.problem
    wide: Any = classifier(depth=1)
    wide.blocks[0].attn.proj = torch.nn.Linear(32, 33)
    with pytest.raises(ModelError, match=r"proj.weight is \(33, 32\), \(32, 32\) was expected"):
        vit_body(wide, DetectionRecipe())


def test_a_file_of_another_architecture_is_refused_with_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(resnet().state_dict(), path)
    with pytest.raises(CheckpointError) as caught:
        open_classifier(path, model=PLAIN, arguments=VIT)
    problem = caught.value.problem
    assert problem.count(" is missing") == 5 and "cls_token is missing" in problem
    assert "more" in problem and "keys were expected" in caught.value.remedy


@pytest.mark.parametrize("name", [PLAIN, DISTILLED])
def test_a_folder_and_a_file_give_the_same_backbone(name: str, tmp_path: Path) -> None:
    model = classifier(name)
    folder = rbdc.export(model, tmp_path / "model")
    file = folder / "model.safetensors"
    opened = [open_classifier(folder), open_classifier(file, model=name, arguments=VIT)]
    expected = vit_body(model, DetectionRecipe())[0].state_dict()
    for one in opened:
        state = vit_body(one, DetectionRecipe())[0].state_dict()
        assert all(torch.equal(state[key], tensor) for key, tensor in expected.items())
