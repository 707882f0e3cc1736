"""Write files atomically and durably. Read files, whoever wrote them, into typed values."""

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar, cast
from uuid import uuid4

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import is_typeddict

from rbdc.errors import RbdcError, RunError

T = TypeVar("T")
Json = dict[str, Any]
"""The shape of a file of which only this much is known: names and values."""
SHAPE = ConfigDict(strict=True, extra="allow")
"""How the TypedDicts are checked that describe files: entries they do not name are kept."""
CHECKSUM = "checksum"  # the last entry of our JSON files
MOST_BYTES = 2**29  # of a file that is read at once
MOST_LEVELS = 50  # of lists and mappings inside each other
_NESTED = (dict, list)
MOST_WHOLE, MOST_NUMBER = 2**64, 1e100  # seeds have 64 bits; products of larger floats overflow
Number = Annotated[int, Field(ge=-MOST_WHOLE, le=MOST_WHOLE)] | float
"""The shape of a number: a whole one stays one."""


def write_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a text file, replacing an old one atomically. `durable` waits until it is on disk."""
    partial = path.with_name(f".{path.name}.{uuid4().hex[:8]}.partial")  # two may write one file
    try:
        partial.write_text(text)
        if durable:
            sync(partial)  # before the rename: a power cut could otherwise leave an empty file
        partial.replace(path)
        if durable:
            sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file with its checksum, and wait until it is on disk."""
    try:
        write_text(path, json_text(content), durable=True)
    except OSError as error:
        raise RunError(
            f"{path} could not be written: {error}",
            "Free some space or repair the disk, then run the same command to resume.",
        ) from error


def json_text(content: Mapping[str, Any]) -> str:
    """Return the text of a JSON file: the content, and a checksum that `read_json` compares."""
    return json.dumps({**content, CHECKSUM: _checksum(content)}, indent=2) + "\n"


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def read_json(
    path: Path,
    shape: type[T],
    error: type[RbdcError] = RunError,
    remedy: str = "rbdc doctor RUN --repair removes it; the run's command then computes it again.",
) -> T | None:
    """Read a JSON file that has this shape. Return None if there is no file.

    Raise `error` with the path and the first thing that is wrong, if it is damaged. A file of
    another program, or of an older version, has no checksum to compare.
    """
    try:
        content = parse_json(read_bytes(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, OSError) as reason:
        raise error(f"{path} cannot be read: {reason}", remedy) from None
    written = content.pop(CHECKSUM, None) if isinstance(content, dict) else None
    if written is not None and written != _checksum(content):
        raise error(f"{path} is damaged or was changed: its checksum is another", remedy)
    return check_shape(content, shape, str(path), error, remedy)


def check_shape(content: Any, shape: type[T], where: str, error: type[RbdcError], remedy: str) -> T:
    """Return content that has this shape, or raise `error` with the first thing that is wrong."""
    try:
        adapter: TypeAdapter[T] = _adapter(cast(Any, shape))
        return adapter.validate_python(content)
    except ValidationError as found:
        first = found.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "it"
        said = repr(first["input"])[:80]
        reason = f"{place} is {said}: {first['msg']}" if first["type"] != "missing" else place
        text = "lacks" if first["type"] == "missing" else "is damaged:"
        raise error(f"{where} {text} {reason}", remedy) from None


@cache
def _adapter(shape: Any) -> TypeAdapter[Any]:
    return TypeAdapter(shape, config=None if is_typeddict(shape) else SHAPE)


def read_lines(path: Path, shape: type[T]) -> tuple[list[T], list[int]]:
    """Read a JSONL file. Return the lines of this shape, and the numbers of the other lines."""
    rows: list[T] = []
    damaged = []
    adapter: TypeAdapter[T] = _adapter(cast(Any, shape))
    with open_file(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                rows.append(adapter.validate_json(line))
            except ValueError:
                damaged.append(number)
    return rows, damaged


def read_bytes(path: Path) -> bytes:
    """Read a file of at most 512 MiB. Raise a ValueError for another, an OSError for none."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MOST_BYTES:
            raise ValueError(f"it has {size:,} bytes, more than {MOST_BYTES:,}")
        return file.read()


def open_file(path: Path) -> BinaryIO:
    """Open a file to read. Raise a ValueError for pipes and devices, which may never end."""
    file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115 - the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError("it is not a file")
    return file


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # otherwise a pipe is waited for


def parse_json(text: bytes) -> Any:
    """Parse JSON. Raise a ValueError also for deep nesting, and for numbers that nothing has."""
    try:
        content = json.loads(text, parse_int=_whole_number, parse_float=_number)
    except RecursionError:
        raise ValueError(f"it has more than {MOST_LEVELS} levels") from None
    values = [content]
    for _level in range(MOST_LEVELS):
        inner = (v.values() if isinstance(v, dict) else v for v in values if isinstance(v, _NESTED))
        values = [value for some in inner for value in some]
        if not values:
            return content
    raise ValueError(f"it has more than {MOST_LEVELS} levels")


def _whole_number(text: str) -> int:
    if len(text) > 20 or abs(number := int(text)) > MOST_WHOLE:
        raise ValueError(f"the number {text[:20]}... has {len(text)} digits")
    return number


def _number(text: str) -> float:
    if abs(number := float(text)) > MOST_NUMBER:
        raise ValueError(f"the number {text[:20]} is larger than {MOST_NUMBER:g}")
    return number


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder, and move it to `target`. An old folder is deleted after that."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{uuid4().hex[:8]}.partial")
    old = partial.with_suffix(".old")
    try:
        partial.mkdir()
        yield partial
        for path in (*partial.rglob("*"), partial):
            sync(path)
        if target.exists():
            target.rename(old)
        partial.rename(target)
        sync(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        if old.exists() and not target.exists():
            old.rename(target)
        shutil.rmtree(partial, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file as a hexadecimal string."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk on which `folder` is, or will be."""
    return shutil.disk_usage(_existing(folder)).free


def is_writable(folder: Path) -> bool:
    """Return whether `folder` can be written to, or created."""
    existing = _existing(folder)
    return existing.is_dir() and os.access(existing, os.W_OK)


def _existing(folder: Path) -> Path:
    folder = folder.resolve()
    return next(path for path in (folder, *folder.parents) if path.exists())


def remembered(
    folder: Path,
    about: Mapping[str, Any],
    compute: Callable[[], dict[str, Any]],
    *,
    again: bool = False,
) -> tuple[dict[str, Any], bool]:
    """Return what was computed for exactly this before, and whether it was; else compute it."""
    about = json.loads(json.dumps(about))
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    path = folder / f"{digest[:16]}.json"
    if not again and (found := _read(path)) and found.get("about") == about:
        return found["computed"], True
    computed = compute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, {"about": about, "computed": computed})
    except (OSError, RbdcError):
        pass  # a folder that cannot be written costs another computation, nothing else
    return computed, False


def _read(path: Path) -> dict[str, Any] | None:
    """Read a stored result; a damaged file counts as none."""
    try:
        found = read_json(path, Json)
    except RbdcError:
        return None
    return found if found and isinstance(found.get("computed"), dict) else None
