"""Measured speeds: what is remembered, under what, and what is not trusted."""

import json
import multiprocessing.forkserver
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rbdc.jobs import engine, measure, speeds
from rbdc.jobs.engine import start_server
from rbdc.jobs.measure import Measurement, measure_training, median_seconds, with_threads
from rbdc.jobs.speeds import measured_speeds
from rbdc.models import ModelSpec
from rbdc.plan import Growth
from rbdc.settings import Machine, Recipe
from rbdc.training import Task, image_format
from tests.support import SMALL_VIT, forked, small_data

SPEC = ModelSpec(name="deit_tiny_patch16_224", arguments={**SMALL_VIT, "in_chans": 3})
RECIPE = Recipe(batch_size=8)
MACHINE = Machine(device="cpu", threads=1)


def tasks(recipe: Recipe = RECIPE) -> list[Task]:
    image = image_format(SPEC, recipe, small_data())
    return [
        Task(model=model, recipe=recipe, image=image, epochs=1, seed=0, data_seed=0,
             warmup_epochs=0)
        for model in Growth().levels(SPEC, 1)
    ]  # fmt: skip


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Measurements that take no time; the list has the width of each."""
    widths: list[float] = []

    def measured(task: Task, *_: object) -> Measurement:
        widths.append(task.model.width)
        return Measurement(images_per_second=len(widths), batch_size=8, memory_bytes=None)

    monkeypatch.setattr(speeds, "measure_training", measured)
    monkeypatch.setattr(speeds, "measure_peak", lambda *_: 1e9)
    return widths


def test_a_training_is_measured() -> None:
    found = measure_training(tasks()[0], MACHINE)
    assert found.images_per_second > 0 and found.batch_size == 8
    assert found.memory_bytes is None or found.memory_bytes >= 0


def test_the_median_of_rounds_ignores_a_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now, number = [0.0], [0]

    def run() -> None:
        number[0] += 1
        now[0] += 100.0 if number[0] == 3 else 0.5

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    assert median_seconds(run, lambda _: None, 2.0) == 0.5 and number[0] == 3


def test_what_was_measured_is_read_under_exactly_its_conditions(
    tmp_path: Path, counted: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = measured_speeds(tasks(), MACHINE, folder=tmp_path)
    assert counted == [0.5, 1.0]  # narrow models first
    assert first.images_per_second == (2.0, 1.0)
    again = measured_speeds(tasks(), MACHINE, folder=tmp_path, loader=7)
    assert len(counted) == 2 and again.images_per_second == (2.0, 1.0) and again.loader == 7
    assert [level.detail for level in again.levels] == ["measured before"] * 2

    def anew(**changed: Any) -> bool:
        before = len(counted)
        machine = replace(MACHINE, **changed.pop("machine", {}))
        measured_speeds(tasks(replace(RECIPE, **changed)), machine, folder=tmp_path)
        return len(counted) == before + 2

    assert anew(batch_size=4) and anew(opt="sgd") and anew(machine={"channels_last": False})
    assert not anew(lr=0.5)  # it does not change the speed
    monkeypatch.setattr(speeds, "device_name", lambda _: "another device")
    assert anew() and not anew()
    monkeypatch.setattr(speeds.torch, "__version__", "99.0")
    assert anew()
    before = len(counted)
    measured_speeds(tasks(), MACHINE, folder=tmp_path, again=True)
    assert len(counted) == before + 2


def test_a_damaged_file_or_an_unwritable_folder_costs_a_measurement(
    tmp_path: Path, counted: list[float]
) -> None:
    measured_speeds(tasks(), MACHINE, folder=tmp_path)
    for path in tmp_path.iterdir():
        content = json.loads(path.read_text())
        content["about"]["device"] = "another"  # as if two names had one hash
        path.write_text(json.dumps(content))
    measured_speeds(tasks(), MACHINE, folder=tmp_path)
    assert len(counted) == 4
    for path in tmp_path.iterdir():
        path.write_text("{")
    measured_speeds(tasks(), MACHINE, folder=tmp_path)
    assert len(counted) == 6
    (tmp_path / "file").write_text("")
    measured_speeds(tasks(), MACHINE, folder=tmp_path / "file" / "below")
    assert len(counted) == 8


def _begin_and_wait(folder: Path) -> None:
    multiprocessing.forkserver._forkserver.__init__()  # type: ignore[misc]  # the copied one is ours
    engine._imported.clear()
    os.environ["PYTHONPATH"] = str(folder)
    start_server({"slow_to_import"})
    assert not (folder / "imported").exists()
    with with_threads(MACHINE, torch.device("cpu")):
        assert (folder / "imported").exists()
    os._exit(7)


def test_nothing_is_measured_while_workers_are_prepared(tmp_path: Path) -> None:
    """What they import would take the cores, and a wrong speed would be remembered."""
    text = (
        f"import pathlib, time\ntime.sleep(1)\npathlib.Path({str(tmp_path)!r}, 'imported').touch()"
    )
    (tmp_path / "slow_to_import.py").write_text(text)
    process = forked(_begin_and_wait, tmp_path)
    process.join()
    assert process.exitcode == 7
