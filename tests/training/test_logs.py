"""Logs: no step twice, and a damaged line never stops a training."""

import json
import warnings
from pathlib import Path

import pytest

from rbdc.training.logs import Logs


def logged(folder: Path, *, resumed_at: int, damage: bytes | None = None) -> list[int]:
    """Log steps 0 to 9, damage the fourth line, resume, and return the steps that are left."""
    logs = Logs(folder, step=0, gflops=0, tensorboard=False)
    for step in range(10):
        logs.step({"step": step, "loss": 0.1 * step}, board=False)
    logs.close()
    path = folder / "log.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    if damage is not None:
        lines[3] = damage
    path.write_bytes(b"".join(lines))
    Logs(folder, step=resumed_at, gflops=0, tensorboard=False).close()
    kept = path.read_bytes().splitlines(keepends=True)
    assert kept == [line for line in lines if line in kept]  # byte for byte
    return [json.loads(line)["step"] for line in kept]


@pytest.mark.parametrize(
    "damage",
    [
        b"\xff\xfe\n",
        b"{\n",
        b"[]\n",
        b"{}\n",
        b'{"step": "3"}\n',
        b"[" * 100_000 + b"\n",
        b"\x00\n",
    ],
    ids=["bytes", "half", "list", "empty", "type", "deep", "zero"],
)
def test_a_damaged_line_is_left_out_with_a_warning(damage: bytes, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"log\.jsonl: 1 damaged lines are left out"):
        assert logged(tmp_path, resumed_at=6, damage=damage) == [0, 1, 2, 4, 5, 6]


def test_an_incomplete_last_line_is_what_a_killed_process_leaves(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_bytes(b'{"step": 1}\n{"step": 2}\n{"st')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Logs(tmp_path, step=5, gflops=0, tensorboard=False).close()
    assert (tmp_path / "log.jsonl").read_bytes() == b'{"step": 1}\n{"step": 2}\n'
