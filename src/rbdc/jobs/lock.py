"""One run at a time in a folder, and who it is."""

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rbdc.errors import RunError
from rbdc.jobs.layout import LOCK


@contextmanager
def locked(folder: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold the folder's lock; if someone else does, on whatever machine that shares the folder,
    name them. A process that dies, however it dies, holds it no more.

    A shared lock is held by any number at a time, but not beside one that is not; it has no name.
    """
    with (folder / LOCK).open("a+") as file:
        try:
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            fcntl.lockf(file, kind | fcntl.LOCK_NB)  # not inherited by forked workers
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):  # a network disk without locks
                raise RunError(
                    f"{folder} cannot be locked: {error.strerror}",
                    "Choose a folder on a file system with locks (NFS 4, or Lustre with flock).",
                ) from None
            raise RunError(
                f"{folder} is in use by another run: {_describe(file.name)}",
                "Wait for it or stop it, or choose another folder.",
            ) from None
        if shared:
            yield
            return
        file.truncate(0)
        since = datetime.now(UTC).isoformat(timespec="seconds")
        file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}))
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def holder(folder: Path) -> dict[str, Any] | None:
    """Who works in the folder, or None. The lock itself is not touched by looking."""
    try:
        who = _content((folder / LOCK).read_text())
    except OSError:
        return None
    if who.get("host") == socket.gethostname() and not _is_alive(who.get("pid")):
        return None  # it was killed
    return who or None


def _is_alive(pid: Any) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, TypeError, ValueError):
        return False
    except PermissionError:  # someone else's
        return True
    return True


def _content(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _describe(path: str) -> str:
    who = _content(Path(path).read_text())
    return f"process {who.get('pid', '?')} on {who.get('host', '?')} since {who.get('since', '?')}"
