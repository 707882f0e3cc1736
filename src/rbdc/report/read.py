"""Read a run's folder into one value: all that the page and the figures show.

Only files are read, in whatever state they are. Missing and broken files are listed, and the rest
is shown without them.
"""

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rbdc.disk import Json, read_bytes, read_json, read_lines
from rbdc.errors import RbdcError, RunError
from rbdc.jobs.layout import JOB, RESULT, RUN
from rbdc.jobs.lock import holder
from rbdc.jobs.records import BlocksLine, JobRecord, JobResult, LogLine, RunResult
from rbdc.metrics import METRICS, final_scores
from rbdc.report.run import node_status
from rbdc.report.transfer import detectors_part
from rbdc.runs.record import check_format, check_record
from rbdc.settings import names_baseline

EVALUATED = (
    *("epoch", "flops", "seconds", "train_loss", "lr"),
    *(prefix + name for name in METRICS for prefix in ("", "ema_")),
)
LOGGED = ("epoch", "flops", "seconds", "loss", "lr")
MOST_POINTS, MOST_OF_ONE = 30_000, 400  # steps, and epochs, shown: of a run, of a training
MOST_BLOCK_ROWS = 30  # times at which a training's blocks are shown
_LONG = ("nodes", "rows", "lines", "recipe", "data_set")  # of a result: not for the page
_SUMMED = ("planned_flops", "flops", "seconds")  # over a level
_DESCRIBED = ("key", "name", "kind", "level", "width", "image", "sequence_length", "folder",
              "parents")  # fmt: skip
_ASKED = ("seed", "transition", "carry_warmup_epochs", "narrow_lr", "allow_inexact")


T = TypeVar("T")


class Found:
    """A reader of a folder's files that lists what could not be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.missing: list[str] = []

    def tried(self, read: Callable[[], Any]) -> Any:
        """Return what `read` returns; None if it fails, which is listed."""
        try:
            return read()
        except (RbdcError, OSError, ValueError) as error:
            problem = error.problem if isinstance(error, RbdcError) else str(error)
            self.missing.append(problem.replace(f"{self.folder}/", ""))
            return None

    def json(self, path: Path, shape: type = Json) -> dict[str, Any]:
        """Return a JSON file's content; empty if it is not there."""
        return self.tried(lambda: read_json(path, shape)) or {}

    def lines(self, path: Path, shape: type[T]) -> list[T]:
        """Return the undamaged lines of a JSONL file, which may not be there yet."""
        if not path.exists():
            return []
        rows, damaged = self.tried(lambda: read_lines(path, shape)) or ([], [])
        self._left_out(path, "line", damaged)
        return rows

    def table(self, path: Path) -> list[dict[str, float | None]]:
        """Return the undamaged rows of a CSV file of numbers, which may not be there yet."""
        if not path.exists():
            return []
        text = (self.tried(lambda: read_bytes(path)) or b"").decode(errors="replace")
        head, *lines = text.splitlines() or [""]
        names, rows, damaged = head.split(","), [], []
        for number, line in enumerate(lines, start=1):
            cells = line.split(",")  # numbers need no quotes
            try:
                pairs = zip(names, cells, strict=True)
                rows.append({name: float(cell) if cell else None for name, cell in pairs})
            except ValueError:
                damaged.append(number)
        if "\ufffd" in head:
            self.missing.append(f"{path.relative_to(self.folder)}: it cannot be read")
        self._left_out(path, "row", damaged)
        return rows

    def _left_out(self, path: Path, what: str, damaged: Sequence[int]) -> None:
        if damaged:
            more = f" and {len(damaged) - 1} more" if damaged[1:] else ""
            name = path.relative_to(self.folder)
            self.missing.append(f"{name}: {what} {damaged[0]}{more} left out, damaged")


def read_run(folder: Path) -> dict[str, Any]:
    """Return everything about a run, a comparison or a transfer that its folder holds."""
    found = Found(folder)
    run = found.json(folder / RUN)
    if not run and not found.missing:
        raise RunError(f"{folder} holds no run", f"A run's folder has a {RUN}.")
    if run:
        check_format(folder, run)
        run = found.tried(lambda: check_record(folder, run)) or {}
    described = {node["key"]: node for node in run.get("nodes", [])}
    result = found.json(folder / RESULT, RunResult)
    kind, identity = run.get("kind"), run.get("identity") or {}
    transfer, summary = kind == "transfer", result if kind == "compare" else {}
    setting = identity.get("setting") or identity.get("transfer") or {}
    trees = [] if transfer else _trees(described, summary)
    shown = dict.fromkeys(described if transfer else (k for tree in trees for k in tree["keys"]))
    points = max(5, min(MOST_OF_ONE, MOST_POINTS // max(1, len(shown))))
    owner = found.tried(lambda: holder(folder))
    nodes = {
        key: _node(found, described[key], running=owner is not None, points=points) for key in shown
    }
    for node in nodes.values():  # parents first
        _add_start(node, nodes)
    detectors = detectors_part(nodes, result, found.missing) if transfer else None
    if result:  # jobs that wait are lost, unless they were added to a finished transfer
        waiting = [node["folder"] for node in nodes.values() if node["state"] == "waiting"]
        known = waiting if detectors is None else detectors["finished"]
        found.missing += [f"{place} is gone" for place in waiting if place in known]
    request = run.get("request") or {}
    about = {} if transfer else {**setting, **identity.get("plan", {})}
    if kind == "train" and not names_baseline(request):  # nobody wants to know
        about.pop("baseline_flops", None)
        result.pop("normalized_flops", None)
    asked = {**{name: request.get(name) for name in _ASKED}, "teacher": setting.get("teacher")}
    return {
        "name": folder.resolve().name,
        "folder": str(folder),
        "running": owner,
        "started": run.get("started"),
        "command": shlex.join(["rbdc", *words]) if (words := run.get("command")) else None,
        "kind": kind,
        "about": about,
        "recipe": setting.get("recipe") or {},
        "request": request,
        "asked": asked if kind == "train" else {},
        **{part: run.get(part, {}) for part in ("data", "environment", "engine", "machine")},
        "metrics": _metrics(described.values(), nodes.values(), summary),
        "nodes": nodes,
        "trees": trees,
        "levels": _levels(nodes, trees[0]["keys"]) if trees and kind == "train" else [],
        "result": {k: v for k, v in result.items() if k not in _LONG and not summary},
        "transfer": detectors,
        "summary": summary,
        "missing": list(dict.fromkeys(found.missing)),
    }


def _metrics(
    described: Iterable[Mapping[str, Any]],
    nodes: Iterable[Mapping[str, Any]],
    summary: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Return the metrics of a run as data, the primary one first.

    `shown` is true for those that tables have. The others were measured too, and can be plotted.
    """
    shown = dict.fromkeys(chain(*(node["metrics"] for node in described), [summary.get("metric")]))
    seen = {name for node in nodes for name in (*node["metrics"], *node["history"])}
    names = [*shown, *(name for name in METRICS if name in seen and name not in shown)]
    known = [METRICS[name] for name in names if name in METRICS]
    return [{**metric.to_json(), "shown": metric.name in shown} for metric in known]


def _node(found: Found, node: Mapping[str, Any], *, running: bool, points: int) -> dict[str, Any]:
    place = found.folder / node["folder"]
    status = found.tried(lambda: node_status(found.folder, node, running))
    result, job = found.json(place / RESULT, JobResult), found.json(place / JOB, JobRecord)
    method, detects = node.get("method") or {}, node["kind"] == "detect"
    coupled = node["parents"] or node["name"].startswith("standard")  # the one to compare with
    blocks = _thinned(_alike(found, place / "blocks.jsonl"), MOST_BLOCK_ROWS) if coupled else []
    logged = found.lines(place / "log.jsonl", LogLine)
    evaluated = found.table(place / "summary.csv")
    seconds = max((row.get("seconds") or 0.0 for row in (*logged, *evaluated)), default=None)
    last = result.get("metrics") or (evaluated[-1] if evaluated else {})
    return {
        "state": "unreadable",
        "flops": 0.0,
        "epochs": node.get("epochs"),
        **(status or {}),
        **({} if result else {"seconds": seconds}),  # so far
        "metric": node["metrics"][0],
        "metrics": final_scores(last),
        **{name: node.get(name) for name in _DESCRIBED},
        **({"backbone": node["backbone"], "scores": result.get("scores")} if detects else {}),
        "depth": node.get("blocks"),
        "seed": str(node["seed"]) if "seed" in node else None,  # too long for JavaScript
        "planned_flops": node["flops"],
        "method": " ".join(str(method[k]) for k in ("name", "transition") if k in method),
        **{name: result.get(name) for name in ("best", "images", "proof_error", "norm_drift")},
        "samples": result.get("samples", []),
        "task": {k: v for k, v in _task(job).items() if k not in ("recipe", "seed", "data_seed")},
        "lr": job.get("task", {}).get("recipe", {}).get("lr"),
        "history": _columns(_thinned(evaluated, points), EVALUATED),
        "steps": _columns(_thinned(logged, points), LOGGED),
        "blocks": _blocks(blocks),
    }


def _task(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return a training's settings, or the backbone that a detector is built on."""
    backbone = job.get("backbone") or {}
    spec = backbone.get("spec") or {}
    built_on = {"model": spec.get("name"), "weights": backbone.get("sha256") or "untrained"}
    return job.get("task") or ({**spec.get("arguments", {}), **built_on} if spec else {})


def _columns(rows: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, list[Any]]:
    return {
        name: [_short(row.get(name)) for row in rows]
        for name in names
        if any(row.get(name) is not None for row in rows)
    }


def _thinned(rows: Sequence[T], most: int) -> list[T]:
    """Return at most so many evenly chosen rows, the first and the last among them."""
    return [rows[round(n)] for n in np.linspace(0, len(rows) - 1, min(most, len(rows)))]


def _short(value: float | None) -> float | None:
    """Return a number rounded to five digits; None if it is not finite."""
    return float(f"{value:.5g}") if value is not None and isfinite(value) else None


def _alike(found: Found, path: Path) -> list[BlocksLine]:
    """Return the lines about the weights that the first line is about."""
    lines = found.lines(path, BlocksLine)
    return [line for line in lines if line["blocks"].keys() == lines[0]["blocks"].keys()]


def _blocks(rows: Sequence[BlocksLine]) -> dict[str, Any] | None:
    """Return the sizes of the n x n blocks of every layer at every time, row after row."""
    if not rows:
        return None
    names = list(rows[0]["blocks"])
    return {
        "epoch": [_short(row["epoch"]) for row in rows],
        "flops": [_short(row["flops"]) for row in rows],
        "names": names,
        "sizes": [[list(chain(*row["blocks"][name])) for name in names] for row in rows],
    }


def _add_start(node: dict[str, Any], nodes: Mapping[str, dict[str, Any]]) -> None:
    """Add where a node's curves start: after the epochs, FLOPs and time of all its ancestors."""
    ancestors = closure(node["key"], nodes)[:-1]
    parents = [nodes[key] for key in node["parents"] if key in nodes]  # where they start is known
    node["seconds_before"] = sum(nodes[key].get("seconds") or 0.0 for key in ancestors)
    node["flops_before"] = sum((p["planned_flops"] + p["flops_before"] for p in parents), 0.0)
    node["epochs_before"] = max(
        ((p["epochs"] or 0.0) + p["epochs_before"] for p in parents), default=0.0
    )
    grown = [parent for parent in parents if parent["kind"] == "grow"]
    # its scores right after the coupling, before any step
    node["start"] = dict(grown[0]["metrics"]) if grown and node["kind"] == "train" else {}


def closure(key: str, nodes: Mapping[str, Any]) -> list[str]:
    """Return the keys of a node and all its ancestors, each once, parents first."""
    found: dict[str, None] = {}
    waiting = [key] if key in nodes else []
    while waiting:
        parents = nodes[waiting[-1]]["parents"]
        if before := [p for p in parents if p in nodes and p not in found]:
            waiting += reversed(before)
        else:
            found[waiting.pop()] = None
    return list(found)


def _trees(nodes: Mapping[str, Any], summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what can be drawn: the run's tree and standard training, or a tree for each trial."""
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
    """Return planned and spent FLOPs of each level, leaves first, and of standard training."""
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
            **{name: sum(node.get(name) or 0.0 for node in members) for name in _SUMMED},
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
