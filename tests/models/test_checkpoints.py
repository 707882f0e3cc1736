"""Checkpoints as training loops leave them, and models that timm built."""

from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import rbdc
from rbdc.cli import main
from rbdc.errors import CheckpointError, ModelError

NAME = "deit_tiny_patch16_224"
WIDTHS = {"embed_dim": 32, "num_heads": 2, "depth": 2, "patch_size": 7}
SIZE: dict[str, Any] = {**WIDTHS, "img_size": 28, "num_classes": 10}
KWARGS = [f"{key}={value}" for key, value in SIZE.items() if key != "num_classes"]
State = Mapping[str, Tensor]


def small(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = timm.create_model(NAME, **SIZE)
    return model


def prefixed(prefix: str, state: State) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in state.items()}


def of_timm(model: nn.Module) -> dict[str, Any]:
    """As `CheckpointSaver` of timm's train.py writes last.pth.tar, with an average of weights."""
    args = Namespace(model=NAME, model_kwargs=WIDTHS, img_size=28, input_size=None, gp=None, lr=0.1)
    optimizer = torch.optim.AdamW(model.parameters()).state_dict()
    average = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    known = {"epoch": 1, "arch": NAME, "args": args, "optimizer": optimizer, "version": 2}
    return {**known, "state_dict": model.state_dict(), "state_dict_ema": average}


def of_lightning(model: nn.Module) -> dict[str, Any]:
    """A module with a compiled model and a metric."""
    state = {**prefixed("model._orig_mod.", model.state_dict()), "metric.total": torch.ones(2)}
    return {"pytorch-lightning_version": "2.6.0", "state_dict": state, "loops": {}}


def of_ddp(model: nn.Module) -> dict[str, Any]:
    return {"model": prefixed("module.", model.state_dict())}


WRITTEN: dict[str, tuple[Callable[[nn.Module], Any], list[str], str]] = {
    "timm": (of_timm, ["--no-ema"], "depth 2, patch_size 7, img_size 28, as timm wrote it, raw"),
    "Lightning": (of_lightning, ["--model", NAME, "--model-kwargs", *KWARGS], "prefix model."),
    "DDP": (of_ddp, ["--model", NAME, "--model-kwargs", *KWARGS], NAME),
}


@pytest.mark.parametrize("by", WRITTEN)
def test_checkpoints_of_training_loops(
    by: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written, options, said = WRITTEN[by]
    models = small(1), small(2)
    for name, model in zip("ab", models, strict=True):
        torch.save(written(model), tmp_path / f"{name}.ckpt")
    command = ["couple", *(str(tmp_path / f"{name}.ckpt") for name in "ab")]
    assert main([*command, "--output", str(tmp_path / "wide"), *options]) == 0
    printed = capsys.readouterr().out
    assert "embed_dim 32 -> 64" in printed and "num_heads 2 -> 4" in printed and said in printed
    wide = rbdc.load(tmp_path / "wide")
    assert rbdc.verify_coupling(*models, wide, torch.randn(2, 3, 28, 28)).holds


def test_weights_that_are_averaged_are_used_and_named(tmp_path: Path) -> None:
    torch.save(of_timm(small(1)), tmp_path / "last.pth.tar")
    raw = rbdc.load(tmp_path / "last.pth.tar", use_ema=False).state_dict()
    average = rbdc.load(tmp_path / "last.pth.tar").state_dict()
    assert all(torch.equal(average[name], raw[name] + 1) for name in raw)


def test_torchvisions_checkpoint_with_an_average(tmp_path: Path) -> None:
    """As the references of torchvision write it; their average counts its updates."""
    model = torchvision.models.resnet18(num_classes=3)
    args = Namespace(model="resnet18", data_path="x", weights=None)
    average = AveragedModel(model).state_dict()
    torch.save({"model": model.state_dict(), "model_ema": average, "args": args}, tmp_path / "x")
    loaded = rbdc.load(tmp_path / "x")
    assert rbdc.spec_of(loaded).name == "torchvision:resnet18"
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(loaded.eval()(x), model.eval()(x))
    rbdc.export(loaded, tmp_path / "folder")
    assert torch.equal(rbdc.load(tmp_path / "folder").eval()(x), model(x))


def test_a_folder_of_transformers_wrapper_of_timms_models(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.TimmWrapperConfig(
        architecture=NAME, num_labels=10, model_args={k: v for k, v in SIZE.items() if k[0] != "n"}
        | {"num_heads": 2},
    )  # fmt: skip
    wrapper = transformers.TimmWrapperForImageClassification(config)
    wrapper.save_pretrained(tmp_path / "hub")
    loaded = rbdc.load(tmp_path / "hub").state_dict()
    assert all(torch.equal(t, loaded[k]) for k, t in wrapper.timm_model.state_dict().items())


def test_checkpoints_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    torch.save(of_lightning(small(1)), path)
    with pytest.raises(CheckpointError, match="another module than resnet18"):
        rbdc.load(path, model="resnet18")
    state = small(1).state_dict()
    twice = {**prefixed("student.", state), **prefixed("teacher.", state)}
    torch.save({"state_dict": twice}, path)
    with pytest.raises(CheckpointError, match=r"holds 2 models like .*: student\., teacher\."):
        rbdc.load(path, model=NAME, arguments=SIZE)
    torch.save(state, path)
    with pytest.raises(CheckpointError, match="not the name of their model"):
        rbdc.load(path)


TIMMS: list[tuple[str, dict[str, Any], dict[str, Any] | None]] = [
    (NAME, SIZE, None),
    ("resnet18d", {"channels": (8, 16, 32, 64), "stem_width": 8, "num_classes": 3}, None),
    ("convnext_atto", {"num_classes": 3}, None),
    ("convnext_atto", {"depths": (1, 1, 2, 1)}, {"depths": (1, 1, 2, 1)}),
]


@pytest.mark.parametrize(("name", "created", "given"), TIMMS)
def test_any_model_of_timm_is_exported(
    name: str, created: dict[str, Any], given: dict[str, Any] | None, tmp_path: Path
) -> None:
    model = timm.create_model(name, **created).eval()
    rbdc.export(nn.DataParallel(model), tmp_path / "model", arguments=given)
    x = torch.randn(1, 3, *(created.get("img_size", 64),) * 2)
    for loaded in (
        rbdc.load(tmp_path / "model"),
        timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True),
    ):
        assert torch.equal(loaded.eval()(x), model(x))


def test_models_that_cannot_be_exported(tmp_path: Path) -> None:
    other = timm.create_model("convnext_atto", depths=(1, 1, 2, 1))
    with pytest.raises(ModelError, match=r"another model than this one: depth of stages.0.blocks"):
        rbdc.export(other, tmp_path / "x")
    with pytest.raises(ModelError, match="this Linear has no record"):
        rbdc.export(nn.Linear(2, 2), tmp_path / "x")
    assert not (tmp_path / "x").exists()
