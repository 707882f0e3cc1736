"""Models that no family names are trained like any other: halved, coupled, carried, resumed."""

import json
from pathlib import Path

import pytest
import timm
import torch

import rbdc
from rbdc.cli import main

pytestmark = pytest.mark.numeric
SHORT = [
    "--steps=1", "--epochs=0.01", "--rounding=none", "--no-with-baseline", "--batch-size=16",
    "--opt=adamw", "--device=cpu", "--workers=0", "--img-size=32", "--jobs=1", "--aa=",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("convnext_atto", ["dims=[8,8,16,16]", "depths=[1,1,1,1]"]),  # halved by its arguments
        ("lcnet_035", []),  # halved by its layers
    ],
)
def test_a_model_without_a_family_trains_and_timm_loads_it(
    name: str, arguments: list[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    kwargs = ["--model-kwargs", *arguments] if arguments else []
    assert main(["train", f"--model={name}", *kwargs, *SHORT, f"--output={run}"]) == 0
    coupling = json.loads(next(run.glob("jobs/coupling-*/result.json")).read_text())
    assert coupling["proof_error"] < 1e-5
    ours, theirs = rbdc.load(run / "model"), timm.create_model(
        f"local-dir:{run / 'model'}", pretrained=True
    )  # fmt: skip
    x = torch.randn(1, 1, 32, 32)
    with torch.no_grad():
        assert torch.equal(ours.eval()(x), theirs.eval()(x))
    assert main(["train", f"--model={name}", *kwargs, *SHORT, f"--output={run}"]) == 0  # finished
