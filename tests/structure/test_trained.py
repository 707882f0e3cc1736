"""Models that no family names are trained like any other: halved, coupled, carried, resumed."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import rbdc
from rbdc.cli import main
from rbdc.training.state import State
from tests.support import forked

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
        (
            "swin_tiny_patch4_window7_224",
            ["embed_dim=16", "num_heads=[2,2,4,4]", "depths=[1,1,1,1]", "window_size=2"],
        ),
        ("test_efficientnet", []),
        ("regnetx_002", []),
    ],
)
def test_a_model_without_a_family_is_killed_goes_on_and_timm_loads_it(
    name: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    kwargs = ["--model-kwargs", *arguments] if arguments else []
    words = ["train", f"--model={name}", *kwargs, *SHORT, f"--output={run}"]
    assert main([*words, "--dry-run"]) == 0 and not run.exists()
    update = State.update

    def killed(self: Any, micro: Any) -> Any:
        if [*run.glob("jobs/coupling-*/result.json")]:  # the first step of the wide model
            os.kill(os.getpid(), signal.SIGKILL)
        return update(self, micro)

    with monkeypatch.context() as patch:
        patch.setattr(State, "update", killed)
        process = forked(_main, words)
        process.join()
    assert process.exitcode == -signal.SIGKILL
    finished = {path: path.stat().st_mtime_ns for path in run.glob("jobs/*/result.json")}
    assert len(finished) == 3  # two models of half the width, and their coupling
    assert main(words) == 0
    assert finished == {path: path.stat().st_mtime_ns for path in finished}
    coupling = json.loads(next(run.glob("jobs/coupling-*/result.json")).read_text())
    assert coupling["exact"] and coupling["method"]["transition"] == "carry"
    ours, theirs = rbdc.load(run / "model"), timm.create_model(
        f"local-dir:{run / 'model'}", pretrained=True
    )  # fmt: skip
    x = torch.randn(1, 1, 32, 32)
    with torch.no_grad():
        assert torch.equal(ours.eval()(x), theirs.eval()(x))


def _main(words: list[str]) -> None:
    main(words)


class Own(nn.Module):
    """A packed layer (values and gates), and channels that are shuffled between two groups."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.stem, self.packed = nn.Linear(5, dim), nn.Linear(dim, 2 * dim)
        self.grouped = nn.Conv1d(dim, dim, 1, groups=2)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 3)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.packed(self.stem(x)).chunk(2, dim=-1)
        shuffled = (value * gate.sigmoid()).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        logits: Tensor = self.head(self.norm(self.grouped(shuffled.mT).mT).mean(dim=1))
        return logits


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(8, 6, 5, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), torch.arange(8) % 3).backward()
        optimizer.step()


def test_a_module_of_the_users_own_is_carried_and_goes_on_with_the_same_bits(
    tmp_path: Path,
) -> None:
    narrow = rbdc.narrow(lambda: Own(dim=16))
    parents: list[Any] = [narrow(), narrow()]
    trained = [_optimizer(model) for model in parents]
    for seed, model in enumerate(parents):
        _train(model, trained[seed], range(10 * seed, 10 * seed + 2))
    x = torch.randn(2, 6, 5)
    wide = rbdc.couple(*parents, into=Own(dim=16), example=x)
    proof = rbdc.verify_coupling(parents[0], parents[1], wide, x)
    assert proof.holds and proof.drift > 0
    models: Any = (*parents, wide)
    optimizer = rbdc.couple_optimizers(*trained, into=_optimizer(wide), models=models, example=x)
    moment = optimizer.state[wide.get_parameter("packed.weight")]["exp_avg"]
    assert moment.any() and moment.shape == (32, 16)
    _train(wide, optimizer, range(20, 22))
    torch.save({"model": wide.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    _train(wide, optimizer, range(22, 24))
    again = Own(dim=16)  # after the process was killed: nothing of ours is needed
    other, saved = _optimizer(again), torch.load(tmp_path / "x.pt", weights_only=True)
    again.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    _train(again, other, range(22, 24))
    assert all(torch.equal(t, wide.state_dict()[n]) for n, t in again.state_dict().items())
