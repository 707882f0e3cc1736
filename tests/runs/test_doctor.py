"""`rbdc doctor` finds every damage, and after `--repair` the same command gives the same bits."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rbdc.cli import main
from rbdc.runs.doctor import find_damage, repair
from tests.runs.test_run import small_tree
from tests.support import started

Spoil = Callable[[Path], object]


@pytest.fixture(scope="module")
def done(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "done"
    again(folder, output)
    return output


def again(folder: Path, output: Path, **settings: Any) -> None:
    tree = small_tree(folder, steps=1, epochs=1.0, rounding="none", **settings)
    started(tree, output, jobs=1)


def bits(output: Path) -> dict[str, bytes]:
    """Return the weights of all models, and all scores."""
    weights = {str(p.relative_to(output)): p.read_bytes() for p in output.rglob("*.safetensors")}
    nodes = json.loads((output / "result.json").read_text())["nodes"]
    scores = {name: json.dumps(node["metrics"]).encode() for name, node in nodes.items()}
    return weights | scores


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 1
    path.write_bytes(content)


def of_target(name: str) -> Spoil:
    return lambda run: flip(next(run.glob("jobs/resnet18d-w1-*")) / name)


DAMAGE: dict[str, tuple[Spoil, list[str]]] = {
    "run.json": (lambda run: flip(run / "run.json"), ["run.json"]),
    "result.json": (lambda run: flip(run / "result.json"), ["result.json"]),
    "model": (lambda run: flip(run / "model/model.safetensors"), ["model"]),
    "classes": (lambda run: flip(run / "model/config.json"), ["model"]),
    "a score": (of_target("result.json"), ["resnet18d-w1"]),
    "weights": (of_target("model/model.safetensors"), ["resnet18d-w1"]),
    "weights gone": (
        lambda run: shutil.rmtree(next(run.glob("jobs/resnet18d-w1-*")) / "model"),
        ["resnet18d-w1"],
    ),
    "start": (
        lambda run: flip(next(run.glob("jobs/coupling-*/start/state.safetensors"))),
        ["coupling"],
    ),
    "optimizer": (
        lambda run: flip(next(run.glob("jobs/*-w0.5-*/saved_for_growth/state.json"))),
        ["resnet18d-w0.5"],
    ),
    "job.json": (of_target("job.json"), ["job.json"]),
    "nothing": (lambda _run: None, []),
}


@pytest.mark.parametrize(("spoil", "removed"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_found_and_removed_and_computed_again(
    spoil: Spoil, removed: list[str], done: Path, folder: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(done, tmp_path / "run"))
    spoil(run)
    found = [damage.remove.name for damage in find_damage(run)]
    assert len(found) == len(removed)
    assert all(name.startswith(start) for name, start in zip(found, removed, strict=True))
    assert [damage.remove.name for damage in repair(run)] == found
    assert find_damage(run) == []
    again(folder, run)
    assert bits(run) == bits(done)


def test_models_that_were_trained_as_one_are_trained_again_together(
    folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    again(folder, run, fuse="on")
    before = bits(run)
    leaves = {path.name for path in run.glob("jobs/resnet18d-w0.5-*")}
    flip(next(run.glob("jobs/resnet18d-w0.5-*/model/model.safetensors")))
    assert {damage.remove.name for damage in repair(run)} == leaves and len(leaves) == 2
    again(folder, run, fuse="on")
    assert bits(run) == before


def test_the_command(done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(done)]) == 0
    assert "nothing is damaged" in capsys.readouterr().out
    run = Path(shutil.copytree(done, tmp_path / "run"))
    of_target("result.json")(run)
    assert main(["doctor", str(run)]) == 2
    said = capsys.readouterr()
    assert "this job, from its start" in said.out and "1 thing damaged" in said.err
    assert main(["doctor", str(run), "--repair"]) == 0
    assert main(["doctor", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
