"""Read the state of a run from its folder, and print it and the result."""

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
from rbdc.jobs.records import Failed, ProgressRecord, read_job_result, read_run_result
from rbdc.metrics import final_scores, find_metric
from rbdc.report.units import loader_note, readable_flops
from rbdc.runs.record import read_record

EQUAL = 0.02  # relative difference of FLOPs that comes from whole steps and epochs


def run_status(folder: Path) -> dict[str, Any]:
    """Return what is done, running, waiting and failed in a run's folder."""
    run = read_record(folder)
    if run is None:
        raise RunError(f"{folder} holds no run", f"A run's folder has a {RUN}.")
    owner = holder(folder)
    nodes = [node_status(folder, node, owner is not None) for node in run["nodes"]]
    identity = run["identity"]
    about = {**identity.get("setting", {}), **identity.get("plan", {})}
    return {
        "folder": str(folder),
        "kind": run["kind"],
        "model": about.get("model"),
        "running": owner,
        "nodes": nodes,
        "spent_flops": sum(node["flops"] for node in nodes if not _is_beside(node)),
        "planned_flops": about.get("training_flops") or sum(n["flops"] for n in run["nodes"]),
        "baseline_flops": about.get("baseline_flops"),
        "result": read_run_result(folder / RESULT),
    }


def node_status(folder: Path, node: Mapping[str, Any], someone_runs: bool) -> dict[str, Any]:
    """Return the state of one job of a run; `node` is its description in run.json."""
    place = folder / node["folder"]
    progress = read_json(place / PROGRESS, ProgressRecord)  # it goes when the result has come
    result, failed = read_job_result(place / RESULT), read_json(place / FAILED, Failed)
    status: dict[str, Any] = {
        name: node[name] for name in ("name", "kind", "level", "width", "folder", "key")
    }
    status |= {"state": "waiting", "flops": 0.0, "epochs": node.get("epochs")}
    status["metrics"] = dict.fromkeys(node["metrics"])
    if result:
        status |= {"state": "done", "seconds": result.get("seconds")}
        status["metrics"] |= final_scores(result.get("metrics", {}), node["metrics"])
        status["flops"] = result.get("training_flops", 0.0)
    elif failed:
        status |= {"state": "failed", "error": failed["error"]}
    elif place.exists():
        at_work = someone_runs or holder(place)  # on the run, or on this model alone
        status["state"] = "running" if at_work else "stopped"
    if progress and not result:
        status["progress"] = progress
        status["metrics"] |= final_scores(progress["scores"] or {}, node["metrics"])
        status["flops"] = node["flops"] * progress["step"] / progress["steps"]
    return status


def _is_beside(node: Mapping[str, Any]) -> bool:
    """Return whether this is the standard training that the tree is compared with.

    A detector's backbone may have that name, too.
    """
    return bool(node["name"] == "standard" and node["kind"] != "detect")


_MARKS = {"done": "✓", "running": "▶", "stopped": "‖", "waiting": "·", "failed": "✗"}


def status_table(status: Mapping[str, Any]) -> RenderableType:
    """Return a table with the state of each model and coupling, target first; or of detectors."""
    nodes = status["nodes"]
    detects = any(node["kind"] == "detect" for node in nodes)
    metrics = [find_metric(name) for name in nodes[0]["metrics"]] if nodes else []
    table = Table(box=SIMPLE, pad_edge=False)
    for column in ("", "detector" if detects else "model", "state"):
        table.add_column(column, no_wrap=column in ("", "state"))  # long names give way
    for column in ("epochs", *(metric.label for metric in metrics), "FLOPs"):
        table.add_column(column, justify="right", no_wrap=True)
    for node in nodes if detects else reversed(nodes):
        size = "" if detects else f", width {node['width']:g}"
        state, progress = node["state"], node.get("progress")
        if progress and state in ("running", "stopped"):
            state += f" {progress['step'] / progress['steps']:.0%}"
        table.add_row(
            _MARKS[node["state"]],
            Text("  " * node["level"] + node["name"] + size, no_wrap=True, overflow="ellipsis"),
            state,
            f"{node['epochs']:.4g}" if node["epochs"] else "",
            *(metric.text(node["metrics"].get(metric.name)) for metric in metrics),
            readable_flops(node["flops"]) if node["flops"] else "",
        )
    return Group(table, *(Text(line) for line in _notes(status)))


def _notes(status: Mapping[str, Any]) -> list[str]:
    """Return the lines below the table: FLOPs spent, the running process, and errors."""
    share = status["spent_flops"] / (status["planned_flops"] or 1.0)
    lines = [
        f"spent {readable_flops(status['spent_flops'])} of "
        f"{readable_flops(status['planned_flops'])} planned ({share:.1%})"
    ]
    if any(map(_is_beside, status["nodes"])):
        lines[0] += ", standard training beside it not counted"
    if owner := status["running"]:
        lines.append(f"run by process {owner.get('pid')} on {owner.get('host')}")
    for node in status["nodes"]:
        if node["state"] == "running" and (
            note := loader_note(node.get("progress") or {"step": 0})
        ):
            lines.append(f"{node['name']}: {note}")
    failed = [node for node in status["nodes"] if node["state"] == "failed"]
    return [*lines, *(f"{node['name']}: {node['error']}" for node in failed)]


def result_lines(result: Mapping[str, Any], output: Path) -> list[str]:
    """Return what `rbdc train` prints at the end, whoever won."""
    metric, flops = find_metric(result["metric"]), readable_flops(result["training_flops"])
    ours = result["metrics"][metric.name]
    score = f"{metric.label} {metric.text(ours)}"
    lines = [f"RBDC:      {score} with {flops} for all models of the tree"]
    if standard := result.get("standard"):
        theirs = standard["metrics"][metric.name]
        lines += [
            f"standard:  {metric.label} {metric.text(theirs)} with "
            f"{readable_flops(standard['training_flops'])} for the target alone",
            f"           {metric.compared(ours, theirs)} for RBDC {cost_text(result)}",
            "           one seed, so a hint, not a result",
        ]
    if result["images_decoded"]:
        lines.append(
            f"decoded:   {result['images_decoded']:,} images for {result['images']:,} of training: "
            "models of a level share a pass"
        )
    if result["teacher_flops"]:
        lines.append(
            f"teacher:   {readable_flops(result['teacher_flops'])} more, not counted above"
        )
    how = how_to_load(output / "model", timm_loads=result["timm_loads"])
    return [*lines, "", f"load with  {how}", f"look at    rbdc status {output}"]


def cost_text(result: Mapping[str, Any]) -> str:
    """Return RBDC's FLOPs and time over those of standard training, where they are known."""
    flops, time = (result.get(f"relative_{name}") or 1.0 for name in ("flops", "time"))
    equal = abs(flops - 1) < EQUAL
    said = "at the same FLOPs" if equal else f"with {flops:.2f} of its FLOPs"
    return f"{said}, in {time:.2f} times the time" if result.get("relative_time") else said


def how_to_load(model: Path, *, timm_loads: bool) -> str:
    """Return the call that loads a model's folder."""
    return (
        f'timm.create_model("local-dir:{model}", pretrained=True)'
        if timm_loads
        else f'rbdc.load("{model}")'
    )
