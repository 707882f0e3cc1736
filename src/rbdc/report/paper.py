"""Implement `rbdc report --figures`: write a run's figures as files for a paper."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rbdc.disk import is_writable
from rbdc.errors import RbdcError
from rbdc.metrics import find_metric
from rbdc.report.compare import save_comparison_plots
from rbdc.report.detector_figures import draw_precision, draw_precision_curves
from rbdc.report.figures import draw_blocks, draw_budget, draw_curves, draw_rates
from rbdc.report.read import read_run

ENDS = ("png", "svg", "pdf")

Draw = Callable[[Path], bool]


def save_figures(folders: Sequence[Path], output: Path) -> list[Path]:
    """Draw all figures of these runs, replacing earlier ones; return the files."""
    if (output.exists() and not output.is_dir()) or not is_writable(output):
        raise RbdcError(f"{output} is not a folder one may write to", "Choose another folder.")
    runs = [read_run(folder) for folder in folders]
    output.mkdir(parents=True, exist_ok=True)
    several = len(runs) > 1
    return [
        path
        for number, run in enumerate(runs)
        for path in _figures(run, output / f"{number + 1}-{run['name']}" if several else output)
    ]


def _figures(run: Mapping[str, Any], folder: Path) -> Iterator[Path]:
    folder.mkdir(exist_ok=True)
    if run["summary"]:
        yield from save_comparison_plots(run["summary"], folder, ENDS)
        return
    if run["transfer"]:
        metrics = [find_metric(metric["name"]) for metric in run["metrics"] if metric["shown"]]
        backbones, precision = run["transfer"]["backbones"], run["transfer"]["precision"]
        figures: dict[str, Draw] = {
            "curves": partial(draw_precision_curves, run["nodes"], backbones, metrics),
            "precision": partial(draw_precision, precision),
        }
    else:
        figures = _of_tree(run)
    for name, draw in figures.items():
        paths = [folder / f"{name}.{end}" for end in ENDS]
        yield from (path for path in paths if draw(path))


def _of_tree(run: Mapping[str, Any]) -> dict[str, Draw]:
    nodes = list(run["nodes"].values())
    scale = run["about"].get("baseline_flops") or 1.0
    standard = next((node for node in nodes if node["name"] == "standard"), None)
    return {
        "curves": lambda path: draw_curves(nodes, path, baseline_flops=scale),
        "learning-rate": lambda path: draw_rates(nodes, path),
        "budget": lambda path: draw_budget(run["levels"], path, baseline_flops=scale),
    } | {
        f"blocks-{node['name']}": partial(draw_blocks, node, standard=standard)
        for node in nodes
        if node["kind"] == "train" and node["parents"]
    }
