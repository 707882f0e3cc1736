"""A run's folder as one value: all that the page and the figures show.

Only files are read, whatever state they are in. What is missing or broken is listed, and the rest
is shown without it.
"""

import csv
import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import Any

from rbdc.disk import read_json
from rbdc.errors import RbdcError, RunError
from rbdc.jobs.layout import JOB, RESULT, RUN
from rbdc.jobs.lock import holder
from rbdc.report.detectors import detectors_part
from rbdc.report.run import last_scores, node_status
from rbdc.runs.record import check_format

_MEASURED = ("top1", "box_map", "mask_map")
EVALUATED = (
    *("epoch", "flops", "seconds", "loss", "train_loss", "lr"),
    *_MEASURED,
    *(f"ema_{name}" for name in _MEASURED),
)
LOGGED = ("epoch", "flops", "seconds", "loss", "lr")
MOST_POINTS, MOST_OF_ONE = 60_000, 400  # of logged steps: of a run, of a training
MOST_BLOCK_ROWS = 30  # times at which a training's blocks are shown
_LONG = ("nodes", "rows", "lines", "recipe", "data_set")  # of a result: not for the page

Columns = dict[str, list[Any]]


class Found:
    """Reads a folder's files, and remembers what could not be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.missing: list[str] = []

    def json(self, path: Path) -> dict[str, Any]:
        """Empty if it is not there."""
        try:
            return read_json(path) or {}
        except RunError as error:
            self.missing.append(error.problem.replace(f"{self.folder}/", ""))
            return {}

    def lines(self, path: Path) -> list[dict[str, Any]]:
        """Of a JSONL file, as far as it can be read: the last line may be half written."""
        rows: list[dict[str, Any]] = []
        for number, line in enumerate(self._text(path).splitlines()):
            try:
                rows.append(json.loads(line))
            except ValueError:
                self._miss(path, f"line {number + 1} and what follows")
                break
        return rows

    def table(self, path: Path) -> list[dict[str, float | None]]:
        """Of a CSV file of numbers."""
        rows = []
        for number, row in enumerate(csv.DictReader(self._text(path).splitlines())):
            try:
                if None in row.values():  # it ends before the last column
                    raise ValueError
                rows.append({name: float(value) if value else None for name, value in row.items()})
            except (TypeError, ValueError):
                self._miss(path, f"row {number + 1} and what follows")
                break
        return rows

    def _text(self, path: Path) -> str:
        try:
            return path.read_text()
        except FileNotFoundError:
            return ""  # not yet
        except (OSError, ValueError) as error:
            self._miss(path, f"it cannot be read ({error})")
            return ""

    def _miss(self, path: Path, what: str) -> None:
        self.missing.append(f"{path.relative_to(self.folder)}: {what}")


def read_run(folder: Path) -> dict[str, Any]:
    """All of a run, of a comparison or of a transfer, in its folder."""
    found = Found(folder)
    run = found.json(folder / RUN)
    if not run and not found.missing:
        raise RunError(f"{folder} holds no run", f"A run's folder has a {RUN}.")
    if run:
        check_format(folder, run)
    described = {node["key"]: node for node in run.get("nodes", [])}
    result = found.json(folder / RESULT)
    kind, identity = run.get("kind"), run.get("identity") or {}
    transfer, summary = kind == "transfer", result if kind == "compare" else {}
    setting = identity.get("setting") or identity.get("transfer") or {}
    trees = [] if transfer else _trees(described, summary)
    shown = dict.fromkeys(described if transfer else (k for tree in trees for k in tree["keys"]))
    points = max(20, min(MOST_OF_ONE, MOST_POINTS // max(1, len(shown))))
    owner = _tried(found, lambda: holder(folder))
    nodes = {
        key: _node(found, described[key], running=owner is not None, points=points) for key in shown
    }
    for node in nodes.values():
        _place(node, nodes)
    detectors = detectors_part(nodes, result, found.missing) if transfer else None
    if result:
        found.missing += _gone(nodes, detectors)
    return {
        "name": folder.resolve().name,
        "folder": str(folder),
        "running": owner,
        "started": run.get("started"),
        "command": shlex.join(["rbdc", *run.get("command", [])]) if run else None,
        "kind": kind,
        "about": {} if transfer else {**setting, **identity.get("plan", {})},
        "recipe": setting.get("recipe") or {},
        "request": run.get("request") or {},
        "asked": _asked(run.get("request") or {}, setting) if kind == "train" else {},
        "data": run.get("data", {}),
        **{part: run.get(part, {}) for part in ("environment", "engine", "machine")},
        "nodes": nodes,
        "trees": trees,
        "levels": _levels(nodes, trees[0]["keys"]) if trees and kind == "train" else [],
        "result": {k: v for k, v in result.items() if k not in ("nodes", "rows")}
        if kind != "compare"
        else {},
        "transfer": detectors,
        "summary": summary,
        "missing": list(dict.fromkeys(found.missing)),
    }


def _gone(nodes: Mapping[str, Any], detectors: Mapping[str, Any] | None) -> list[str]:
    """Of a finished run nothing can be waiting, unless detectors were added to it."""
    waiting = [node["folder"] for node in nodes.values() if node["state"] == "waiting"]
    known = waiting if detectors is None else detectors["finished"]
    return [f"{place} is gone" for place in waiting if place in known]


def _asked(request: Mapping[str, Any], setting: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides the result beside the plan, the recipe and the data."""
    names = ("seed", "transition", "carry_warmup_epochs", "narrow_lr", "allow_inexact")
    return {**{name: request.get(name) for name in names}, "teacher": setting.get("teacher")}


def _tried(found: Found, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (RbdcError, OSError, ValueError) as error:
        problem = error.problem if isinstance(error, RbdcError) else str(error)
        found.missing.append(problem.replace(f"{found.folder}/", ""))
        return None


def _node(found: Found, node: Mapping[str, Any], *, running: bool, points: int) -> dict[str, Any]:
    place = found.folder / node["folder"]
    status = _tried(found, lambda: node_status(found.folder, node, running))
    result, job = found.json(place / RESULT), found.json(place / JOB)
    method, detects = node.get("method") or {}, node["kind"] == "detect"
    coupled = node["parents"] or node["name"].startswith("standard")  # the one to compare with
    blocks = _thinned(found.lines(place / "blocks.jsonl"), MOST_BLOCK_ROWS) if coupled else []
    logged, evaluated = found.lines(place / "log.jsonl"), found.table(place / "summary.csv")
    so_far = {  # of a training that is not finished
        "seconds": max((row.get("seconds") or 0.0 for row in (*logged, *evaluated)), default=None),
        **last_scores(node["kind"], evaluated[-1] if evaluated else {}),
    }
    return {
        "state": "unreadable",
        **last_scores(node["kind"], {}),
        "flops": 0.0,
        "epochs": node.get("epochs"),
        **(status or {}),
        **({} if result else so_far),
        **{name: node.get(name) for name in ("key", "name", "kind", "level", "width", "folder")},
        **({"backbone": node["backbone"], "scores": result.get("scores")} if detects else {}),
        "parents": node["parents"],
        "seed": str(node["seed"]) if "seed" in node else None,  # too long for JavaScript
        "planned_flops": node["flops"],
        "method": " ".join(str(method[k]) for k in ("name", "transition") if k in method),
        "best": result.get("best"),
        "top5": result.get("top5"),
        "loss": result.get("loss"),
        "images": result.get("images"),
        "proof_error": result.get("proof_error"),
        "norm_drift": result.get("norm_drift"),
        "task": {k: v for k, v in _task(job).items() if k not in ("recipe", "seed", "data_seed")},
        "lr": job.get("task", {}).get("recipe", {}).get("lr"),
        "history": _columns(evaluated, EVALUATED),
        "steps": _columns(_thinned(logged, points), LOGGED),
        "blocks": _blocks(blocks),
    }


def _task(job: Mapping[str, Any]) -> dict[str, Any]:
    """A training's settings, or what a detector is built on."""
    backbone = job.get("backbone") or {}
    spec = backbone.get("spec") or {}
    built_on = {"model": spec.get("name"), "weights": backbone.get("sha256") or "untrained"}
    return job.get("task") or ({**spec.get("arguments", {}), **built_on} if spec else {})


def _columns(rows: Sequence[Mapping[str, Any]], names: Iterable[str]) -> Columns:
    return {
        name: [_short(row.get(name)) for row in rows]
        for name in names
        if any(row.get(name) is not None for row in rows)
    }


def _thinned(rows: Sequence[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Evenly chosen rows, the first and the last among them."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]


def _short(value: float | None) -> float | None:
    """To five digits; what is not finite is not there."""
    return float(f"{value:.5g}") if value is not None and isfinite(value) else None


def _blocks(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Layer by layer, time by time: the sizes of n x n blocks, row after row."""
    if not rows:
        return None
    names = list(rows[0]["blocks"])
    return {
        **{axis: [_short(row[axis]) for row in rows] for axis in ("epoch", "flops")},
        "names": names,
        "sizes": [[list(chain(*row["blocks"][name])) for name in names] for row in rows],
    }


def _place(node: dict[str, Any], nodes: Mapping[str, dict[str, Any]]) -> None:
    """Where its curves begin: behind its parents' epochs, and the time of all it came from."""
    ancestors = closure(node["key"], nodes)[:-1]
    node["seconds_before"] = sum(nodes[key].get("seconds") or 0.0 for key in ancestors)
    node["flops_before"] = _flops_before(node, nodes)
    node["epochs_before"] = _epochs_before(node, nodes)
    grown = [nodes[k] for k in node["parents"] if k in nodes and nodes[k]["kind"] == "grow"]
    for name in ("top1", "loss"):  # right after the coupling, before any step
        start = grown[0].get(name) if grown and node["kind"] == "train" else None
        node[f"start_{name}"] = start


def _flops_before(node: Mapping[str, Any], nodes: Mapping[str, Any]) -> float:
    parents = [nodes[key] for key in node["parents"] if key in nodes]
    return float(sum(p["planned_flops"] + _flops_before(p, nodes) for p in parents))


def _epochs_before(node: Mapping[str, Any], nodes: Mapping[str, Any]) -> float:
    parents = [nodes[key] for key in node["parents"] if key in nodes]
    return max(((p["epochs"] or 0.0) + _epochs_before(p, nodes) for p in parents), default=0.0)


def closure(key: str, nodes: Mapping[str, Any]) -> list[str]:
    """A node and all it came from, each once, parents first."""
    seen: dict[str, None] = {}

    def visit(key: str) -> None:
        if key in nodes and key not in seen:
            for parent in nodes[key]["parents"]:
                visit(parent)
            seen[key] = None

    visit(key)
    return list(seen)


def _trees(nodes: Mapping[str, Any], summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What can be drawn: the run's tree with standard training beside it, or a trial each."""
    by_folder = {node["folder"]: key for key, node in nodes.items()}
    trials = [
        {
            "title": f"{row['protocol']}, FLOPs {row['flops']:.3g}, seed {row['seed']}",
            "keys": closure(by_folder[row["target"]], nodes),
        }
        for row in summary.get("rows", [])
        if row.get("target") in by_folder
    ]
    if trials:
        return trials
    used = {parent for node in nodes.values() for parent in node["parents"]}
    ends = [key for key in nodes if key not in used]
    if len(ends) > 2:  # a comparison that has no results yet
        return [{"title": nodes[key]["name"], "keys": closure(key, nodes)} for key in ends]
    keys = [k for end in ends for k in closure(end, nodes)]
    return [{"title": "all models", "keys": keys}] if keys else []


def _levels(nodes: Mapping[str, Any], keys: Iterable[str]) -> list[dict[str, Any]]:
    """What each level was to cost and has cost; leaves first. Standard training apart."""
    groups: dict[tuple[bool, int], list[dict[str, Any]]] = {}
    for key in keys:
        node = nodes[key]
        groups.setdefault((node["name"] == "standard", -node["level"]), []).append(node)
    return [
        {
            "standard": standard,
            "level": -level,
            "width": members[0]["width"],
            "models": sum(node["kind"] == "train" for node in members),
            "planned_flops": sum(node["planned_flops"] for node in members),
            "flops": sum(node["flops"] for node in members),
            "seconds": sum(node.get("seconds") or 0.0 for node in members),
            "planned_passes": sum(node["epochs"] or 0.0 for node in members),
            "passes": sum((node["epochs"] or 0.0) * _share(node) for node in members),
        }
        for (standard, level), members in sorted(groups.items())
    ]


def _share(node: Mapping[str, Any]) -> float:
    if node["state"] == "done":
        return 1.0
    progress = node.get("progress")
    return progress["step"] / progress["steps"] if progress else 0.0
