"""Render runs as one self-contained page, which needs no network and no server.

Sheets of predictions are made small enough for it.
"""

import base64
import gzip
import json
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Any

from jinja2 import Environment
from PIL import Image
from plotly.offline import get_plotlyjs

from rbdc.disk import read_bytes, write_text
from rbdc.errors import RbdcError
from rbdc.jobs.layout import SHEET
from rbdc.report.read import read_run

REPORT, MARK = "report.html", b'name="generator" content="rbdc"'
SCRIPTS = ("dom.js", "tree.js", "charts.js", "transfer.js", "language.js", "page.js")
MOST_BYTES = 1_500_000  # of all sheets of a page, in base64
_FITS = ((1920, 85), (1920, 70), (1440, 70), (1000, 65), (700, 60), (480, 50))
"""(Largest width in pixels, JPEG quality): the first that is small enough is taken."""


def read_state(folders: Sequence[Path]) -> dict[str, Any]:
    """Return what the page shows of these runs."""
    runs = [read_run(folder) for folder in folders]
    with_sheets = sum(bool(run["transfer"]) for run in runs)
    for run in runs:
        add_sheets(run, MOST_BYTES // max(1, with_sheets))
    # JSON has no word for numbers that are not finite: None stands for them
    state: dict[str, Any] = json.loads(json.dumps({"runs": runs}), parse_constant=lambda _: None)
    return state


def render(state: dict[str, Any], *, refresh_seconds: float = 0.0) -> str:
    """Return the page's HTML. A served page reloads the state every `refresh_seconds`."""
    here = files("rbdc.report.page")
    environment = Environment(autoescape=True)
    environment.policies["json.dumps_kwargs"] = {"sort_keys": True, "separators": (",", ":")}
    template = environment.from_string((here / "page.html.j2").read_text())
    return template.render(
        title=" · ".join(run["name"] for run in state["runs"]) + " – RBDC",
        state=state,
        style=(here / "page.css").read_text(),
        script="\n".join((here / name).read_text() for name in SCRIPTS),
        plotly=_charts_library(),
        live=refresh_seconds,
    )


def write_report(folders: Sequence[Path], output: Path) -> Path:
    """Write one HTML file of all these runs; return its path."""
    state = read_state(folders)
    check_report(output)
    write_text(output, render(state), durable=True)  # a torn one would count as somebody else's
    return output


def check_report(output: Path) -> None:
    """Refuse a path that cannot be written, or holds something other than a report."""
    if output.suffix not in (".html", ".htm"):
        raise RbdcError(f"{output} is not a page's name", "End it in .html.")
    folder = output.absolute().parent
    if output.is_dir() or not folder.is_dir():
        found = f"{output} is a folder" if output.is_dir() else f"{folder} is not a folder"
        raise RbdcError(found, "Give a file's name in a folder that exists.")
    if output.exists() and MARK not in output.read_bytes()[:1000]:
        remedy = "Choose another name, or remove it yourself."
        raise RbdcError(f"{output} exists and is no report", remedy)


@cache
def _charts_library() -> str:
    """Return Plotly's JavaScript, compressed because it is large; the browser unpacks it."""
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


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
    content = read_bytes(path)
    with Image.open(BytesIO(content), formats=("PNG", "JPEG")) as picture:  # EPS would be run
        picture.load()
        whole = _data("png", content)
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
