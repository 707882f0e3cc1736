"""run.json: folders of other formats are refused, and a request is kept as it was asked for."""

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rbdc.cli import main
from rbdc.errors import RunError
from rbdc.report.read import read_run
from rbdc.report.run import run_status
from rbdc.training.state import State
from tests.runs.test_run import small_tree
from tests.support import TINY, started


@pytest.fixture(scope="module")
def done(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "done"
    started(small_tree(folder, steps=1, epochs=1.0, rounding="none"), output, jobs=1)
    return output


@pytest.mark.parametrize("written", [None, 3, 4, 6, "5"])
def test_a_folder_of_another_format_is_refused(
    written: Any, done: Path, folder: Path, tmp_path: Path
) -> None:
    old = tmp_path / "old"
    shutil.copytree(done, old)
    record = json.loads((old / "run.json").read_text())
    record = {k: v for k, v in record.items() if k not in ("format", "checksum")}
    (old / "run.json").write_text(json.dumps(record | ({"format": written} if written else {})))
    before = {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}
    for read in (
        lambda: started(small_tree(folder, steps=1, epochs=1.0, rounding="none"), old),
        lambda: run_status(old),
        lambda: read_run(old),
    ):
        with pytest.raises(RunError, match=r"holds a run in format .*reads format 5"):
            read()
    assert {path: path.read_bytes() for path in old.rglob("*") if path.is_file()} == before


def test_the_request_is_kept_as_it_was_asked_for(done: Path) -> None:
    request = json.loads((done / "run.json").read_text())["request"]
    assert request["epochs"] == 1.0 and request["budget"] is None and request["steps"] == 1
    assert request["model_kwargs"] == TINY["resnet18d"] and request["batch_size"] == 8


def test_a_training_passes_seven_functions_from_the_command_to_the_optimizer(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Seen(Exception):  # noqa: N818
        """The functions between the command and the optimizer."""

    def update(_state: State, _micro: Any) -> None:
        raise Seen(*[frame.function for frame in inspect.stack()])

    monkeypatch.setattr(State, "update", update)
    command = f"train --data {folder} --in-memory --output {tmp_path / 'run'} --batch-size 8 "
    command += "--jobs 1 --threads 1 --no-with-baseline --baseline-epochs 4 --rounding none"
    with pytest.raises(Seen) as seen:
        main(command.split())
    functions = list(seen.value.args)
    path = functions[: functions.index("train_command") + 1]
    assert len(path) <= 7, path[::-1]
