"""A lock on a run's folder, which names its holder.

The `filelock` package is no replacement. Its FileLock survives the death of a process with forked
workers, but has no shared mode, which `--node` needs. Its ReadWriteLock has one, but its lock file
is a SQLite database, so the holder's name would need a second file, and old run.lock files, which
contain JSON, could not be opened.
"""

import errno
import fcntl
import json
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NotRequired, cast

from pydantic import AfterValidator, Field, with_config
from typing_extensions import TypedDict

from rbdc.disk import SHAPE, Json, read_json
from rbdc.errors import RunError, printable
from rbdc.jobs.layout import LOCK

_FLOCK = "hhqqi"  # Linux's struct flock: type, whence, start, length, process


@with_config(SHAPE)
class Holder(TypedDict):
    """The content of a lock file."""

    host: Annotated[str, AfterValidator(printable)]
    pid: Annotated[int, Field(ge=1, lt=2**31)]
    since: NotRequired[str]


@contextmanager
def locked(folder: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold the folder's lock, or raise a RunError that names the process which holds it.

    The lock works across machines that share the folder, and is released when the process dies.
    Any number of processes can hold a shared lock, but not together with an exclusive one. Only the
    holder of an exclusive lock is named.
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
                f"{folder} is in use by another run: {_describe(folder / LOCK)}",
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


def holder(folder: Path) -> Json | None:
    """Return the host, process id and start of the folder's exclusive holder, or None."""
    who = _content(folder / LOCK)
    if who and who["host"] == socket.gethostname() and not _is_held(folder / LOCK, who["pid"]):
        return None  # the process was killed
    return who


def taken_over(folder: Path) -> int | None:
    """Return the process id of a killed holder if another program has it now, else None."""
    who = _content(folder / LOCK)
    if not who or holder(folder) or not _is_alive(who["pid"]):
        return None
    return int(who["pid"])


def _is_held(path: Path, pid: int) -> bool:
    """Return whether a process of this machine holds the lock; asking takes no lock."""
    if pid == os.getpid() or not sys.platform.startswith("linux"):
        return _is_alive(pid)  # a process does not see its own locks
    with path.open("rb") as file:
        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(file, fcntl.F_GETLK, asked)
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # a process of another user
        return True
    return True


def _content(path: Path) -> Json | None:
    try:
        return cast(Json | None, read_json(path, Holder))
    except RunError:  # empty: nobody holds the lock
        return None


def _describe(path: Path) -> str:
    who = _content(path) or {}
    return f"process {who.get('pid', '?')} on {who.get('host', '?')} since {who.get('since', '?')}"
