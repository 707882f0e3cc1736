"""Commands in processes of their own: copies of this one, which has imported everything."""

import errno
import io
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from rbdc.cli import main
from tests.support import forked, forked_command

LIMIT = 600.0  # seconds after which a command counts as hanging, however busy the machine is
WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.truncate"}
Operation = Callable[[str, str], None]
"""What is done before a file operation: it is given its name and its path."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended."""

    code: int | None
    """Its exit code; None if it was hanging."""
    text: str
    """What it printed."""
    seconds: float
    """How long it took, without the time in which it waited for a CPU that others used."""

    @property
    def refusal(self) -> str:
        """The line of a clear refusal: two lines and exit code 2; empty if it is none."""
        lines = self.text.splitlines()
        clear = self.code == 2 and "Traceback" not in self.text and len(lines) > 1
        return lines[-2] if clear and lines[-2].startswith("error: ") else ""

    @property
    def story(self) -> str:
        """The exit code and the last lines, for a failure."""
        how = "hangs" if self.code is None else f"exit code {self.code}"
        return f"{how}: {' | '.join(self.text.splitlines()[-3:])[-400:]}"


class Running:
    """A command that runs in a process group of its own."""

    def __init__(
        self,
        words: list[str],
        said: Path,
        before: Callable[[], None] = lambda: None,
        fork: Callable[..., ForkProcess] = forked,
    ) -> None:
        waited = _waited_file(said)

        def prepared(words: list[str]) -> int:
            before()
            try:
                return main(words)
            finally:
                waited.write_text(str(_waited_for_cpu()))

        waited.unlink(missing_ok=True)
        self.said, self.began = said, time.monotonic()
        self.process = forked_command(words, said, prepared, fork)

    @property
    def alive(self) -> bool:
        """Return whether it is still running."""
        return self.process.is_alive()

    def kill(self, after: float = 0.0) -> bool:
        """Kill the group after some seconds; return whether it was still running."""
        self.process.join(after)
        running = self.process.is_alive()
        end_group(self.process.pid or 0)
        self.process.join()
        return running

    def wait(self, limit: float = LIMIT) -> Ended:
        """Wait for its end."""
        self.process.join(limit)
        seconds = time.monotonic() - self.began
        code = self.process.exitcode
        end_group(self.process.pid or 0)
        self.process.join()
        with suppress(OSError):  # killed
            seconds -= float(_waited_file(self.said).read_text())
        return Ended(code=code, text=self.said.read_text(errors="replace"), seconds=seconds)


def _waited_file(said: Path) -> Path:
    """Return a file beside a run whose name does not begin as the run's: no fault reaches it."""
    return said.with_name(f"waited-{said.name}")


def _waited_for_cpu() -> float:
    """Return the seconds in which this process could have run, and others did (Linux)."""
    with suppress(OSError):
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


class Ranks:
    """Processes that train together: the environment is that of torchrun, and so are kills."""

    def __init__(
        self, words: list[str], said: Path, before: Callable[[], None] = lambda: None, size: int = 2
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]

        def joins(rank: int) -> Callable[[], None]:
            def join() -> None:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                before()

            return join

        self.ranks = [
            Running(words, said.with_suffix(f".{rank}"), joins(rank)) for rank in range(size)
        ]

    @property
    def alive(self) -> bool:
        """Return whether all are still running."""
        return all(rank.alive for rank in self.ranks)

    def kill(self, after: float = 0.0) -> bool:
        """Kill all after some seconds, or when one has ended; return whether all ran till then."""
        until = time.monotonic() + after
        while self.alive and time.monotonic() < until:
            time.sleep(0.01)
        running = [rank.kill() for rank in self.ranks]
        return all(running)

    def wait(self, limit: float = LIMIT) -> Ended:
        """Wait for the end of all; when one has died, the others are killed."""
        until = time.monotonic() + limit
        while self.alive and time.monotonic() < until:
            time.sleep(0.01)
        fine = all(rank.alive or not rank.process.exitcode for rank in self.ranks)
        ended = [
            rank.wait(max(0.1, until - time.monotonic()) if fine else 1) for rank in self.ranks
        ]
        return max(ended, key=lambda one: -1 if one.code is None else abs(one.code))


def end_group(group: int) -> None:
    """Kill a process group, and wait until nothing of it runs."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    until = time.monotonic() + 10
    while _runs(group) and time.monotonic() < until:
        time.sleep(0.005)


def _runs(group: int) -> bool:
    """Return whether a process of the group is more than an exit code that nobody has read."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _parent, its_group = path.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False


_before_operation: Operation | None = None
_inside = ""


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _before_operation is None:
        return
    writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
    if (writes or event in WRITES) and isinstance(args[0], str | os.PathLike):
        path = os.path.normpath(Path.cwd() / os.fspath(args[0]))
        if path.startswith(_inside):
            _call(event, path)


def _call(event: str, path: str) -> None:
    """Do it, but not for the operations that it does itself."""
    global _before_operation
    act, _before_operation = _before_operation, None
    assert act is not None
    try:
        act(event, path)
    finally:
        _before_operation = act


def before_operations(folder: Path, act: Operation) -> None:
    """Call `act` before each operation in this process that changes files below `folder`.

    Opening to write, creating, renaming, removing, and waiting for the disk (fsync) are seen, and
    so are the weights that safetensors writes by itself.
    """
    global _before_operation, _inside
    if _before_operation is None:
        sys.addaudithook(_audit)
        _see_unaudited()
    _before_operation, _inside = act, str(folder.absolute())


def _see_unaudited() -> None:
    import safetensors.torch

    from rbdc.models import folder
    from rbdc.training import checkpoint

    fsync, save = os.fsync, safetensors.torch.save_file

    def seen_fsync(descriptor: int) -> None:
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        if path.startswith(_inside) and _before_operation:
            _call("fsync", path)
        fsync(descriptor)

    def seen_save(tensors: Any, path: Any, *rest: Any, **more: Any) -> None:
        if str(path).startswith(_inside) and _before_operation:
            _call("open", str(path))
        save(tensors, path, *rest, **more)

    os.fsync = seen_fsync  # type: ignore[assignment]
    for module in (checkpoint, folder):
        if hasattr(module, "save_file"):
            module.save_file = seen_save  # type: ignore[attr-defined]


def kill_at(folder: Path, operation: int) -> None:
    """Kill this process's group before its n-th operation below a folder."""
    left = operation

    def count(_event: str, _path: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.killpg(0, signal.SIGKILL)

    before_operations(folder, count)


def fail_from(folder: Path, operation: int, number: int, *, times: int = 10**9) -> None:
    """Let operations below a folder fail from the n-th on, as often as said, as a disk would."""
    left = operation

    def count(event: str, path: str) -> None:
        nonlocal left
        left -= 1
        removes = event in ("os.remove", "os.rmdir") and number == errno.ENOSPC
        if -times <= left < 0 and not removes:
            raise OSError(number, os.strerror(number), path)

    before_operations(folder, count)


def in_child(
    act: Callable[[], dict[str, Any]], said: Path, limit: float = LIMIT
) -> dict[str, Any] | Ended:
    """Return what `act` returns in a copy of this process; how that ended, if it did otherwise."""
    answer = said.with_suffix(".json")
    answer.unlink(missing_ok=True)

    def write(_words: list[str]) -> int:
        answer.write_text(json.dumps(act()))
        return 0

    running = Running.__new__(Running)
    running.said, running.began = said, time.monotonic()
    running.process = forked_command([], said, write)
    ended = running.wait(limit)
    if ended.code != 0 or not answer.exists():
        return ended
    content: dict[str, Any] = json.loads(answer.read_text())
    return content


def said_by(words: list[str]) -> Ended:
    """Run a command in this process, and return what it printed."""
    began, text = time.monotonic(), io.StringIO()
    with redirect_stdout(text), redirect_stderr(text):
        try:
            code = main(words)
        except SystemExit as end:  # --help, --version
            code = int(end.code or 0)
    return Ended(code=code, text=text.getvalue(), seconds=time.monotonic() - began)
