"""Share decoded batches among the processes of one machine that train on the same batches.

Processes with the same key meet in a folder in shared memory. Each process holds a member file with
its position: the step that its training is at. A batch is one file. The process that needs it first
locks the file, decodes the batch and writes it, and the others read it. The kernel releases the
locks of a process that dies, so a member whose file is not locked is dead, and a batch that is
neither locked nor complete is free to be decoded.

Nothing here can change a batch. A process that cannot share (nobody else is there, the memory is
full, another process is stopped) decodes the batch itself. Nor can processes block each other for
ever: who has locked a batch decodes it without waiting, and every wait has a limit. A process that
is asked to stop waits for nobody: it decodes the batch of its last step itself.
"""

import hashlib
import json
import mmap
import os
import stat
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
from torch import Tensor

from rbdc.errors import DataError, RbdcError

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows: every process decodes for itself
    fcntl = None

Request = tuple[int, int]  # step, micro-batch
Content = tuple[Tensor, Any]  # uint8 images, and what JSON can hold
Decode = Callable[[Request], Content]
Following = Callable[[], Iterable[Request]]

MEMORY = Path("/dev/shm")
PATIENCE = (60.0, 300.0)  # least and most seconds to wait for a member that is a window behind
PATIENCE_SHARE = 0.05  # between the two: this share of the session so far
STOP_SECONDS = 0.2  # between two looks whether this process is asked to stop
SILENCE = 5.0  # least seconds to wait for a process that decodes a batch
WINDOW_BYTES = 256 << 20  # batches that members may be apart, if they are at least 4 and at most 64
FREE_SHARE = 0.25  # of the shared memory, left to others: torch's data workers need it, too
_MEMBER = struct.Struct("<qq")  # position, window
_BATCH = struct.Struct("<8sqq")  # _COMPLETE, bytes of JSON, bytes of pixels
_COMPLETE = b"rbdc\0\0\0\1"


def window(batch_bytes: int, prefetched: int) -> int:
    """Return how many steps ahead of the slowest member a process may be."""
    return prefetched + min(64, max(4, WINDOW_BYTES // max(1, batch_bytes)))


def find_folder(key: Any) -> Path | None:
    """Return the folder where processes with this key meet, or None if it cannot be shared.

    Raises a DataError if the folder above it is accessible to other users.
    """
    if fcntl is None:
        return None
    usable = sys.platform == "linux" and os.access(MEMORY, os.W_OK)
    root = (MEMORY if usable else Path(tempfile.gettempdir())) / f"rbdc-{os.getuid()}"
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        found = root.lstat()
    except OSError:
        return None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise DataError(
            f"{root} belongs to another user or is open to others, so batches are not shared",
            "Remove it; each process decodes all images for itself until then.",
        )
    return root / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]


_held: set[int] = set()  # descriptors of member files, which keep them locked


def _close_held() -> None:
    """Close the parent's member files in a forked process; they would stay locked by it."""
    while _held:
        os.close(_held.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_held)


class Membership:
    """This process's place among those that share batches, from its creation to `leave`.

    Once `stopped` returns True, this process waits for no other member, and no other for it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        position: int,
        window: int,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.folder, self.window = folder, window
        self.name = f"member-{os.getpid()}-{token_hex(4)}"
        for other in folder.parent.iterdir():
            _clear(other)  # what killed processes left
        self._file = self._join()
        _held.add(self._file)
        self._left, self._lock = threading.Event(), threading.RLock()
        self.move(position)
        # The main thread may wait in torch's DataLoader, so another one looks.
        threading.Thread(target=self._watch, args=(stopped,), daemon=True).start()

    def _join(self) -> int:
        while True:
            with suppress(FileNotFoundError):  # the last member removes the folder at this moment
                self.folder.mkdir(mode=0o700, exist_ok=True)
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                file = os.open(self.folder / self.name, flags, 0o600)
                fcntl.flock(file, fcntl.LOCK_EX)
                if os.fstat(file).st_nlink:
                    return file
                os.close(file)  # it was taken for a dead member's before it was locked

    def move(self, position: int) -> None:
        """Announce that the training is at step `position`; it needs no batch before."""
        with self._lock, suppress(OSError):  # the memory is full
            if not self._left.is_set():
                os.pwrite(self._file, _MEMBER.pack(position, self.window), 0)

    def _watch(self, stopped: Callable[[], bool]) -> None:
        """Take this process out of the members when it is asked to stop."""
        while not self._left.wait(STOP_SECONDS):
            try:
                asked = stopped()
            except RbdcError:  # raised again where the training asks
                asked = True
            if asked:
                self.window = -1
                self.move(-1)
                return

    def leave(self) -> None:
        """Stop sharing, and remove the folder if this is the last member."""
        if self._file in _held:  # not in a forked process
            with self._lock:
                self._left.set()
                _held.remove(self._file)
                os.close(self._file)
            with suppress(OSError):
                (self.folder / self.name).unlink()
            _clear(self.folder)


def _clear(folder: Path) -> None:
    """Remove a folder without living members."""
    with suppress(OSError):  # someone else removes it, or joins
        paths = [*folder.iterdir()]
        if any(path.name.startswith("member-") and _read_member(path) for path in paths):
            return
        for path in paths:
            path.unlink(missing_ok=True)
        folder.rmdir()


@dataclass(frozen=True, slots=True)
class _Member:
    position: int
    window: int
    """Steps that this member may be ahead of others; negative while it joins or stops."""

    def needs(self, step: int) -> bool:
        """Return whether this member will read the batches of a step, and soon."""
        return self.position <= step <= self.position + self.window


def _read_member(path: Path) -> _Member | None:
    """Return the member, or None if it is dead."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:  # it holds its lock, so it lives
        content = os.pread(file, _MEMBER.size, 0)
        return _Member(*(_MEMBER.unpack(content) if len(content) == _MEMBER.size else (-1, -1)))
    else:
        return None
    finally:
        os.close(file)


class Exchange:
    """Get batches from other members, or decode them for all. Used by a member's data workers."""

    def __init__(self, membership: Membership) -> None:
        self.folder, self.name = membership.folder, membership.name
        self.window = membership.window
        self.problem = ""
        """Why this process no longer shares, if it does not."""
        self._began = time.monotonic()
        self._behind: dict[str, float] = {}  # members that were waited for, and since when
        self._skip: set[Request] = set()  # batches that could not be decoded in advance
        self._longest = 0.0  # seconds that decoding a batch took

    def get(self, request: Request, following: Following, decode: Decode) -> Content:
        """Return a batch. While another process decodes it, decode one of the `following`."""
        waiting = time.monotonic()
        while True:
            members, batches = self._look()
            me = members.pop(self.name, None)
            shared = request in batches or any(m.needs(request[0]) for m in members.values())
            last = self._last_step(request[0], me, members) if me else -1
            if not me or self.problem or (not shared and request[0] <= last):
                return decode(request)
            if request[0] <= last:
                if (found := self._take(request, decode)) is not None:
                    return found
                if time.monotonic() - waiting > max(SILENCE, 10 * self._longest):
                    return decode(request)  # the process that decodes it may be stopped
                if self._decode_ahead(following, last, batches, decode):
                    continue
            else:
                waiting = time.monotonic()
            time.sleep(min(0.05, 0.001 + 0.05 * (time.monotonic() - waiting)))

    def _look(self) -> tuple[dict[str, _Member], set[Request]]:
        """Return the living members and the batches; remove what nobody needs any more."""
        members: dict[str, _Member] = {}
        batches: set[Request] = set()
        with suppress(OSError):  # the folder is gone
            for path in self.folder.iterdir():
                if not path.name.startswith("member-"):
                    step, _, micro = path.name.partition(".")
                    batches.add((int(step), int(micro)))
                elif (member := _read_member(path)) and member.window >= 0:
                    members[path.name] = member
        for request in [*batches]:
            if not any(member.needs(request[0]) for member in members.values()):
                batches.discard(request)
                self._path(request).unlink(missing_ok=True)
        return members, batches

    def _last_step(self, step: int, me: _Member, others: dict[str, _Member]) -> int:
        """Return the last step that this process may read now.

        It is a window after the slowest member. A member that stays behind for too long is waited
        for no longer, until it is within the window again. Waiting for siblings costs nothing: they
        are coupled when all have finished.
        """
        now, last = time.monotonic(), me.position + self.window
        least, most = PATIENCE
        patience = min(most, max(least, PATIENCE_SHARE * (now - self._began)))
        process = self.name.rpartition("-")[0]
        for name, member in others.items():
            reach = member.position + self.window
            if step <= reach:
                self._behind.pop(name, None)
            elif (
                name.startswith(f"{process}-")  # this process: it cannot move while we wait
                or now - self._behind.setdefault(name, now) > patience
            ):
                continue
            last = min(last, reach)
        return last

    def _take(self, request: Request, decode: Decode) -> Content | None:
        """Return a batch, or None if another process is decoding it."""
        try:
            file = os.open(self._path(request), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:  # the folder is gone, or the memory is full
            return decode(request)
        try:
            if (found := _load(file)) is not None:
                return found
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            if (found := _load(file)) is not None:  # completed a moment ago
                fcntl.flock(file, fcntl.LOCK_UN)  # the mapping keeps the file open
                return found
            began = time.monotonic()
            content = decode(request)
            self._longest = max(self._longest, time.monotonic() - began)
            self._publish(file, content)
            return content
        finally:
            os.close(file)

    def _decode_ahead(
        self,
        following: Following,
        last: int,
        batches: set[Request],
        decode: Decode,
    ) -> bool:
        """Decode the next batch that nobody decodes yet, for all members; return whether it did."""
        for request in following():
            if request[0] > last:
                return False
            if request not in batches and request not in self._skip:
                try:
                    self._take(request, decode)
                except DataError:  # it is raised when the batch's turn comes
                    self._skip.add(request)
                return True
        return False

    def _publish(self, file: int, content: Content) -> None:
        """Write a batch. What marks it as complete is written last."""
        images, facts = content
        text = json.dumps([list(images.shape), facts]).encode()
        pixels = images.contiguous().view(-1).numpy().data
        try:
            space = os.fstatvfs(file)
            if space.f_bavail * space.f_frsize - len(pixels) < FREE_SHARE * (
                space.f_blocks * space.f_frsize
            ):
                raise OSError(f"less than {FREE_SHARE:.0%} of it would be free")
            os.ftruncate(file, 0)
            os.lseek(file, _BATCH.size, os.SEEK_SET)
            for part in (memoryview(text), pixels):
                while part:
                    part = part[os.write(file, part) :]
            os.pwrite(file, _BATCH.pack(_COMPLETE, len(text), len(pixels)), 0)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(file, 0)
            self.problem = f"{self.folder.parent} has no room for batches ({error})"

    def _path(self, request: Request) -> Path:
        return self.folder / f"{request[0]}.{request[1]}"


def _load(file: int) -> Content | None:
    """Return the batch in a file, mapped into memory, or None if it is not complete."""
    head = os.pread(file, _BATCH.size, 0)
    if not head.startswith(_COMPLETE):
        return None
    _, text, pixels = _BATCH.unpack(head)
    start = _BATCH.size + text
    shape, facts = json.loads(os.pread(file, text, _BATCH.size))
    mapped = mmap.mmap(file, start + pixels, access=mmap.ACCESS_COPY)
    return torch.frombuffer(mapped, dtype=torch.uint8, offset=start, count=pixels).view(
        shape
    ), facts
