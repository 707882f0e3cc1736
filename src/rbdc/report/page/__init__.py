"""Render runs as one self-contained page, which needs no network and no server."""

import base64
import gzip
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment
from plotly.offline import get_plotlyjs

from rbdc.disk import write_text
from rbdc.errors import RbdcError
from rbdc.report.read import read_run
from rbdc.report.sheets import MOST_BYTES, add_sheets

REPORT, MARK = "report.html", b'name="generator" content="rbdc"'
SCRIPTS = ("dom.js", "tree.js", "charts.js", "transfer.js", "page.js")


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
    template = Environment(autoescape=True).from_string((here / "page.html.j2").read_text())
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
    write_text(output, render(state))
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
