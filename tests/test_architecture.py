"""Who may import whom, one direction only (CONTRIBUTING.md), and what the package promises."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rbdc

SOURCE = Path(rbdc.__file__).parent
ORDER = [
    {"errors", "shown", "stops"},
    {"arguments", "disk", "structure"},
    {"metrics", "settings"},
    {"coupling", "data"},
    {"models"},
    {"plan"},
    {"training"},
    {"jobs"},
    {"cluster"},
    {"runs"},
    {"growth", "transfer"},
    {"experiments"},
    {"report"},
    {"api"},
    {"commands"},
    {"cli"},
]
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}
FILES = [
    path for path in SOURCE.rglob("*.py") if path.name != "__init__.py" or path.parent != SOURCE
]


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names.add(node.module or "")
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    assert "rbdc" not in names or path.name == "cli.py", f"{path} imports past the rooms"
    return {name.split(".")[1] for name in names if name.startswith("rbdc.")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_rooms_import_in_one_direction(path: Path) -> None:
    room = room_of(path)
    for other in imported_rooms(path) - {room}:
        assert RANK[other] < RANK[room], f"{room} must not import {other}"
    if room == "report":
        assert "training" not in imported_rooms(path), "report reads folders only"


def test_files_are_of_one_concern() -> None:
    long = {path.name: n for path in FILES if (n := len(path.read_text().splitlines())) > 400}
    assert not long


def test_every_public_name_is_there_and_has_a_docstring() -> None:
    for name in rbdc.__all__:
        assert getattr(rbdc, name).__doc__, name
    assert set(rbdc.__all__) == set(rbdc._HOME)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = rbdc.nonsense


def test_what_must_start_quickly_does_not_load_torch() -> None:
    """The board of a Ray cluster, and what reads a run's folder."""
    script = (
        "import sys, rbdc.cluster.board, rbdc.jobs.lock, rbdc.runs.record, rbdc.metrics\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
