"""Collect what only a transfer has: detectors by backbone, their precision and their cost."""

from collections.abc import Mapping, Sequence
from typing import Any

from rbdc.report.precision import COLUMNS, PARTS, has_scores, precision

_COST = ("total_parameters", "total_flops", "height", "width", "proposals", "detections")

Nodes = Mapping[str, dict[str, Any]]


def detectors_part(nodes: Nodes, result: Mapping[str, Any], missing: list[str]) -> dict[str, Any]:
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


def _costs(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
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
