"""`rbdc train` and `rbdc status`, as a user meets them."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rbdc.cli import main
from tests.support import TINY, forked_command, own_copy

RESNET = "resnet18d"


def command(folder: Path, output: Path, *more: str) -> list[str]:
    arguments = [f"{key}={value}".replace(" ", "") for key, value in TINY[RESNET].items()]
    words = (
        f"train --model {RESNET} --data {folder} --in-memory --steps 1 --epochs 4 --batch-size 8 "
        f"--lr 0.001 --warmup-epochs 1 --scale null --color-jitter 0 --crop-padding 2 "
        f"--threads 1 --jobs 1 --output {output}"
    )
    return [*words.split(), "--model-kwargs", *arguments, *more]


def weights(output: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(output / "model" / "model.safetensors"))


@pytest.fixture(scope="module")
def straight(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(output: Path) -> None:
        assert main(command(folder, output, "--with-baseline")) == 0

    return own_copy(tmp_path_factory, "commanded", make)


def test_it_ends_with_both_accuracies_and_where_to_look(
    folder: Path, straight: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(folder, straight, "--with-baseline")) == 0  # finished: says so again
    output = capsys.readouterr().out
    result = json.loads((straight / "result.json").read_text())
    assert f"RBDC:      top-1 {result['metrics']['top1']:.2%}" in output
    assert f"standard:  top-1 {result['standard']['metrics']['top1']:.2%}" in output
    assert "already trained" in output and f"rbdc status {straight}" in output
    assert f"open       {straight}/report.html" in output and (straight / "report.html").exists()
    assert "learning rate 0.001 at a batch of 8" in output
    spent, standard = result["training_flops"], result["standard"]["training_flops"]
    assert standard == pytest.approx(spent, rel=0.05)  # 40 images: an update is a lot
    model = timm.create_model(f"local-dir:{straight / 'model'}", pretrained=True)
    assert model.pretrained_cfg["label_names"][0] == "Ankle boot"


def test_status_shows_the_tree(
    straight: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["status", str(straight)]) == 0
    output = capsys.readouterr().out
    assert output.count("✓") == 5 and "target, width 1" in output and "(100.0%)" in output
    assert main(["status", str(straight), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert {node["state"] for node in status["nodes"]} == {"done"}
    assert status["spent_flops"] == status["result"]["training_flops"]
    assert main(["status", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_logs_for_people(straight: Path) -> None:
    status = json.loads((straight / "run.json").read_text())
    target = next(node for node in status["nodes"] if node["name"] == "target")
    place = straight / target["folder"]
    rows = (place / "summary.csv").read_text().splitlines()
    assert rows[0].startswith("epoch,step,train_loss,lr,top1,top5,loss,flops")
    assert len(rows) == 5
    for axis, expected in (("step", [5, 10, 15, 20]), ("gflops", [0, 0, 0, 0])):
        board = EventAccumulator(str(place / "tensorboard" / axis))
        board.Reload()
        assert [event.step for event in board.Scalars("eval/top1")] == expected
    first = float(rows[1].split(",")[rows[0].split(",").index("flops")])
    leaves = [node["flops"] for node in status["nodes"] if node["level"] == 1 and "flops" in node]
    assert first == pytest.approx(sum(leaves) + target["flops"] / 4)


def test_the_plan_alone(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(folder, tmp_path / "run", "--dry-run")) == 0
    assert "2 × width 0.5" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()
    for wrong in (["--opt=adamww"], ["--batch-size=1000000"], ["--output=/proc/x"]):
        assert main(command(folder, tmp_path / "run", "--dry-run", *wrong)) == 2


def test_a_recipe_file_with_overrides(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("opt: sgd\nlr: 0.5\nbatch-size: 20\nscale: null\ncolor_jitter: 0\n")
    words = [f"--recipe={file}", "--dry-run", "--lr=0.25"]
    kept = [word for word in command(folder, tmp_path / "run") if not word.startswith("--lr")]
    kept.remove("0.001")
    del kept[kept.index("--batch-size") : kept.index("--batch-size") + 2]
    assert main([*kept, *words]) == 0
    assert "recipe" in (output := capsys.readouterr().out)
    assert "sgd, learning rate 0.25 at a batch of 20" in output


def children(pid: int) -> list[int]:
    """And theirs: a server forks the workers."""
    try:
        own = [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
    return own + [grandchild for child in own for grandchild in children(child)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_killed_and_stopped_side_by_side(
    folder: Path, straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The main process is killed: its workers go, too. Then it is stopped: 75. Then it ends."""
    output = tmp_path / "run"
    words = command(folder, output, "--jobs=2", "--workers=0", "--checkpoint-minutes=0")
    words.append("--no-tensorboard")
    process, said = forked_command(words, tmp_path / "killed.txt"), tmp_path / "stopped.txt"
    while not list(output.glob("jobs/*/checkpoints/step-*")) and process.is_alive():
        time.sleep(0.02)
    workers = children(process.pid or 0)
    process.kill()
    process.join()
    assert len(workers) == 4  # two workers, their server, and multiprocessing's tracker
    while any(alive(worker) for worker in workers):
        time.sleep(0.05)

    assert main(["status", str(output)]) == 0
    assert "stopped" in capsys.readouterr().out

    process = forked_command(words, said)
    while "output" not in said.read_text() and process.is_alive():
        time.sleep(0.02)
    while len(children(process.pid or 0)) < 4 and process.is_alive():
        time.sleep(0.02)
    os.killpg(process.pid or 0, signal.SIGUSR1)  # as systemd, Slurm and `timeout` do: to everyone
    process.join()
    assert process.exitcode == 75, said.read_text()
    assert "saved. The same command goes on from there." in said.read_text()

    assert main(words) == 0
    for name, tensor in weights(output).items():
        assert torch.equal(tensor, weights(straight)[name]), name


BAD = {
    "recipe": (["--recipe=diet"], "Did you mean deit"),
    "unknown option": (["--learning-rate=1"], "learning"),
    "type": (["--lr=fast"], "--lr got fast, expected a number or null"),
    "range": (["--smoothing=2"], "smoothing is 2, expected at least 0 and at most 1"),
    "choice": (["--sched=cosin"], "sched"),
    "transition": (["--transition=carrry"], "transition"),
    "one model, several jobs": (["--node=target", "--jobs=2"], "--node trains one model"),
    "data": (["--data=cifar11"], "Did you mean cifar10"),
    "device": (["--device=abacus"], "the device 'abacus' cannot be used"),
    "list": (["--mean", "a"], "mean"),
    "optimizer": (["--opt=adamm"], "Did you mean"),
    "augmentation": (["--aa=rand-q9"], "timm cannot read the augmentation 'rand-q9'"),
    "keep": (["--keep=0"], "keep is 0"),
    "spending twice": (["--budget=1"], "Give exactly one"),
    "jobs": (["--jobs=0"], "jobs is 0"),
    "model": (["--model=resnet18e"], "Did you mean"),
}


@pytest.mark.parametrize(("more", "expected"), BAD.values(), ids=BAD)
def test_a_mistake_is_two_lines_and_nothing_is_written(
    more: list[str], expected: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(folder, tmp_path / "run", *more)) == 2
    errors = capsys.readouterr().err
    assert len(errors.strip().splitlines()) == 2 and errors.startswith("error: ")
    assert expected in errors
    assert not (tmp_path / "run").exists()
