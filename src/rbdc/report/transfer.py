"""Detectors for people: the table of the paper's layout, with differences and spread."""

from collections.abc import Mapping, Sequence
from statistics import stdev
from typing import Any

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table

COLUMNS = {
    "mAP": "ap",
    "50": "ap50",
    "75": "ap75",
    "S": "ap_small",
    "M": "ap_medium",
    "L": "ap_large",
}
PARTS = (("boxes", "box"), ("masks", "mask"))


def transfer_table(result: Mapping[str, Any], *, by_class: bool = False) -> RenderableType:
    """Box and mask precision in percent: a row a backbone, then what it has more than the first."""
    rows = [row for row in result["rows"] if row["trained"]]
    if not rows:
        return "no detector is trained yet"
    tables: list[RenderableType] = [_precision_table(rows, part, title) for part, title in PARTS]
    if by_class:
        tables.append(_class_table(rows))
    return Group(*tables)


def _precision_table(rows: Sequence[Mapping[str, Any]], part: str, title: str) -> Table:
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column(title, overflow="fold")
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row["backbone"], *(_cell(row, part, name) for name in COLUMNS.values()))
    for row in rows[1:]:
        table.add_row(
            f"{row['backbone']} - {rows[0]['backbone']}",
            *(_difference(row, rows[0], part, name) for name in COLUMNS.values()),
            style="dim",
        )
    return table


def _values(row: Mapping[str, Any], part: str, name: str) -> list[float | None]:
    return [trained["scores"][part][name] for trained in row["trained"]]


def _cell(row: Mapping[str, Any], part: str, name: str) -> str:
    """The mean over seeds, with their standard deviation where there are several."""
    known = [value for value in _values(row, part, name) if value is not None]
    if not known:
        return "–"
    spread = f" ± {100 * stdev(known):.1f}" if len(known) > 1 else ""
    return f"{100 * row['mean'][part][name]:.1f}{spread}"


def _difference(row: Mapping[str, Any], first: Mapping[str, Any], part: str, name: str) -> str:
    """Of the same seeds, one by one."""
    pairs = zip(_values(row, part, name), _values(first, part, name), strict=False)
    known = [100 * (a - b) for a, b in pairs if a is not None and b is not None]
    if not known:
        return "–"
    spread = f" ± {stdev(known):.1f}" if len(known) > 1 else ""
    return f"{sum(known) / len(known):+.1f}{spread}"


def _class_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("mAP by class")
    for row in rows:
        for _, title in PARTS:
            table.add_column(f"{row['backbone']} {title}", justify="right")
    for name in rows[0]["trained"][0]["scores"]["boxes"]["by_class"]:
        cells = []
        for row in rows:
            for part, _ in PARTS:
                values = [t["scores"][part]["by_class"].get(name) for t in row["trained"]]
                known = [value for value in values if value is not None]
                cells.append(f"{100 * sum(known) / len(known):.1f}" if known else "–")
        table.add_row(name, *cells)
    return table
