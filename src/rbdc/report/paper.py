"""Implement `rbdc report --figures`: write a run's figures as files for a paper."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rbdc.disk import is_writable
from rbdc.errors import RbdcError
from rbdc.metrics import find_metric
from rbdc.report import figures
from rbdc.report.compare import save_comparison_plots
from rbdc.report.read import read_run

ENDS = ("png", "svg", "pdf")


def save_figures(folders: Sequence[Path], output: Path) -> list[Path]:
    """Draw all figures of these runs, replacing earlier ones; return the files."""
    if (output.exists() and not output.is_dir()) or not is_writable(output):
        raise RbdcError(f"{output} is not a folder one may write to", "Choose another folder.")
    runs = [read_run(folder) for folder in folders]
    paths = []
    for number, run in enumerate(runs, start=1):
        folder = output / f"{number}-{run['name']}" if len(runs) > 1 else output
        folder.mkdir(parents=True, exist_ok=True)
        if run["summary"]:
            paths += save_comparison_plots(run["summary"], folder, ENDS)
        else:
            paths += figures.save_each(_figures(run), folder, ENDS)
    return paths


def _figures(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a tree or of detectors, by the name of their files."""
    if run["transfer"]:
        metrics = [find_metric(metric["name"]) for metric in run["metrics"] if metric["shown"]]
        backbones, precision = run["transfer"]["backbones"], run["transfer"]["precision"]
        curves = figures.draw_precision_curves(run["nodes"], backbones, metrics)
        return {"curves": curves, "precision": figures.draw_precision(precision)}
    nodes = list(run["nodes"].values())
    scale = run["about"].get("baseline_flops")
    standard = next((node for node in nodes if node["name"] == "standard"), None)
    coupled = [node for node in nodes if node["kind"] == "train" and node["parents"]]
    return {
        "curves": figures.draw_curves(nodes, baseline_flops=scale),
        "learning-rate": figures.draw_rates(nodes),
        "budget": figures.draw_budget(run["levels"], baseline_flops=scale),
        **{
            f"blocks-{node['name']}": figures.draw_blocks(node, standard=standard)
            for node in coupled
        },
    }
