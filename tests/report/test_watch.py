"""`rbdc status --watch`: a run that is looked at until it is over."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rbdc.cli import main
from rbdc.disk import read_json
from rbdc.errors import RunError
from rbdc.jobs.layout import PROGRESS, RESULT
from rbdc.report.run import run_status, status_table
from rbdc.report.watch import fitted_table, watch_run
from tests.report.conftest import small_run
from tests.support import QUICK, change, forked, started


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A run that may be changed."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


class Script:
    """What happens between two looks, one after the other; a look too many is an error."""

    def __init__(self, *steps: Callable[[], Any]) -> None:
        self.steps, self.asked = list(steps), list[float]()

    def __call__(self, seconds: float) -> None:
        self.asked.append(seconds)
        self.steps.pop(0)()


def nothing() -> None:
    pass


def interrupt() -> None:
    raise KeyboardInterrupt


def watched(
    folder: Path, *steps: Callable[[], Any], terminal: bool = False, **options: Any
) -> tuple[str, Script]:
    script, file = Script(*steps), StringIO()
    console = Console(file=file, width=100, height=30, force_terminal=terminal)
    watch_run(folder, console, pause=script, **options)
    assert not script.steps, "it ended too early"
    return file.getvalue(), script


def node_folder(run: Path, name: str) -> Path:
    nodes = json.loads((run / "run.json").read_text())["nodes"]
    return run / str(next(node["folder"] for node in nodes if node["name"] == name))


class Undone:
    """A run whose target is not finished, until it is again."""

    def __init__(self, run: Path) -> None:
        self.files = [run / "result.json", node_folder(run, "target") / "result.json"]
        self.texts = [path.read_text() for path in self.files]
        for path in self.files:
            path.unlink()

    def finish(self) -> None:
        for path, text in zip(self.files, self.texts, strict=True):
            path.write_text(text)


def hold(run: Path) -> None:
    """As a process does that is at work: this one."""
    who = {"host": socket.gethostname(), "pid": os.getpid()}
    (run / "run.lock").write_text(json.dumps(who))


def test_a_finished_run_is_shown_once(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, _ = watched(finished)
    assert text.count("target, width 1") == 2 and text.count("(100.0%)") == 1  # and its coupling
    assert main(["status", str(finished), "--watch"]) == 0
    assert capsys.readouterr().out.count("(100.0%)") == 1


def test_elsewhere_than_on_a_terminal_it_is_printed_again_when_it_changed(copied: Path) -> None:
    undone = Undone(copied)
    text, script = watched(copied, nothing, nothing, undone.finish, every=0.5)
    assert text.count("spent") == 2 and text.count("(100.0%)") == 1
    assert text.index("stopped") < text.index("(100.0%)") and "\x1b" not in text
    assert script.asked == [0.5] * 3


def test_as_json_a_line_is_a_change(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    undone = Undone(copied)
    watched(copied, nothing, undone.finish, as_json=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [bool(line["result"]) for line in lines] == [False, True]
    assert lines[1] == run_status(copied)


def test_on_a_terminal_the_table_stays_in_place_and_the_last_one_is_left(copied: Path) -> None:
    undone = Undone(copied)
    text, _ = watched(copied, nothing, undone.finish, terminal=True)
    assert "Ctrl-C ends the watch, not the run" in text and "\x1b[1A" in text  # a line up
    last = text.rpartition("\x1b[2K")[2]  # what is printed after the live table was wiped out
    assert "(100.0%)" in last and "Ctrl-C" not in last


def test_ctrl_c_ends_the_watch_and_nothing_else(copied: Path) -> None:
    Undone(copied)
    for terminal in (False, True):
        text, _ = watched(copied, nothing, interrupt, terminal=terminal)
        assert "stopped" in text


def test_ctrl_c_is_exit_code_0(copied: Path) -> None:
    Undone(copied)
    command = [sys.executable, "-m", "rbdc.cli", "status", str(copied), "--watch", "--json"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:  # tests that a shell runs in the background ignore Ctrl-C, and so would what they start
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        assert process.stdout and process.stderr
        assert json.loads(process.stdout.readline())["result"] is None
        process.send_signal(signal.SIGINT)
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_a_failed_run_is_over_when_nobody_is_at_work(copied: Path) -> None:
    Undone(copied)
    failed = node_folder(copied, "target") / "failed.json"
    failed.write_text(json.dumps({"error": "the loss is nan"}))
    hold(copied)
    text, _ = watched(copied, nothing, (copied / "run.lock").unlink, nothing)
    assert "target: the loss is nan" in text and "run by process" in text


def test_between_the_parts_of_a_comparison_it_is_not_over(copied: Path) -> None:
    """All that is known is done, nobody holds the folder, and then it goes on."""
    run = json.loads((copied / "run.json").read_text())
    (copied / "result.json").unlink()
    about = {"model": {"name": "x"}, "baseline_flops": 1.0}
    run["request"] = {"setting": about}
    change(copied / "run.json", **{**run, "nodes": run["nodes"][:2]})

    def goes_on() -> None:
        change(copied / "run.json", **run)
        hold(copied)

    text, _ = watched(copied, goes_on, nothing, (copied / "run.lock").unlink, nothing)
    assert text.count("spent") == 3


def test_files_that_are_being_written_are_looked_at_again(copied: Path) -> None:
    undone = Undone(copied)
    whole = (copied / "run.json").read_text()

    def tear() -> None:
        (copied / "run.json").write_text(whole[:100])

    def mend() -> None:
        (copied / "run.json").write_text(whole)
        undone.finish()

    text, _ = watched(copied, tear, nothing, mend)
    assert text.count("spent") == 2
    tear()
    with pytest.raises(RunError, match=r"run\.json cannot be read"):
        watched(copied, *[nothing] * 9)


def test_a_run_that_is_about_to_begin_is_waited_for(finished: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    output.mkdir()

    def begins() -> None:
        (output / "run.lock").write_text("")
        (output / ".run.json.partial").write_text("{")

    def ends() -> None:
        shutil.rmtree(output)
        shutil.copytree(finished, output)

    text, _ = watched(output, nothing, begins, ends)
    assert "holds no run yet" in text and "(100.0%)" in text
    shutil.rmtree(output)
    output.mkdir()
    begins()
    text, _ = watched(output, ends, terminal=True)
    assert "holds no run yet" in text and "(100.0%)" in text


BAD: dict[str, tuple[list[str], str]] = {
    "no folder": (["nowhere", "--watch"], "nowhere holds no run"),
    "a file": (["file", "--watch"], "file holds no run"),
    "something else": (["other", "--watch"], "other holds something (thesis.tex), but no run"),
    "no time": (["run", "--watch", "--every=0"], "every is 0, expected more than 0 seconds"),
    "no number": (["run", "--watch", "--every=nan"], "--every got nan, expected a number"),
    "not watched": (["run", "--every=1"], "--every was given without --watch"),
}


@pytest.mark.parametrize(("words", "expected"), BAD.values(), ids=BAD)
def test_a_mistake_is_two_lines(
    words: list[str],
    expected: str,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").symlink_to(finished)
    Path("other").mkdir()
    Path("other/thesis.tex").touch()
    Path("file").touch()
    assert main(["status", *words]) == 2
    errors = capsys.readouterr().err
    assert expected in errors and len(errors.strip().splitlines()) == 2


def test_a_model_that_ends_while_it_is_read_has_spent_all_it_did(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run_status(copied)
    place = copied / before["nodes"][0]["folder"]
    result, progress = place / RESULT, place / PROGRESS
    ended = result.read_text()
    result.unlink()
    progress.write_text(json.dumps({"step": 9, "steps": 9, "scores": None}))

    def read_just_before_its_end(path: Path, shape: Any) -> Any:
        value: Any = read_json(path, shape)
        if path.parent == place:  # as `Store.finish` does it
            result.write_text(ended)
            progress.unlink(missing_ok=True)
        return value

    monkeypatch.setattr("rbdc.report.run.read_json", read_just_before_its_end)
    assert run_status(copied)["spent_flops"] == before["spent_flops"]


def _run(folder: Path, output: Path) -> None:
    started(small_run(folder), output, machine=QUICK, watch=lambda _event: None, jobs=1)


def test_a_real_run_is_watched_from_before_its_begin_to_its_end(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    output.mkdir()
    process = forked(_run, folder, output)
    watch_run(output, Console(file=StringIO()), every=0.01, as_json=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    process.join()
    assert process.exitcode == 0 and lines[-1]["result"] and len(lines) > 5
    spent = [line["spent_flops"] for line in lines]
    assert spent == sorted(spent) and spent[-1] == lines[-1]["result"]["training_flops"]
    states = [{node["state"] for node in line["nodes"]} for line in lines]
    assert any("running" in state for state in states) and states[-1] == {"done"}
    assert not any("stopped" in state or "failed" in state for state in states)


def fitted_text(status: dict[str, Any], height: int) -> str:
    console = Console(width=100, file=StringIO(), record=True)
    console.print(fitted_table(status, height))
    return console.export_text()


def test_what_runs_comes_first_then_results_then_a_count(copied: Path) -> None:
    Undone(copied)
    hold(copied)
    status = run_status(copied)
    by_name = {node["name"]: node for node in status["nodes"]}
    by_name["target"]["state"] = "running"
    by_name["standard"] |= {"state": "waiting", "seconds": None, "flops": 0.0}
    console = Console(width=80, file=StringIO(), record=True)
    console.print(status_table(status))
    text = console.export_text()
    marks = [line.split()[0] for line in text.splitlines() if line.strip()[:1] in [*"▶✓·✗‖"]]
    assert marks == ["▶"] + ["✓"] * 9 and "and 1 waiting" in text
    assert "about" in text and "left" in text and max(map(len, text.splitlines())) <= 80
    header = next(line for line in text.splitlines() if "state" in line)
    assert header.split() == ["model", "state", "epochs", "top-1", "FLOPs", "time"]  # none is cut
    by_name["target"]["name"] = "x"  # and columns do not move with what is shown
    by_name["1.0"]["state"] = "waiting"
    console.print(status_table(status))
    assert header in console.export_text()


def test_a_low_window_keeps_what_goes_on_and_what_failed() -> None:
    nodes = [
        {"name": f"n{i}", "level": 0, "width": 1.0, "state": "done", "epochs": 1,
         "metrics": {"top1": 0.5}, "flops": 1.0, "planned_flops": 1.0, "kind": "train"}
        for i in range(100)
    ]  # fmt: skip
    nodes[40] |= {"state": "running"}
    nodes[70] |= {"state": "failed", "error": "the loss is nan"}
    nodes[90] |= {"state": "waiting"}
    status = {"nodes": nodes, "spent_flops": 1.0, "planned_flops": 2.0, "running": {"pid": 1}}
    status["result"] = None
    for height in (12, 20, 50, 200):
        text = fitted_text(status, height)
        assert len(text.splitlines()) <= max(height, 12)
        assert "n40," in text and "n70," in text and "n70: the loss is nan" in text
        assert (" done, 1 waiting" in text) is (height < 100)
        assert text.count("n99,") == 1 and text.count("n0,") == (height > 100)
    assert "and 96 done, 1 waiting" in fitted_text(status, 12)
