"""Print the precision of detectors as the paper's table, with differences and deviations."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rbdc.report.precision import COLUMNS, PARTS, Cell, precision


def transfer_table(result: Mapping[str, Any], *, by_class: bool = False) -> RenderableType:
    """Return box and mask precision in percent: a row per backbone, then the differences."""
    found = precision(result["rows"])
    if not found["boxes"]:
        return "no detector is trained yet"
    tables = [_precision_table(found[part], title) for part, title in PARTS.items()]
    if by_class:
        tables.append(_class_table(found))
    return Group(*tables)


def _precision_table(lines: Sequence[Mapping[str, Any]], title: str) -> Table:
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column(title, overflow="fold")
    for column in COLUMNS:
        table.add_column(column, justify="right", no_wrap=True)
    for line in lines:
        cells = [_text(line["cells"][name]) for name in COLUMNS.values()]
        table.add_row(Text(line["backbone"]), *cells)  # a name is no markup
    for line in lines[1:]:
        cells = [_text(line["more"][name], sign="+") for name in COLUMNS.values()]
        name = Text(f"{line['backbone']} - {lines[0]['backbone']}")
        table.add_row(name, *cells, style="dim")
    return table


def _text(cell: Cell | None, sign: str = "") -> str:
    """Return the mean over seeds in percent, and their standard deviation if there are several."""
    if cell is None or cell["mean"] is None:
        return "–"
    spread = "" if cell["spread"] is None else f" ± {100 * cell['spread']:.1f}"
    return f"{100 * cell['mean']:{sign}.1f}{spread}"


def _class_table(found: Mapping[str, Any]) -> Table:
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("mAP by class")
    for line in found["boxes"]:
        for title in PARTS.values():
            table.add_column(Text(f"{line['backbone']} {title}"), justify="right")
    for one in found["classes"]:
        pairs = zip(*(one[part] for part in PARTS), strict=True)
        cells = [_text({"mean": value, "spread": None}) for pair in pairs for value in pair]
        table.add_row(Text(one["name"]), *cells)
    return table
