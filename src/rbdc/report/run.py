"""A run's folder for people: its state, and at the end its result."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rbdc.disk import read_json
from rbdc.errors import RunError
from rbdc.jobs.layout import FAILED, PROGRESS, RESULT, RUN
from rbdc.jobs.lock import holder
from rbdc.report.units import readable_flops
from rbdc.runs.record import read_record


def run_status(folder: Path) -> dict[str, Any]:
    """What is done, running, waiting and failed in a run's folder."""
    run = read_record(folder)
    if run is None:
        raise RunError(f"{folder} holds no run", f"A run's folder has a {RUN}.")
    owner = holder(folder)
    nodes = [node_status(folder, node, owner is not None) for node in run["nodes"]]
    identity = run["identity"]
    about = {**identity.get("setting", {}), **identity.get("plan", {})}
    spent = sum(node["flops"] for node in nodes if not _is_beside(node))
    return {
        "folder": str(folder),
        "kind": run["kind"],
        "model": about.get("model"),
        "running": owner,
        "nodes": nodes,
        "spent_flops": spent,
        "planned_flops": about.get("training_flops") or sum(n["flops"] for n in run["nodes"]),
        "baseline_flops": about.get("baseline_flops"),
        "result": read_json(folder / RESULT),
    }


def node_status(folder: Path, node: Mapping[str, Any], someone_runs: bool) -> dict[str, Any]:
    """How far one job of a run is; `node` is its description in run.json."""
    place = folder / node["folder"]
    progress = read_json(place / PROGRESS)  # first: it goes when the result has come
    result, failed = read_json(place / RESULT), read_json(place / FAILED)
    status: dict[str, Any] = {
        name: node[name] for name in ("name", "kind", "level", "width", "folder", "key")
    }
    status |= {"state": "waiting", "flops": 0.0, "epochs": node.get("epochs")}
    status |= last_scores(node["kind"], {})
    if result:
        status |= {"state": "done", "seconds": result.get("seconds")}
        status |= {name: result.get(name) for name in last_scores(node["kind"], {})}
        status["flops"] = result.get("training_flops", 0.0)
    elif failed:
        status |= {"state": "failed", "error": failed["error"]}
    elif place.exists():
        at_work = someone_runs or holder(place)  # on the run, or on this model alone
        status["state"] = "running" if at_work else "stopped"
    if progress and not result:
        status |= {"progress": progress, **last_scores(node["kind"], progress["scores"] or {})}
        status["flops"] = node["flops"] * progress["step"] / progress["steps"]
    return status


def last_scores(kind: str, scores: Mapping[str, Any]) -> dict[str, float | None]:
    """What a job of this kind is judged by: of the averaged weights, where there are any."""
    names = ("box_map", "mask_map") if kind == "detect" else ("top1",)
    return {name: scores.get(f"ema_{name}", scores.get(name)) for name in names}


def _is_beside(node: Mapping[str, Any]) -> bool:
    """Standard training, which the tree is compared with; a backbone may have that name, too."""
    return bool(node["name"] == "standard" and node["kind"] != "detect")


_MARKS = {"done": "✓", "running": "▶", "stopped": "‖", "waiting": "·", "failed": "✗"}


def status_table(status: Mapping[str, Any]) -> RenderableType:
    """The tree, target first, with the state of each model and of each coupling; or detectors."""
    nodes = status["nodes"]
    detects = any(node["kind"] == "detect" for node in nodes)
    scores = {"box mAP": "box_map", "mask mAP": "mask_map"} if detects else {"top-1": "top1"}
    table = Table(box=SIMPLE, pad_edge=False)
    for column in ("", "detector" if detects else "model", "state"):
        table.add_column(column, no_wrap=column in ("", "state"))  # long names give way
    for column in ("epochs", *scores, "FLOPs"):
        table.add_column(column, justify="right", no_wrap=True)
    for node in nodes if detects else reversed(nodes):
        size = "" if detects else f", width {node['width']:g}"
        table.add_row(
            _MARKS[node["state"]],
            Text("  " * node["level"] + node["name"] + size, no_wrap=True, overflow="ellipsis"),
            _state(node),
            f"{node['epochs']:.4g}" if node["epochs"] else "",
            *(f"{node[s]:.2%}" if node[s] is not None else "" for s in scores.values()),
            readable_flops(node["flops"]) if node["flops"] else "",
        )
    return Group(table, *(Text(line) for line in _notes(status)))


def _notes(status: Mapping[str, Any]) -> list[str]:
    """What is spent, who is at work, and what went wrong."""
    share = status["spent_flops"] / status["planned_flops"]
    lines = [
        f"spent {readable_flops(status['spent_flops'])} of "
        f"{readable_flops(status['planned_flops'])} planned ({share:.1%})"
    ]
    if any(map(_is_beside, status["nodes"])):
        lines[0] += ", standard training beside it not counted"
    if owner := status["running"]:
        lines.append(f"run by process {owner.get('pid')} on {owner.get('host')}")
    failed = [node for node in status["nodes"] if node["state"] == "failed"]
    return [*lines, *(f"{node['name']}: {node['error']}" for node in failed)]


def _state(node: Mapping[str, Any]) -> str:
    progress = node.get("progress")
    if progress and node["state"] in ("running", "stopped"):
        share = progress["step"] / progress["steps"]
        return f"{node['state']} {share:.0%}"
    return str(node["state"])


def result_lines(result: Mapping[str, Any], output: Path) -> list[str]:
    """What `rbdc train` says at the end: whoever won."""
    flops = readable_flops(result["training_flops"])
    lines = [f"RBDC:      top-1 {result['top1']:.2%} with {flops} for all models of the tree"]
    if standard := result.get("standard"):
        gap = 100 * (result["top1"] - standard["top1"])
        verdict = (
            "no difference"
            if gap == 0
            else f"{abs(gap):.2f} points {'more' if gap > 0 else 'less'}"
        )
        lines += [
            f"standard:  top-1 {standard['top1']:.2%} with "
            f"{readable_flops(standard['training_flops'])} for the target alone",
            f"           {verdict} for RBDC at the same FLOPs; one seed, so a hint, not a result",
        ]
    if result["teacher_flops"]:
        lines.append(
            f"teacher:   {readable_flops(result['teacher_flops'])} more, not counted above"
        )
    model = output / "model"
    how = (
        f'timm.create_model("local-dir:{model}", pretrained=True)'
        if result["timm_loads"]
        else f'rbdc.load("{model}")'
    )
    return [*lines, "", f"load with  {how}", f"look at    rbdc status {output}"]
