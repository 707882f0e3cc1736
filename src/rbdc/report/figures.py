"""Draw a run's figures for a paper: curves, learning rates, budget, blocks of weights.

The functions take what `read_run` returns (nodes, levels), not folders. A path's suffix decides the
format: .png, .svg or .pdf. They return False, and write nothing, if there is nothing to draw yet.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np

from rbdc.metrics import Metric, find_metric
from rbdc.report.units import readable_flops

# Okabe and Ito's colours, which the colour-blind can tell apart, and markers for more curves
COLOURS = (
    "#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F",
    "#882255", "#999933", "#332288", "#AA4499",
)  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
STANDARD = "standard"
_BLACK, _LEVELS = COLOURS[0], COLOURS[1:7]
_MOST_MARKERS = 30  # on a curve: more hide it
_MOST_NAMES, _MOST_TIMES = 60, 8  # of layers beside a heat map, of epochs below it

Node = Mapping[str, Any]


def draw_curves(nodes: Iterable[Node], path: Path, *, baseline_flops: float) -> bool:
    """Draw the primary metric of every model of a tree against the FLOPs of all its ancestors.

    A level has one colour, standard training is black, and the score right after a coupling,
    before any step, is marked. `baseline_flops` is what 1 stands for.
    """
    trained = [node for node in nodes if node["kind"] == "train" and node["history"]]
    if not trained:
        return False
    metric = find_metric(trained[0]["metric"])
    figure, axes = new_figure("", (7.5, 4.2))
    starts = False
    for node in sorted(trained, key=lambda node: -node["level"]):  # the target on top
        before, start = node["flops_before"] / baseline_flops, node["start"].get(metric.name)
        xs = [flops / baseline_flops for flops in node["history"]["flops"]]
        ys = plotted_scores(node, metric)
        if start is not None:
            xs, ys, starts = [before, *xs], [metric.scale * start, *ys], True
        axes.plot(xs, ys, **_line_style(node, len(xs)))
        if start is not None:
            axes.plot(before, ys[0], **_coupling_style(_colour(node)))
    axes.set_xlim(left=0)
    unit = readable_flops(baseline_flops)
    axes.set_xlabel(f"FLOPs of a model and all its ancestors (1 = {unit})")
    axes.set_ylabel(metric.axis)
    axes.grid(axis="y", color="0.9")
    handles = []
    by_level = sorted(trained, key=_level)  # the target first, standard training last
    for (standard, _), group in groupby(by_level, key=_level):
        here = list(group)
        label = "standard training" if standard else f"{len(here)} × width {here[0]['width']:g}"
        handles.append(_handle(label, **_line_style(here[0], 1)))
    if starts:
        handles.append(_handle("right after a coupling", **_coupling_style("0.3")))
    figure.legend(handles=handles, loc="outside right upper", frameon=False)
    return save_figure(figure, path)


def draw_rates(nodes: Iterable[Node], path: Path) -> bool:
    """Draw the learning rate along one line from a leaf to the target, so that restarts show."""
    line = [node for node in line_to_target(nodes) if _rates(node)[0]]
    if not line:
        return False
    figure, axes = new_figure("", (7.5, 3.2))
    for number, node in enumerate(line):
        (epochs, rates), before = _rates(node), node["epochs_before"]
        axes.plot(
            [before + epoch for epoch in epochs],
            rates,
            color=_colour(node),
            label=f"{_name(node)}, width {node['width']:g}",
            marker="." if len(rates) == 1 else None,
        )
        if number:
            axes.axvline(before, color="0.5", linewidth=0.8, linestyle=":")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("epochs along one line of the tree (dotted: couplings)")
    axes.set_ylabel("learning rate")
    figure.legend(loc="outside right upper", frameon=False)
    return save_figure(figure, path)


def draw_budget(levels: Iterable[Mapping[str, Any]], path: Path, *, baseline_flops: float) -> bool:
    """Draw planned and spent FLOPs of each level, beside standard training."""
    levels = [level for level in levels if not level["standard"]]
    if not levels:
        return False
    figure, axes = new_figure("", (7.5, 2.9))
    rows = [[level[key] / baseline_flops for level in levels] for key in ("flops", "planned_flops")]
    width = 1.12 * max(1.0, *map(sum, rows))
    axes.barh(2, 1, color="0.8", edgecolor="white")
    axes.text(1 + 0.01 * width, 2, "1", va="center")
    for row, parts in enumerate(rows):
        for level, part, end in zip(levels, parts, accumulate(parts), strict=True):
            axes.barh(row, part, left=end - part, color=_colour(level), edgecolor="white")
            if part > 0.09 * width:  # else the number does not fit into it
                place: Any = {"ha": "center", "va": "center", "color": "white"}
                axes.text(end - part / 2, row, f"{part:.2f}", **place)
        axes.text(sum(parts) + 0.01 * width, row, f"{sum(parts):.3f}", va="center")
    axes.set_xlim(0, width)
    axes.set_yticks([0, 1, 2], ["spent", "planned", "standard, budget 1"])
    axes.set_xlabel(f"FLOPs of all models (1 = {readable_flops(baseline_flops)})")
    square = {"marker": "s", "linestyle": ""}
    handles = [
        _handle(f"{level['models']} × width {level['width']:g}", color=_colour(level), **square)
        for level in reversed(levels)
    ]
    figure.legend(handles=handles, loc="outside right upper", frameon=False)
    return save_figure(figure, path)


def draw_blocks(node: Node, path: Path, *, standard: Node | None = None) -> bool:
    """Draw the size of the off-diagonal blocks of a coupled model: layers x epochs, and their mean.

    It is the root mean square of the two off-diagonal blocks over that of the diagonal ones: 0
    right after a coupling, about 1 in a model that was never coupled. Standard training's mean is
    drawn beside the model's.
    """
    ratios = block_ratios(node)
    if ratios is None:
        return False
    height = max(3.6, 0.9 + 0.15 * min(ratios.shape[1], _MOST_NAMES))
    figure, (left, right) = new_figure("", (9.5, height), 1, 2, width_ratios=[3, 2])
    figure.get_layout_engine().set(wspace=0.06)
    _heat_map(figure, left, node["blocks"], ratios)
    curves = [(node, ratios, _colour(node), _name(node))]
    if standard is not None and (others := block_ratios(standard)) is not None:
        curves.append((standard, others, _BLACK, "standard training"))
    for one, values, colour, label in curves:
        epochs = one["blocks"]["epoch"]
        right.plot(epochs, values.mean(axis=1), color=colour, label=label, **markers(len(epochs)))
    right.set_ylim(bottom=0)
    right.set_xlim(left=0)
    right.set_xlabel("epochs of its own training")
    right.set_title("mean over layers", fontsize="medium", loc="left")
    right.legend(frameon=False, loc="best")
    return save_figure(figure, path)


def block_ratios(node: Node) -> np.ndarray[Any, Any] | None:
    """Return off-diagonal over diagonal size of each weight as 2 x 2 blocks: (times, layers)."""
    blocks = node["blocks"]
    if not blocks or not blocks["names"]:
        return None
    sizes = np.asarray(blocks["sizes"], dtype=float)
    side = isqrt(sizes.shape[2])
    if side % 2:  # one block: there are no halves
        return None
    half = side // 2
    squares = np.square(sizes).reshape(len(sizes), -1, 2, half, 2, half).mean(axis=(3, 5))
    apart = squares[..., 0, 1] + squares[..., 1, 0]
    along = squares[..., 0, 0] + squares[..., 1, 1]
    ratios: np.ndarray[Any, Any] = np.sqrt(apart / np.maximum(along, np.finfo(float).tiny))
    return ratios


def _heat_map(figure: Any, axes: Any, blocks: Mapping[str, Any], ratios: Any) -> None:
    epochs, names = blocks["epoch"], [name.removesuffix(".weight") for name in blocks["names"]]
    mesh = axes.pcolormesh(
        _edges(epochs), np.arange(len(names) + 1), ratios.T, cmap="viridis", vmin=0
    )
    every = -(-len(names) // _MOST_NAMES)
    shown = range(0, len(names), every)
    axes.set_yticks([n + 0.5 for n in shown], [names[n] for n in shown], fontsize=7)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()  # the first layer on top
    times = range(0, len(epochs), -(-len(epochs) // _MOST_TIMES))
    axes.set_xticks([epochs[n] for n in times], [f"{epochs[n]:.3g}" for n in times])
    axes.set_xlabel("epochs")
    axes.set_title("each layer, from the image on", fontsize="medium", loc="left")
    figure.colorbar(mesh, ax=axes, label="RMS of off-diagonal / diagonal blocks")


def _edges(centres: Sequence[float]) -> list[float]:
    """Return the edges of cells around these centres, halfway between neighbours."""
    if len(centres) == 1:
        return [centres[0] - 0.5, centres[0] + 0.5]
    middles = [(a + b) / 2 for a, b in pairwise(centres)]
    return [2 * centres[0] - middles[0], *middles, 2 * centres[-1] - middles[-1]]


def line_to_target(nodes: Iterable[Node]) -> list[Node]:
    """Return the trainings from a leaf to the target, by the first parent of each coupling."""
    by_key = {node["key"]: node for node in nodes if node["name"] != STANDARD}
    used = {parent for node in by_key.values() for parent in node["parents"]}
    ends = [node for key, node in by_key.items() if key not in used]
    line: list[Node] = []
    node = min(ends, key=lambda node: node["level"], default=None)
    while node is not None:
        if node["kind"] == "train":
            line.insert(0, node)
        node = next((by_key[key] for key in node["parents"] if key in by_key), None)
    return line


def plotted_scores(node: Node, metric: Metric) -> list[float | None]:
    """Return the scaled score of each evaluation: of the EMA weights where there are any."""
    values = node["history"].get(f"ema_{metric.name}") or node["history"].get(metric.name, [])
    return [None if value is None else metric.scale * value for value in values]


def _rates(node: Node) -> tuple[list[float], list[float]]:
    logged = node["steps"] or node["history"]
    return logged.get("epoch", []), logged.get("lr", [])


def _name(node: Node) -> str:
    """Return a node's name without that of its trial in a comparison."""
    return "standard training" if node["name"] == STANDARD else node["name"].rpartition(": ")[2]


def _colour(node: Node) -> str:
    if node.get("name") == STANDARD:
        return _BLACK
    return _LEVELS[node["level"] % len(_LEVELS)]


def _line_style(node: Node, points: int) -> dict[str, Any]:
    wide = node["level"] == 0
    return {"color": _colour(node), "linewidth": 1.8 if wide else 1.0, **markers(points)}


def markers(points: int) -> dict[str, Any]:
    """Return the marker options of a curve with so many points."""
    return {"marker": "o", "markersize": 3} if points <= _MOST_MARKERS else {}


def _coupling_style(colour: str) -> dict[str, Any]:
    return {"color": colour, "marker": "D", "markersize": 6, "mfc": "white", "linestyle": ""}


def _level(node: Node) -> tuple[bool, int]:
    return node["name"] == STANDARD, node["level"]


def _handle(label: str, **style: Any) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **style)


def new_figure(
    title: str, size: tuple[float, float], *grid: int, **options: Any
) -> tuple[Any, Any]:
    """Return a figure and its axes: one, or those of a grid of rows and columns."""
    from matplotlib.figure import Figure  # heavy, and only pictures need it

    figure = Figure(figsize=size, layout="constrained")
    found = figure.subplots(*grid, **options)
    figure.axes[0].set_title(title, loc="left", fontsize="medium", parse_math=False)
    for axes in figure.axes:
        bare(axes)
    return figure, found


def bare(axes: Any) -> None:
    """Hide the upper and the right border of the axes."""
    axes.spines[["top", "right"]].set_visible(False)


def save_figure(figure: Any, path: Path) -> bool:
    """Write a figure in the format of the path's suffix; return True."""
    from matplotlib import rc_context

    with rc_context({"pdf.fonttype": 42, "svg.fonttype": "none"}):  # text stays text
        figure.savefig(path, dpi=150)
    return True
