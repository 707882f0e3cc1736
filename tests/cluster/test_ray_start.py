"""Starting a Ray of our own, and joining one."""

import json
import os
import socket
import sys
import warnings
from pathlib import Path

import pytest

from rbdc.cluster import ray_start
from rbdc.cluster.ray_start import ray_started
from rbdc.errors import RunError
from tests.support import forked


@pytest.mark.parametrize("kind", ["closed", "silent", "nonsense"])
def test_an_address_that_does_not_answer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_start, "ANSWER_SECONDS", 3)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if kind == "silent":
            server.listen()
        address = f"127.0.0.1:{server.getsockname()[1]}" if kind != "nonsense" else "here"
        with pytest.raises(RunError, match=address), ray_started(address):
            pass
    assert "ray" not in sys.modules


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for address in (None, "auto"):
        with pytest.raises(RunError, match="`ray` is not installed"), ray_started(address):
            pass


def _listening(folder: Path) -> None:
    """Everything that a Ray of our own listens to, and whether a token is asked for."""
    os.environ["HOME"] = str(folder)
    warnings.simplefilter("ignore")
    with ray_started(None) as ray:
        ray.get(ray.remote(lambda: None).remote())
        inodes = {
            str(link.readlink())
            for process in Path("/proc").glob("[0-9]*")
            if _is_child(int(process.name), os.getpid())
            for link in process.glob("fd/*")
            if link.is_symlink()
        }
        found = [
            line.split()[1].partition(":")[0]
            for table in ("tcp", "tcp6")
            for line in Path("/proc/net", table).read_text().splitlines()[1:]
            if line.split()[3] == "0A" and f"socket:[{line.split()[9]}]" in inodes
        ]
    said = {"addresses": found, "token": os.environ["RAY_AUTH_MODE"]}
    (folder / "found.json").write_text(json.dumps(said))


def _is_child(pid: int, of: int) -> bool:
    while pid not in (0, 1, of):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return False
        pid = int(stat.rpartition(")")[2].split()[1])
    return pid == of


def test_a_ray_of_our_own_is_for_this_machine_and_this_user(tmp_path: Path) -> None:
    process = forked(_listening, tmp_path)
    process.join()
    found = json.loads((tmp_path / "found.json").read_text())
    loopback = {"0100007F", "0000000000000000FFFF00000100007F"}
    assert len(found["addresses"]) >= 3 and set(found["addresses"]) <= loopback
    assert found["token"] == "token" and not (tmp_path / ".ray").exists()
