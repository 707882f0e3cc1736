"""Files that are written whole or not at all, and are on the disk when the call returns."""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rbdc.errors import RunError


def write_text(path: Path, text: str, *, durable: bool = False) -> None:
    """A small file; what was there is replaced in one step, which `durable` waits for."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text)
        if durable:
            sync(partial)  # first: else a power cut may leave the new name with nothing in it
        partial.replace(path)
        if durable:
            sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """A JSON file that survives a power cut right after."""
    try:
        write_text(path, json.dumps(content, indent=2) + "\n", durable=True)
    except OSError as error:
        raise RunError(
            f"{path} could not be written: {error}",
            "Make room or mend the disk, then give the same command: it goes on.",
        ) from error


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON file that `write_json` wrote; None if it is not there."""
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, OSError) as error:
        raise RunError(f"{path} cannot be read: {error}", "Remove it and go on.") from None
    if not isinstance(content, dict):
        raise RunError(f"{path} holds no JSON object", "Remove it and go on.")
    return content


def replace_folder(partial: Path, target: Path) -> None:
    """Put a finished folder in its place; what was there goes only when the new one stands."""
    old = partial.with_suffix(".old")
    if target.exists():
        target.rename(old)
    try:
        partial.rename(target)
    except BaseException:
        if old.exists():
            old.rename(target)
        raise
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def free_bytes(folder: Path) -> int:
    """Free space where `folder` is, or will be."""
    return shutil.disk_usage(_existing(folder)).free


def is_writable(folder: Path) -> bool:
    """Whether `folder` can be written to, or made."""
    place = _existing(folder)
    return place.is_dir() and os.access(place, os.W_OK)


def _existing(folder: Path) -> Path:
    folder = folder.resolve()
    return next(path for path in (folder, *folder.parents) if path.exists())
