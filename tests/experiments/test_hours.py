"""A training whose budget is in hours: planned at the speeds of its device, and resumed so."""

import json
from pathlib import Path
from typing import Any

import pytest

import rbdc
from rbdc.cli import main
from rbdc.experiments import speeds as module
from rbdc.plan import LevelSpeed, Speeds
from rbdc.settings import Machine, read_recipe, split_settings
from rbdc.training import Task

SETTINGS: dict[str, Any] = {"baseline_epochs": 4.0, "rounding": "none", "with_baseline": False}


class Measured:
    """Stands for measuring: narrow models are `factor` times as fast as those twice as wide."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
        self.factor, self.calls = factor, 0
        monkeypatch.setattr(module, "measured_speeds", self)

    def __call__(self, tasks: list[Task], _machine: Machine, **_: Any) -> Speeds:
        self.calls += 1
        return Speeds(
            device="a device",
            levels=tuple(
                LevelSpeed(
                    model=task.model,
                    images_per_second=100 * self.factor**level,
                    source="measured",
                )
                for level, task in enumerate(tasks)
            ),
        )


def prepared(folder: Path, **given: Any) -> rbdc.Training:
    settings = SETTINGS | {"data": str(folder), "in_memory": True, "batch_size": 8} | given
    return rbdc.prepare(*split_settings(read_recipe("demo"), settings))


def test_hours_are_measured_only_where_they_are_needed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Measured(monkeypatch, 2.0)
    plain = prepared(folder, budget=1.0)
    assert measured.calls == 0 and plain.hours is None and "speeds" not in plain.run().identity
    timed = prepared(folder, budget_time=0.5)
    assert measured.calls == 1 and timed.hours is not None
    assert timed.hours.ratio == pytest.approx(0.5)
    hours = prepared(folder, budget_hours=timed.hours.total)
    assert hours.plan.target.epochs == pytest.approx(timed.plan.target.epochs)


def test_steps_auto_takes_the_fewest_hours(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Measured(monkeypatch, 16.0)
    fast = prepared(folder, budget=1.0, steps="auto", baseline_epochs=40.0)
    assert [each.plan.steps for each in fast.by_steps] == list(range(len(fast.by_steps)))
    assert fast.plan.steps > 0 and fast.plan.steps == len(fast.plan.stages) - 1
    Measured(monkeypatch, 1.0)
    assert prepared(folder, budget=1.0, steps="auto").plan.steps == 0
    with pytest.raises(ValueError, match="no FLOPs are given"):
        prepared(folder, epochs=3.0, steps="auto")


def test_a_run_goes_on_with_the_speeds_it_began_with(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = SETTINGS | {"data": str(folder), "in_memory": True, "batch_size": 8, "steps": 1}
    machine = Machine(device="cpu", threads=1, workers=0, tensorboard=False)

    def train() -> Any:
        return rbdc.train(tmp_path / "run", machine=machine, jobs=1, budget_time=0.5, **given)

    Measured(monkeypatch, 2.0)
    first = train()
    other = Measured(monkeypatch, 3.0)  # the machine is busier now
    assert train()["planned_flops"] == first["planned_flops"]
    assert other.calls == 0
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["identity"]["speeds"]["levels"][1]["images_per_second"] == 200


def test_train_takes_a_table(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "speeds.csv"
    table.write_text("model,train_samples_per_sec\nresnet18d,2129.12\n")
    options = ["train", "--model=resnet18d", f"--data={folder}", "--dry-run", "--device=cpu",
               "--batch-size=8", "--rounding=none", f"--output={tmp_path / 'run'}",
               f"--speeds={table}"]  # fmt: skip
    assert main([*options, "--steps=0", "--budget-time=0.5"]) == 0
    assert "0.500 of standard training's" in capsys.readouterr().out
    assert main([*options, "--steps=1", "--budget-time=0.5"]) == 2
    assert "no row for resnet18d at width 0.5" in capsys.readouterr().err
    assert main([*options, "--measure-again", "--budget-time=0.5"]) == 2
    assert "given twice" in capsys.readouterr().err
