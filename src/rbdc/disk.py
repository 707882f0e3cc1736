"""Write files atomically and durably."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from rbdc.errors import RbdcError, RunError


def write_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a text file, replacing an old one atomically. `durable` waits until it is on disk."""
    partial = path.with_name(f".{path.name}.partial")
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
    """Write a JSON file, and wait until it is on disk."""
    try:
        write_text(path, json.dumps(content, indent=2) + "\n", durable=True)
    except OSError as error:
        raise RunError(
            f"{path} could not be written: {error}",
            "Free some space or repair the disk, then run the same command to resume.",
        ) from error


def read_json(
    path: Path, error: type[RbdcError] = RunError, remedy: str = "Remove it and try again."
) -> dict[str, Any] | None:
    """Read a JSON object. Return None if there is no file, raise `error` if it is damaged."""
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, OSError) as reason:
        raise error(f"{path} cannot be read: {reason}", remedy) from None
    if not isinstance(content, dict):
        raise error(f"{path} contains no JSON object", remedy)
    return content


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
