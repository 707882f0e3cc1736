"""Whatever a run's folder holds, looking at it ends well or with two lines, and shows no lies."""

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from rbdc.cli import main
from rbdc.commands import look as look_commands
from rbdc.disk import write_json
from rbdc.errors import RbdcError
from rbdc.report.card import export_run
from rbdc.report.page import add_sheets, read_state
from tests.hostile import hostile_folders, refusal, watched
from tests.hostile_text import EPS
from tests.support import change

matplotlib.get_configdir(), matplotlib.get_cachedir()  # made once, before anything is watched
BYTES = {
    "empty": b"",
    "half": b'{"metrics": {"top1": 0.',
    "a list": b"[]",
    "nothing": b"null",
    "not UTF-8": b'{"a": "\xff\xfe"}',
    "binary": bytes(range(256)) * 10,
    "deep": b'{"a":' * 100_000,
    "nested": b'{"a":' * 200 + b"1" + b"}" * 200,
    "digits": b'{"step": ' + b"9" * 400 + b"}",
    "many digits": b'{"step": ' + b"9" * 100_000 + b"}",
    "infinite": b'{"step": 1e400, "seconds": -Infinity}',
    "entries": b'{"nodes": 3, "metrics": [], "scores": {"boxes": 1}, "error": {}, "rows": {}}',
}
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 2**63, 1e99, 0.0, float("nan"), "", "x", "../../x", "/", "\x1b[2J\ud800"),
    *([], [None], [[]], {}, {"name": []}, {"a": {"b": {"c": 1}}}),
)
LOOKS = (["status"], ["status", "--json"])


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def look(run: Path, output: Path, capsys: Any, *, export: bool = True) -> None:
    """Look at a run in every way; nothing may be raised but what has two lines."""
    reads = [lambda: read_state([run]), lambda: export_run(run, output / "out")]
    with watched(output) as seen:
        for command, *more in LOOKS:
            refusal([command, str(run), *more], capsys)
        for read in reads if export else reads[:1]:  # an export that succeeds takes a second
            try:
                json.dumps(read(), default=str, allow_nan=False)
            except RbdcError as error:
                assert error.problem and error.remedy
    assert not seen
    shutil.rmtree(output, ignore_errors=True)


def files_of(run: Path) -> list[Path]:
    target = next(run.glob("jobs/resnet18d-w1-*/blocks.jsonl")).parent
    names = ("run.json", "result.json", "run.lock", "model/config.json", "model/rbdc.json")
    of_jobs = ("result.json", "job.json", "failed.json", "progress.json", "summary.csv")
    logs = ("log.jsonl", "blocks.jsonl")
    return [*(run / name for name in names), *(target / name for name in (*of_jobs, *logs))]


@pytest.mark.parametrize("content", BYTES)
def test_a_damaged_file(content: str, copied: Path, tmp_path: Path, capsys: Any) -> None:
    target = files_of(copied)[-1].parent
    for path in files_of(copied):
        before = path.read_bytes() if path.exists() else None
        path.write_bytes(BYTES[content])
        look(copied, tmp_path / "output", capsys, export=path.parent != target)
        path.unlink() if before is None else path.write_bytes(before)


def test_what_is_no_file(copied: Path, tmp_path: Path, capsys: Any) -> None:
    for path in files_of(copied):
        before = path.read_bytes() if path.exists() else None
        for make in (os.mkfifo, os.mkdir):
            path.unlink(missing_ok=True)
            make(path)
            look(copied, tmp_path / "output", capsys)
            path.rmdir() if path.is_dir() else path.unlink()
        if before is not None:
            path.write_bytes(before)


def places(content: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where every value is in nested content."""
    if prefix:
        yield prefix
    members = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in members:
        if isinstance(value, dict | list):
            yield from places(value, (*prefix, key))
        else:
            yield (*prefix, key)


@pytest.mark.parametrize(
    ("name", "tries"), [("run.json", 40), ("result.json", 20), ("job", 10), ("model/rbdc.json", 3)]
)
def test_other_values(name: str, tries: int, copied: Path, tmp_path: Path, capsys: Any) -> None:
    """Every value may be missing or another, with the right checksum."""
    draw = random.Random(name)
    jobs = next(copied.glob("jobs/resnet18d-w1-*/blocks.jsonl")).parent
    path = jobs / "result.json" if name == "job" else copied / name
    before = json.loads(path.read_text())
    before.pop("checksum")
    for *outer, last in draw.sample(list(places(before)), tries):
        content = json.loads(json.dumps(before))
        inner = content
        for key in outer:
            inner = inner[key]
        if draw.random() < 0.2:
            del inner[last]
        else:
            inner[last] = draw.choice(VALUES)
        write_json(path, content)
        look(copied, tmp_path / "output", capsys, export=draw.random() < 0.3)


def test_a_score_that_was_edited_is_not_shown(copied: Path, tmp_path: Path, capsys: Any) -> None:
    target = next(copied.glob("jobs/resnet18d-w1-*/blocks.jsonl")).parent
    for path in (copied / "result.json", target / "result.json"):
        text = path.read_text()
        assert '"top1": 0.' in text
        path.write_text(text.replace('"top1": 0.', '"top1": 0.9'))
        lines = refusal(["status", str(copied)], capsys)
        assert str(path) in lines[0] and "its checksum is another" in lines[0]
        assert "0.9" not in json.dumps(read_state([copied])["runs"][0]["result"].get("metrics"))
        with pytest.raises(RbdcError, match="its checksum is another"):
            export_run(copied, tmp_path / "out")
        path.write_text(text)
    assert refusal(["status", str(copied)], capsys) == []


def test_a_damaged_log_loses_its_line_only(copied: Path) -> None:
    target = next(copied.glob("jobs/resnet18d-w1-*/blocks.jsonl")).parent
    for name in ("log.jsonl", "blocks.jsonl", "summary.csv"):
        lines = (target / name).read_bytes().splitlines(keepends=True)
        lines[1] = b"\xf0" + lines[1][1:]
        (target / name).write_bytes(b"".join(lines))
    run = read_state([copied])["runs"][0]
    node = next(node for node in run["nodes"].values() if node["folder"].endswith(target.name))
    assert sum("left out, damaged" in what for what in run["missing"]) == 3
    assert len(node["steps"]["loss"]) == len((target / "log.jsonl").read_bytes().splitlines()) - 1


def test_a_strangers_run_does_no_harm(copied: Path, tmp_path: Path, capsys: Any) -> None:
    run = json.loads((copied / "run.json").read_text())
    for folder in list(hostile_folders(tmp_path / "models", 1))[::8]:
        config = json.loads((folder / "config.json").read_text())
        spec = {"name": config["architecture"], "arguments": config.get("model_args", {})}
        identity = run["identity"]
        setting, plan = ({**identity[part], "model": spec} for part in ("setting", "plan"))
        change(copied / "run.json", identity={**identity, "setting": setting, "plan": plan})
        shutil.copy(folder / "config.json", copied / "model")
        look(copied, tmp_path / "output", capsys)


def test_a_run_that_names_folders_elsewhere_is_refused(copied: Path, capsys: Any) -> None:
    run = json.loads((copied / "run.json").read_text())
    for elsewhere in ("../other", "/etc", "jobs/../../x", "jobs/..", "jobs/a/b", "jobs/"):
        nodes = [{**node, "folder": elsewhere} for node in run["nodes"]]
        change(copied / "run.json", nodes=nodes)
        (line, _) = refusal(["status", str(copied)], capsys)
        assert "run.json is damaged: nodes.0.folder" in line


def test_escape_codes_are_shown_as_text(copied: Path, capsys: Any) -> None:
    evil, shown = "\x1b[2J\x9b31m\a\udcff", r"\x1b[2J\x9b31m\x07\udcff"
    run = json.loads((copied / "run.json").read_text())
    nodes = [{**node, "name": evil} for node in run["nodes"]]
    change(copied / "run.json", nodes=nodes)
    target = next(copied.glob("jobs/resnet18d-w1-*/blocks.jsonl")).parent
    (target / "result.json").unlink()
    write_json(target / "failed.json", {"error": evil})
    assert main(["status", str(copied)]) == 0
    said = capsys.readouterr().out
    assert shown in said and not set(evil) & set(said) - set(shown)
    assert main(["status", str(copied / evil)]) == 2
    assert shown in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["program", "pipe"])
def test_a_sheet_of_predictions_is_a_picture_and_no_program(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "sheet.png"
    path.write_bytes(EPS) if kind == "program" else os.mkfifo(path)
    nodes = {"a": {"state": "done", "folder": ""}}
    run: dict[str, Any] = {"transfer": True, "folder": str(tmp_path), "nodes": nodes, "missing": []}
    with watched(tmp_path / "output") as seen:
        add_sheets(run, 10**6)
    assert not seen and "sheet.png: it cannot be read" in run["missing"][0]


def test_a_table_of_many_jobs_is_short(copied: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(look_commands, "MOST_ROWS", 2)
    assert main(["status", str(copied)]) == 0
    jobs = len(json.loads((copied / "run.json").read_text())["nodes"])
    assert f"and {jobs - 2} done" in capsys.readouterr().out
