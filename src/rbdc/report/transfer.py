"""Average detectors' precision over seeds, and print it as the paper's table.

`detectors_part` collects what only a transfer has, for the page and the figures: detectors by
backbone, precision and cost.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

COLUMNS = {
    "mAP": "ap", "50": "ap50", "75": "ap75", "S": "ap_small", "M": "ap_medium", "L": "ap_large",
}  # fmt: skip
PARTS = {"boxes": "box", "masks": "mask"}
_COST = ("total_parameters", "total_flops", "height", "width", "proposals", "detections")

Row = Mapping[str, Any]
Cell = dict[str, float | None]


def precision(rows: Sequence[Row]) -> dict[str, Any]:
    """Return means and standard deviations over seeds, and differences from the first backbone.

    `rows` are those of a transfer's result: each names its backbone, and has the seed and the
    scores of each trained detector. A score that no detector has is None.
    """
    rows = [row for row in rows if row["trained"]]
    lines = {part: [_line(row, rows[0], part) for row in rows] for part in PARTS}
    return {**lines, "classes": _classes(rows)}


def _line(row: Row, first: Row, part: str) -> dict[str, Any]:
    cells, more = {}, {}
    for name in COLUMNS.values():
        ours, theirs = _by_seed(row, part, name), _by_seed(first, part, name)
        cells[name] = _cell(ours.values())
        more[name] = _cell(ours[seed] - theirs[seed] for seed in ours if seed in theirs)
    line = {"backbone": row["backbone"], "seeds": len(row["trained"]), "cells": cells}
    return {**line, "more": None if row is first else more}


def _by_seed(row: Row, part: str, name: str) -> dict[Any, float]:
    values = {one["seed"]: one["scores"][part].get(name) for one in row["trained"]}
    return {seed: value for seed, value in values.items() if value is not None}


def _cell(found: Iterable[float]) -> Cell | None:
    values = list(found)
    spread = stdev(values) if len(values) > 1 else None
    return {"mean": mean(values), "spread": spread} if values else None


def _classes(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the mean precision of each class for every backbone, of boxes and of masks."""
    everyone = [one["scores"] for row in rows for one in row["trained"]]
    names = dict.fromkeys(
        name for scores in everyone for part in PARTS for name in scores[part].get("by_class", {})
    )
    return [
        {"name": name, **{part: [_class_mean(row, part, name) for row in rows] for part in PARTS}}
        for name in names
    ]


def _class_mean(row: Row, part: str, name: str) -> float | None:
    values = [one["scores"][part].get("by_class", {}).get(name) for one in row["trained"]]
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def has_scores(result: Row) -> bool:
    """Return whether a detector's result holds the scores that are averaged here."""
    scores = result.get("scores")
    return isinstance(scores, dict) and all(
        isinstance(scores.get(part), dict) and COLUMNS["mAP"] in scores[part] for part in PARTS
    )


def detectors_part(
    nodes: Mapping[str, dict[str, Any]], result: Row, missing: list[str]
) -> dict[str, Any]:
    """Return what the page and the figures show of a transfer, finished or not.

    Precision comes from the detectors' own results, so that it is there as soon as one is trained;
    the cost comes with the result of the run. Scores are removed from the nodes, because they are
    long. Everything with an order is a list, because the page's JSON is sorted by its keys.
    """
    rows: dict[str, dict[str, Any]] = {}
    for node in nodes.values():
        backbone = {"backbone": node["backbone"], "keys": [], "trained": []}
        row = rows.setdefault(node["backbone"], backbone)
        row["keys"].append(node["key"])
        found = {"seed": node["seed"], "scores": node.pop("scores")}
        if has_scores(found):
            row["trained"].append(found)
        elif node["state"] == "done":
            missing.append(f"{node['folder']}/result.json: it has no scores")
    finished = [row for row in result.get("rows", []) if isinstance(row, dict)]
    return {
        "detectors": list(nodes),
        "backbones": [{"name": row["backbone"], "keys": row["keys"]} for row in rows.values()],
        "columns": list(COLUMNS.items()),
        "parts": list(PARTS.items()),
        "precision": precision(list(rows.values())),
        "costs": _costs(finished),
        "finished": [one.get("folder") for row in finished for one in row.get("trained", [])],
    }


def _costs(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the costs of the detectors, each once with the backbones that have it."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        cost = row.get("cost")
        if not isinstance(cost, dict) or not isinstance(cost.get("parameters"), dict):
            continue
        flops = cost.get("flops") or {}
        parts = [
            {"name": name, "parameters": count, "flops": flops.get(name)}
            for name, count in cost["parameters"].items()
        ]
        shown = {**{name: cost.get(name) for name in _COST}, "parts": parts}
        same = found.setdefault(repr(shown), {**shown, "backbones": []})
        same["backbones"].append(row.get("backbone"))
    return list(found.values())


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
        table.add_row(Text(line["backbone"]), *map(cell_text, line["cells"].values()))
    for line in lines[1:]:
        name = Text(f"{line['backbone']} - {lines[0]['backbone']}")  # a name is no markup
        cells = [cell_text(cell, sign="+") for cell in line["more"].values()]
        table.add_row(name, *cells, style="dim")
    return table


def cell_text(cell: Cell | None, sign: str = "") -> str:
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
        cells = [cell_text({"mean": value, "spread": None}) for pair in pairs for value in pair]
        table.add_row(Text(one["name"]), *cells)
    return table
