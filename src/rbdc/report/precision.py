"""Average detectors' precision over seeds, for the terminal's table, the page and the figures.

`detectors_part` collects what only a transfer has: detectors by backbone, precision and cost.
"""

from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

COLUMNS = {
    "mAP": "ap",
    "50": "ap50",
    "75": "ap75",
    "S": "ap_small",
    "M": "ap_medium",
    "L": "ap_large",
}
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
    first = rows[0] if rows else None
    return {
        part: [
            {
                "backbone": row["backbone"],
                "seeds": len(row["trained"]),
                "cells": {name: _cell(_by_seed(row, part, name)) for name in COLUMNS.values()},
                "more": None if row is first else _differences(row, rows[0], part),
            }
            for row in rows
        ]
        for part in PARTS
    } | {"classes": _classes(rows)}


def has_scores(result: Row) -> bool:
    """Return whether a detector's result holds the scores that are averaged here."""
    scores = result.get("scores")
    return isinstance(scores, dict) and all(
        isinstance(scores.get(part), dict) and COLUMNS["mAP"] in scores[part] for part in PARTS
    )


def _differences(row: Row, first: Row, part: str) -> dict[str, Cell | None]:
    """Return the differences from the first backbone's detectors of the same seeds."""
    found = {}
    for name in COLUMNS.values():
        ours, theirs = _by_seed(row, part, name), _by_seed(first, part, name)
        found[name] = _cell({seed: ours[seed] - theirs[seed] for seed in ours if seed in theirs})
    return found


def _by_seed(row: Row, part: str, name: str) -> dict[Any, float]:
    values = {one["seed"]: one["scores"][part].get(name) for one in row["trained"]}
    return {seed: value for seed, value in values.items() if value is not None}


def _cell(by_seed: Mapping[Any, float]) -> Cell | None:
    values = list(by_seed.values())
    if not values:
        return None
    return {"mean": mean(values), "spread": stdev(values) if len(values) > 1 else None}


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
        row = rows.setdefault(
            node["backbone"], {"backbone": node["backbone"], "keys": [], "trained": []}
        )
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
        shown = {name: cost.get(name) for name in _COST} | {
            "parts": [
                {"name": name, "parameters": count, "flops": flops.get(name)}
                for name, count in cost["parameters"].items()
            ]
        }
        same = found.setdefault(repr(shown), {**shown, "backbones": []})
        same["backbones"].append(row.get("backbone"))
    return list(found.values())
