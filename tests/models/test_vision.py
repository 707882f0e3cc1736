"""Image classifiers of Hugging Face transformers: folders in, folders out, and commands."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rbdc
from rbdc.errors import CheckpointError, ModelError
from rbdc.models.coupled import couple_folders
from rbdc.models.vision import TRANSFORMERS, TYPES
from tests.support import randomized

transformers = pytest.importorskip("transformers")

_VIT = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
_STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1]}
SMALL: dict[str, dict[str, Any]] = {
    **{key: {**_VIT, "intermediate_size": 64} for key in ("vit", "deit", "beit", "vit_msn")},
    **dict.fromkeys(("dinov2", "dinov2_with_registers"), _VIT),
    **{key: {**_STAGES, "num_stages": 2, "image_size": 16} for key in ("convnext", "convnextv2")},
    "resnet": {**_STAGES, "embedding_size": 8},
    "regnet": {**_STAGES, "embedding_size": 8, "groups_width": 4},
    "swin": {
        "embed_dim": 16, "depths": [1, 1], "num_heads": [1, 2], "image_size": 16, "patch_size": 2,
        "window_size": 4,
    },
}  # fmt: skip
LABELS = {0: "cat", 1: "dog", 2: "owl"}


def write(folder: Path, kind: str, seed: int, **more: Any) -> nn.Module:
    """Write a folder as a user of transformers does, with random weights and norms."""
    given = {**SMALL[kind], "id2label": LABELS, "label2id": {v: k for k, v in LABELS.items()}}
    config = transformers.CONFIG_MAPPING[kind](**(given | more))
    found = transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING[type(config)]
    model: Any = (found[0] if isinstance(found, tuple) else found)(config)
    randomized(model, seed)
    model.save_pretrained(folder)
    return model.eval()  # type: ignore[no-any-return]


def test_every_type_is_tried() -> None:
    assert set(SMALL) == set(TYPES)


@pytest.mark.parametrize("kind", TYPES)
def test_folders_couple_exactly_and_transformers_loads_the_wide_one(
    kind: str, tmp_path: Path
) -> None:
    for seed, name in enumerate("ab"):
        write(tmp_path / name, kind, seed)
    record = couple_folders(tmp_path / "a", tmp_path / "b", tmp_path / "wide")
    assert record["coupling"]["exact"]
    theirs = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "wide").eval()
    ours: Any = rbdc.load(tmp_path / "wide").eval()
    images = torch.randn(2, *ours.pretrained_cfg["input_size"])
    with torch.no_grad():
        torch.testing.assert_close(theirs(images).logits, ours(images), rtol=0, atol=1e-5)
    assert theirs.config.id2label == LABELS


def test_logits_of_a_model_without_joint_norms_are_the_mean(tmp_path: Path) -> None:
    parents = [write(tmp_path / name, "resnet", seed) for seed, name in enumerate("ab")]
    couple_folders(tmp_path / "a", tmp_path / "b", tmp_path / "wide")
    wide = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "wide").eval()
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        mean = sum(parent(images).logits for parent in parents) / 2
        torch.testing.assert_close(wide(images).logits, mean, rtol=1e-5, atol=1e-5)


def test_pixels_are_normalized_as_the_folder_says(tmp_path: Path) -> None:
    write(tmp_path / "a", "vit", 0)
    about = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.5, 0.2], "do_resize": True}
    (tmp_path / "a" / "preprocessor_config.json").write_text(json.dumps(about))
    model = rbdc.load(tmp_path / "a")
    rbdc.export(model, tmp_path / "again")
    written = json.loads((tmp_path / "again" / "preprocessor_config.json").read_text())
    assert written["image_mean"] == about["image_mean"]
    assert written["image_std"] == about["image_std"]
    assert written["size"] == {"height": 16, "width": 16}
    again = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "again")
    for key, value in again.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[key], rtol=0, atol=0)


@pytest.mark.parametrize("step", ["explain", "plan --budget 0.5"])
def test_commands_take_such_a_model(step: str, capsys: pytest.CaptureFixture[str]) -> None:
    from rbdc.cli import main

    kwargs = [f"{key}={value}" for key, value in SMALL["vit"].items() if key != "image_size"]
    words = [f"{TRANSFORMERS}vit", "--model-kwargs", "img_size=16", *kwargs]
    command, *more = step.split()
    assert not main([command, *words, *more])
    assert "vit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"model_type": "sam"}, "sam"),
        ({"hidden_size": 48}, "fit|is \\(|mismatched"),
        ({"num_hidden_layers": 2}, "missing"),
        ({"auto_map": {"AutoModel": "code.Model"}}, "trust_remote_code"),
        ({"hidden_act": "../x"}, "no plain name"),
        ({"image_size": "large"}, "image_size|img_size"),
        ({"id2label": {"first": "cat"}}, "id2label"),
        ({"id2label": ["cat", "dog"]}, "id2label"),
        ({"num_hidden_layers": 10**6}, "beyond"),
    ],
)
def test_damaged_folders_are_refused(damage: dict[str, Any], said: str, tmp_path: Path) -> None:
    write(tmp_path / "a", "vit", 0)
    config = tmp_path / "a" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | damage))
    with pytest.raises((CheckpointError, ModelError), match=said):
        rbdc.load(tmp_path / "a")


def test_unknown_classifiers_are_named() -> None:
    with pytest.raises(ModelError, match="transformers has no model called 'vitt'") as caught:
        rbdc.build("transformers:vitt")
    assert "vit" in caught.value.remedy
