"""One model of a tree at a time, each by a process of its own."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from rbdc.errors import RunError
from rbdc.experiments.train import Training
from rbdc.jobs.lock import locked
from rbdc.jobs.store import Store
from rbdc.report.run import run_status
from tests.runs.test_run import assert_same_model, run, small_tree
from tests.support import forked, started


def one(prepared: Training, name: str, output: Path, **places: Any) -> Any:
    return started(prepared, output, node=name, **places)


def test_one_by_one_they_are_the_run(folder: Path, tmp_path: Path) -> None:
    prepared = small_tree(folder)
    run(prepared, tmp_path / "whole")
    output = tmp_path / "pieces"
    names = [node.name for node in prepared.nodes if node.job.trains]
    results = [one(prepared, name, output) for name in names]
    assert results[:-1] == [None] * (len(names) - 1) and results[-1]["metrics"]["top1"] is not None
    assert_same_model(tmp_path / "whole", output)


def test_parents_come_first_and_names_are_known(folder: Path, tmp_path: Path) -> None:
    prepared = small_tree(folder)
    with pytest.raises(RunError, match=r"not trained yet: 2\.0, 2\.1"):
        one(prepared, "1.0", tmp_path / "run")
    with pytest.raises(RunError, match=r"no model called '2\.7'"):
        one(prepared, "2.7", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def _hold(output: Path, place: Path, ready: Any, over: Any) -> None:
    """What a process does that trains a model in `place`."""
    place.mkdir(parents=True)
    with locked(output, shared=True), locked(place):
        ready.set()
        over.wait(120)


def test_several_fit_into_a_folder_but_no_whole_run_beside_them(
    folder: Path, tmp_path: Path
) -> None:
    prepared, output = small_tree(folder), tmp_path / "run"
    one(prepared, "2.0", output)
    busy = next(node.job for node in prepared.nodes if node.name == "2.1")
    ready, over = multiprocessing.Event(), multiprocessing.Event()
    other = forked(_hold, output, Store(output / "jobs").folder(busy), ready, over)
    try:
        assert ready.wait(60)
        one(prepared, "2.2", output)
        states = {node["name"]: node["state"] for node in run_status(output)["nodes"]}
        assert states["2.1"] == "running" and states["2.2"] == "done"
        for attempt in (lambda: one(prepared, "2.1", output), lambda: run(prepared, output)):
            with pytest.raises(RunError, match="in use by another run"):
                attempt()
    finally:
        over.set()
        other.join()
    one(prepared, "2.1", output)
    done = [path.parent.name for path in output.glob("jobs/*/result.json")]
    assert len(done) == 3
