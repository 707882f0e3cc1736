"""Make sheets of predictions small enough for the page."""

import base64
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from rbdc.jobs.layout import SHEET

MOST_BYTES = 1_500_000  # of all sheets of a page, in base64
_FITS = ((1920, 85), (1920, 70), (1440, 70), (1000, 65), (700, 60), (480, 50))
"""(Largest width in pixels, JPEG quality): the first that is small enough is taken."""


def add_sheets(run: dict[str, Any], most_bytes: int) -> None:
    """Add a data URL of its sheet to each trained detector of a run, in `most_bytes` together.

    A sheet that is missing or unreadable is listed in the run's `missing`.
    """
    if not run["transfer"]:
        return
    folder = Path(run["folder"])
    trained = [node for node in run["nodes"].values() if node["state"] == "done"]
    for node in trained:
        path = Path(node["folder"]) / SHEET
        try:
            changed = (folder / path).stat().st_mtime_ns
            node["sheet"] = _address(folder / path, changed, most_bytes // len(trained))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            known = isinstance(error, FileNotFoundError)
            brief = str(error).replace(f"{folder}/", "")
            why = "it is not there" if known else f"it cannot be read ({brief})"
            run["missing"].append(f"{path}: {why}")


@lru_cache(maxsize=64)  # a served page asks again every few seconds
def _address(path: Path, _changed: int, most_bytes: int) -> str:
    """Return a data URL: the file if it is small, else a JPEG; empty if that is too large, too."""
    with Image.open(path) as picture:
        picture.load()
        whole = _data("png", path.read_bytes())
        if len(whole) <= most_bytes and picture.format == "PNG":
            return whole
        flat = picture.convert("RGB")
    for across, quality in _FITS:
        small = flat.copy()
        small.thumbnail((across, across * 4))
        file = BytesIO()
        small.save(file, "JPEG", quality=quality)
        if len(address := _data("jpeg", file.getvalue())) <= most_bytes:
            return address
    return ""


def _data(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
