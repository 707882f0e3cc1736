"""Read the state of a run from its folder, and print it and the result."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rbdc.disk import read_json
from rbdc.errors import RunError
from rbdc.jobs.layout import FAILED, PROGRESS, RESULT, RUN
from rbdc.jobs.lock import holder, taken_over
from rbdc.jobs.records import Failed, ProgressRecord, read_job_result, read_run_result
from rbdc.metrics import final_scores, find_metric
from rbdc.models.hub import is_hub_folder
from rbdc.report.units import loader_note, readable_duration, readable_flops, scaled
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
        "taken_over": taken_over(folder),
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
    status |= {"planned_flops": node["flops"], "seconds": None}
    status["sequence_length"] = node.get("sequence_length")
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
        status |= {"progress": progress, "seconds": progress.get("seconds")}
        status["metrics"] |= final_scores(progress["scores"] or {}, node["metrics"])
        status["flops"] = node["flops"] * progress["step"] / progress["steps"]
    return status


def _is_beside(node: Mapping[str, Any]) -> bool:
    """Return whether this is the standard training that the tree is compared with.

    A detector's backbone may have that name, too.
    """
    return bool(node["name"] == "standard" and node["kind"] != "detect")


_MARKS = {"failed": "✗", "running": "▶", "stopped": "‖", "done": "✓"}
"""The states that are shown row by row, in this order; jobs that wait are counted."""


def shown_nodes(status: Mapping[str, Any]) -> list[Any]:
    """Return the jobs that are shown: failed, running and stopped ones, then those with a result.

    Of each kind, the target and what belongs to it come first; detectors keep their order.
    """
    nodes = [node for node in status["nodes"] if node["state"] in _MARKS]
    if not _detects(status):
        nodes.reverse()
    return sorted(nodes, key=lambda node: list(_MARKS).index(node["state"]))


def _detects(status: Mapping[str, Any]) -> bool:
    return any(node["kind"] == "detect" for node in status["nodes"])


def status_table(status: Mapping[str, Any], rows: int | None = None) -> RenderableType:
    """Return the jobs that run and those that are done, at most so many rows, and notes below.

    Widths of columns follow from all jobs, not from the rows, so that nothing moves in a table that
    is printed again. It fits into 80 characters: long names give way.
    """
    every = status["nodes"]
    metrics = [find_metric(name) for name in every[0]["metrics"]] if every else []
    table = Table(box=SIMPLE, pad_edge=False, collapse_padding=True)
    name = "detector" if _detects(status) else "model"
    longest = max((len(_title(node)) for node in every), default=0)
    table.add_column("", width=1)
    table.add_column(name, min_width=min(longest, 24), max_width=longest or None)
    table.add_column("state", min_width=len("running 100%"), no_wrap=True)
    for column in ("epochs", *(metric.label for metric in metrics), "FLOPs", "time"):
        table.add_column(column, justify="right", min_width=7, no_wrap=True)
    shown = shown_nodes(status)
    for node in shown[:rows]:
        state, progress = node["state"], node.get("progress")
        if progress and state in ("running", "stopped"):
            state += f" {progress['step'] / progress['steps']:.0%}"
        seconds = node.get("seconds")
        table.add_row(
            _MARKS[node["state"]],
            Text(_title(node), no_wrap=True, overflow="ellipsis"),
            state,
            f"{node['epochs']:.4g}" if node["epochs"] else "",
            *(metric.text(node["metrics"].get(metric.name)) for metric in metrics),
            scaled(node["flops"]) if node["flops"] else "",
            readable_duration(seconds) if seconds else "",
        )
    hidden = Counter(node["state"] for node in shown[rows:]) if rows is not None else Counter()
    if waiting := len(every) - len(shown):
        hidden["waiting"] = waiting
    more = ", ".join(f"{count:,} {state}" for state, count in hidden.items())
    counts = [Text(f"{'and ' if shown else ''}{more}")] if more else []
    return Group(table, *counts, *(Text(line) for line in _notes(status)))


def _title(node: Mapping[str, Any]) -> str:
    return str(
        node["name"] if node["kind"] == "detect" else f"{node['name']}, width {node['width']:g}"
    )


def seconds_left(status: Mapping[str, Any]) -> float | None:
    """Return the time to the end of a run at the speed of its levels so far; None if unknown.

    A level without a speed of its own is taken to be as fast as the others, by FLOPs. Jobs that run
    side by side are taken to go on like that.
    """
    known = [node for node in status["nodes"] if node.get("seconds") and node["flops"]]
    if not known:
        return None

    def rate(nodes: Sequence[Mapping[str, Any]]) -> float:
        return float(sum(n["flops"] for n in nodes) / sum(n["seconds"] for n in nodes))

    left: float = 0.0
    for node in status["nodes"]:
        here = [other for other in known if other["level"] == node["level"]] or known
        left += max(0.0, node["planned_flops"] - node["flops"]) / rate(here)
    at_once = [node for node in status["nodes"] if node["state"] == "running"]
    return left / max(1, len(at_once))


def _notes(status: Mapping[str, Any]) -> list[str]:
    """Return the lines below the table: FLOPs spent, the running process, and errors."""
    share = status["spent_flops"] / (status["planned_flops"] or 1.0)
    lines = [
        f"spent {readable_flops(status['spent_flops'])} of "
        f"{readable_flops(status['planned_flops'])} planned ({share:.1%})"
    ]
    if any(map(_is_beside, status["nodes"])):
        lines[0] += ", standard training beside it not counted"
    if spent := sum(node.get("seconds") or 0.0 for node in status["nodes"]):
        left = None if status["result"] else seconds_left(status)
        remaining = f", about {readable_duration(left)} left" if left else ""
        lines.append(f"time {readable_duration(spent)} of all models{remaining}")
    if owner := status["running"]:
        lines.append(f"run by process {owner.get('pid')} on {owner.get('host')}")
    if pid := status.get("taken_over"):
        lines.append(f"its process {pid} was killed; another program has this number now")
    for node in status["nodes"]:
        if (
            node["state"] == "running"
            and not node.get("sequence_length")
            and (note := loader_note(node.get("progress") or {"step": 0}))
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
    if is_hub_folder(model):
        return f'transformers.AutoModelForCausalLM.from_pretrained("{model}")'
    return (
        f'timm.create_model("local-dir:{model}", pretrained=True)'
        if timm_loads
        else f'rbdc.load("{model}")'
    )
