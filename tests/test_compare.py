"""`rbdc compare` and `rbdc reproduce`, as a user meets them."""

import json
import time
from pathlib import Path

import pytest

from rbdc.cli import main
from tests.support import TINY, forked_command

RESNET = "resnet18d"


def command(folder: Path, output: Path, *more: str) -> list[str]:
    arguments = [f"{key}={value}".replace(" ", "") for key, value in TINY[RESNET].items()]
    words = (
        f"compare --model {RESNET} --data {folder} --in-memory --baseline-epochs 4 --batch-size 8 "
        f"--lr 0.001 --warmup-epochs 1 --scale null --color-jitter 0 --crop-padding 2 --seeds 1 "
        f"--threads 1 --jobs 1 --no-tensorboard --output {output}"
    )
    return [*words.split(), "--model-kwargs", *arguments, *more]


def test_tuned_stopped_and_gone_on_with(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A signal in the middle leaves the table of what there is, and 75; then it ends."""
    output = tmp_path / "run"
    words = command(
        folder, output, "--protocols=gradmax,rbdc:1", "--budgets=1.0", "--tune=0.0005,0.002"
    )
    process, said = forked_command(words, tmp_path / "said.txt"), tmp_path / "said.txt"
    begun = "rbdc:1 1 seed 0: 1.0"
    while begun not in said.read_text() and process.is_alive():
        time.sleep(0.02)
    process.terminate()
    process.join()
    _, _, rest = said.read_text().partition(begun)
    assert process.exitcode == 75
    assert "not yet" in rest and "tuned on held-out data" in rest
    assert main(words) == 0
    text = capfd.readouterr().out
    assert "6 trials of 21 jobs" in text
    assert "already trained" in text and "not yet" not in text
    assert "picture" in text and (output / "accuracy-flops.svg").exists()
    assert main(["status", str(output)]) == 0


def test_it_says_what_it_costs_and_writes_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command(folder, tmp_path / "run", "--dry-run", "--protocols", "net2net,random")
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "4 trials of 10 jobs" in text and "sharing jobs saves" in text
    assert not (tmp_path / "run").exists()


def test_protocols_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--protocols", "list"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("standard", "rbdc", "mixture-growth", "after a colon"))


def test_a_summary_for_programs(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--json", "--protocols=standard", "--budgets=0.5", "--standard-budgets=1.0")
    assert main(command(folder, tmp_path / "run", *more)) == 0
    summary = json.loads(capsys.readouterr().out)
    assert [row["budget"] for row in summary["rows"]] == [0.5, 1.0]


BAD = {
    "protocol": (["--protocols=net3net"], "Did you mean net2net"),
    "number": (["--budgets=half"], "--budgets got half, expected numbers"),
    "nothing": (["--budgets=,"], "budgets are ()"),
    "budget": (["--budgets=0.001"], "would train its target for"),
    "rate": (["--tune=-1"], "learning rates (-1.0,)"),
    "seeds": (["--seeds=0"], "seeds 0"),
}


@pytest.mark.parametrize(("more", "expected"), BAD.values(), ids=BAD)
def test_a_mistake_is_two_lines_and_nothing_is_written(
    more: list[str], expected: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(folder, tmp_path / "run", *more)) == 2
    errors = capsys.readouterr().err
    assert len(errors.strip().splitlines()) == 2 and expected in errors
    assert not (tmp_path / "run").exists()


def test_experiments_at_their_scales(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    speed = "--images-per-second=1000"
    assert main(["reproduce", "efficiency", "--scale=paper", "--dry-run", speed]) == 0
    text = capsys.readouterr().out
    assert "30 % fewer FLOPs" in text and "device-hours at 1,000.0 images/s" in text
    assert "vit_large_patch16_224" in text and not list(tmp_path.iterdir())
    assert main(["reproduce", "padding", "--dry-run", "--threads=1"]) == 0
    assert "measured here" in capsys.readouterr().out
    assert main(["reproduce", "efficiency", "--scale=paper"]) == 2
    assert "need ImageNet" in capsys.readouterr().err
    assert main(["reproduce", "eficiency"]) == 2
    assert "Did you mean efficiency" in capsys.readouterr().err


def test_a_small_experiment_runs(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = json.dumps({"patch_size": 14, "embed_dim": 16, "num_heads": 4, "depth": 2})
    settings = ["batch_size=8", "baseline_epochs=2", "warmup_epochs=0.2", f"model_kwargs={model}"]
    words = ["reproduce", "padding", "--seeds=1", "--threads=1", "--jobs=1", "--data", str(folder)]
    assert main([*words, "--output", str(tmp_path / "out"), "--set", *settings]) == 0
    text = capsys.readouterr().out
    assert "rbdc:1:random" in text and "8 / 16" not in text
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"r1", "r2"}
    summary = json.loads((tmp_path / "out" / "r2" / "result.json").read_text())
    assert [row["epochs"]["1"][0] for row in summary["rows"][::2]] == pytest.approx([2, 4, 8])
