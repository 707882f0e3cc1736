"""Trackers: one run per model, offline, and none of their failures reaches a training."""

import importlib.util
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rbdc.errors import RunError
from rbdc.experiments.train import Training, prepare
from rbdc.jobs.job import Node
from rbdc.runs import trackers
from rbdc.settings import Machine, Request
from tests.support import QUICK, TINY, small_recipe, started

MODELS = ["1.0", "1.1", "standard", "target"]


def small_tree(folder: Path) -> Training:
    request = Request(
        model="resnet18d",
        model_kwargs=TINY["resnet18d"],
        data=str(folder),
        in_memory=True,
        epochs=2.0,
        with_baseline=True,
    )
    return prepare(request, small_recipe())


def logging_to(*names: str) -> Machine:
    return Machine(**{**QUICK.to_json(), "log": names})


class Recorded:
    """A tracker that keeps what it is told."""

    runs: ClassVar[dict[str, "Recorded"]] = {}

    def __init__(self, tree: str, node: Node, config: Mapping[str, Any], _folder: Path) -> None:
        self.tree, self.config, self.rows = tree, config, list[Any]()
        self.ok: bool | None = None
        self.runs[node.name] = self

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.rows.append((step, values))

    def finish(self, ok: bool) -> None:
        self.ok = ok


class Broken(Recorded):
    """One whose server has gone."""

    def log(self, values: Mapping[str, float], step: int) -> None:  # noqa: ARG002
        raise ConnectionError("no route to host")


def test_a_run_per_model_and_a_failing_tracker_stops_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorded, "runs", {})
    monkeypatch.setitem(trackers.TRACKERS, "wandb", Recorded)
    monkeypatch.setitem(trackers.TRACKERS, "mlflow", Broken)
    with pytest.warns(UserWarning, match="mlflow failed and is left out from here on: no route"):
        result = started(
            small_tree(folder), tmp_path / "tree", machine=logging_to("mlflow", "wandb"), jobs=1
        )
    assert sorted(Recorded.runs) == MODELS and "metrics" in result
    target = Recorded.runs["target"]
    assert target.tree == "tree" and target.ok is True and target.config["level"] == 0
    steps = [step for step, _ in target.rows]
    assert steps == sorted(steps) and target.rows[-1][1]["epoch"] == 2.0
    assert target.rows[-1][1]["eval/top1"] == result["metrics"]["top1"]
    assert target.rows[-1][1]["flops"] == pytest.approx(result["training_flops"])


@pytest.mark.parametrize("missing", trackers.PACKAGES)
def test_a_tracker_that_is_not_installed(
    missing: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == missing else found(name)
    )
    with pytest.raises(RunError, match=f"--log {missing} needs the package") as caught:
        started(small_tree(folder), tmp_path / "tree", machine=logging_to(missing), jobs=1)
    assert f"rbdc[{missing}]" in caught.value.remedy and not (tmp_path / "tree").exists()


@pytest.mark.filterwarnings("default")
def test_wandb_offline(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    started(small_tree(folder), tmp_path / "tree", machine=logging_to("wandb"), jobs=1)
    files = sorted((tmp_path / "tree" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 4
    assert sum(b"target" in file.read_bytes() for file in files) == 1


@pytest.mark.filterwarnings("default")
def test_trackio_in_its_local_store(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    started(small_tree(folder), tmp_path / "tree", machine=logging_to("trackio"), jobs=1)
    (store,) = (tmp_path / "store").glob("rbdc*.db")
    rows = sqlite3.connect(store).execute("select distinct run_name from metrics").fetchall()
    assert sorted(name for (name,) in rows) == [f"tree {name}" for name in MODELS]


@pytest.mark.filterwarnings("default")
def test_mlflow_in_a_store_of_files(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    result = started(small_tree(folder), tmp_path / "tree", machine=logging_to("mlflow"), jobs=1)
    metrics = sorted((tmp_path / "store").rglob("eval/top1"))
    assert len(metrics) == 4
    names = {p.read_text() for p in (tmp_path / "store").rglob("mlflow.runName")}
    assert sorted(names) == MODELS
    last = {path.read_text().split()[1] for path in metrics}
    assert str(result["metrics"]["top1"]) in last
