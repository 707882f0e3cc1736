"""Sheets of predictions, small enough to go into the page."""

import base64
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from rbdc.jobs.layout import SHEET

MOST_BYTES = 1_500_000  # of all sheets of a page, as text
_FITS = ((1920, 85), (1920, 70), (1440, 70), (1000, 65), (700, 60), (480, 50))
"""(Most pixels across, JPEG's quality): the first that is small enough is taken."""


def add_sheets(run: dict[str, Any], most_bytes: int) -> None:
    """Give each trained detector of a run its sheet as a data address, all in `most_bytes`.

    A sheet that is not there, or not to be read, is named in what is missing.
    """
    if not run["transfer"]:
        return
    folder = Path(run["folder"])
    trained = [node for node in run["nodes"].values() if node["state"] == "done"]
    for node in trained:
        path = Path(node["folder"]) / SHEET
        try:
            found = (folder / path).stat()
            node["sheet"] = _address(
                folder / path, found.st_mtime_ns, found.st_size, most_bytes // len(trained)
            )
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            known = isinstance(error, FileNotFoundError)
            why = "it is not there" if known else f"it cannot be read ({_brief(error, folder)})"
            run["missing"].append(f"{path}: {why}")


def _brief(error: Exception, folder: Path) -> str:
    return str(error).replace(f"{folder}/", "")


@lru_cache(maxsize=64)  # a page that is served asks again every few seconds
def _address(path: Path, _changed: int, size: int, most_bytes: int) -> str:
    """The picture as it is if it is small, else as JPEG; empty if even that is too large."""
    with Image.open(path) as picture:
        picture.load()
        if _text_bytes(size) <= most_bytes and picture.format == "PNG":
            return _data("png", path.read_bytes())
        flat = picture.convert("RGB")
    for across, quality in _FITS:
        small = flat.copy()
        small.thumbnail((across, across * 4))
        file = BytesIO()
        small.save(file, "JPEG", quality=quality)
        if _text_bytes(file.tell()) <= most_bytes:
            return _data("jpeg", file.getvalue())
    return ""


def _text_bytes(size: int) -> int:
    return size * 4 // 3 + 30


def _data(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
