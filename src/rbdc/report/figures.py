"""Draw a run's figures for a paper: curves, learning rates, budget, weights; detectors' precision.

The functions take what `read_run` returns (nodes, levels), not folders. They return a figure, or
None if there is nothing to draw yet. `save_each` writes figures as files.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, groupby
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rbdc.metrics import Metric, find_metric
from rbdc.report.transfer import PARTS, cell_text
from rbdc.report.units import readable_flops

if TYPE_CHECKING:  # heavy, and only pictures need it
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which the colour-blind can tell apart, and markers for more curves
COLOURS = (
    "#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F",
    "#882255", "#999933", "#332288", "#AA4499",
)  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
STANDARD = "standard"
LEGEND: Any = {"loc": "outside right upper", "frameon": False}
_BLACK, _LEVELS = COLOURS[0], COLOURS[1:7]
_MOST_MARKERS = 30  # on a curve: more hide it
_LONGEST = 34  # letters of a backbone's name beside a figure
_MOST_NAMES, _MOST_TIMES = 60, 8  # of layers beside a heat map, of epochs below it

Node = Mapping[str, Any]


def draw_curves(nodes: Iterable[Node], *, baseline_flops: float | None) -> "Figure | None":
    """Draw the primary metric of every model of a tree against the FLOPs of all its ancestors.

    A level has one colour, standard training is black, and the score right after a coupling,
    before any step, is marked. `baseline_flops` is what 1 stands for; None draws plain FLOPs.
    """
    trained = [node for node in nodes if node["kind"] == "train" and node["history"]]
    if not trained:
        return None
    metric = find_metric(trained[0]["metric"])
    figure, axes = new_figure("", (7.5, 4.2))
    unit, starts = baseline_flops or 1.0, False
    for node in sorted(trained, key=lambda node: -node["level"]):  # the target on top
        before, start = node["flops_before"] / unit, node["start"].get(metric.name)
        xs = [flops / unit for flops in node["history"]["flops"]]
        ys = plotted_scores(node, metric)
        if start is not None:
            xs, ys, starts = [before, *xs], [metric.scale * start, *ys], True
        axes.plot(xs, ys, **_line_style(node, len(xs)))
        if start is not None:
            axes.plot(before, ys[0], **_coupling_style(_colour(node)))
    xlabel = f"FLOPs of a model and all its ancestors{_unit_note(baseline_flops)}"
    axes.set(xlim=(0, None), xlabel=xlabel, ylabel=metric.axis)
    clip_axis(axes.set_ylim, axes.get_ylim(), metric)
    axes.grid(axis="y", color="0.9")
    handles = []
    by_level = sorted(trained, key=_level)  # the target first, standard training last
    for (standard, _), group in groupby(by_level, key=_level):
        here = list(group)
        label = "standard training" if standard else f"{len(here)} × width {here[0]['width']:g}"
        handles.append(legend_line(label, **_line_style(here[0], 1)))
    if starts:
        handles.append(legend_line("right after a coupling", **_coupling_style("0.3")))
    figure.legend(handles=handles, **LEGEND)
    return figure


def draw_rates(nodes: Iterable[Node]) -> "Figure | None":
    """Draw the learning rate along one line from a leaf to the target, so that restarts show."""
    logs = [(node, node["steps"] or node["history"]) for node in line_to_target(nodes)]
    logs = [(node, log) for node, log in logs if log.get("lr")]
    if not logs:
        return None
    figure, axes = new_figure("", (7.5, 3.2))
    for number, (node, log) in enumerate(logs):
        before, rates = node["epochs_before"], log["lr"]
        label = f"{_name(node)}, width {node['width']:g}"
        style = {"color": _colour(node), "marker": "." if len(rates) == 1 else None}
        axes.plot([before + epoch for epoch in log["epoch"]], rates, label=label, **style)
        if number:
            axes.axvline(before, color="0.5", linewidth=0.8, linestyle=":")
    xlabel = "epochs along one line of the tree (dotted: couplings)"
    axes.set(xlim=(0, None), ylim=(0, None), xlabel=xlabel, ylabel="learning rate")
    figure.legend(**LEGEND)
    return figure


def draw_budget(
    levels: Iterable[Mapping[str, Any]], *, baseline_flops: float | None
) -> "Figure | None":
    """Draw planned and spent FLOPs of each level, beside standard training if that is known."""
    levels = [level for level in levels if not level["standard"]]
    if not levels:
        return None
    figure, axes = new_figure("", (7.5, 2.9))
    unit = baseline_flops or max(1.0, sum(level["planned_flops"] for level in levels))
    rows = [[level[key] / unit for level in levels] for key in ("flops", "planned_flops")]
    width = 1.12 * max(1.0, *map(sum, rows))
    names = ["spent", "planned"]
    if baseline_flops:
        names.append("standard, budget 1")
        axes.barh(2, 1, color="0.8", edgecolor="white")
        axes.text(1 + 0.01 * width, 2, "1", va="center")
    for row, parts in enumerate(rows):
        for level, part, end in zip(levels, parts, accumulate(parts), strict=True):
            axes.barh(row, part, left=end - part, color=_colour(level), edgecolor="white")
            if part > 0.09 * width:  # else the number does not fit into it
                number = f"{part:.2f}"
                axes.text(end - part / 2, row, number, ha="center", va="center", color="white")
        axes.text(sum(parts) + 0.01 * width, row, f"{sum(parts):.3f}", va="center")
    axes.set_yticks(range(len(names)), names)
    axes.set(xlim=(0, width), xlabel=f"FLOPs of all models{_unit_note(unit)}")
    square = {"marker": "s", "linestyle": ""}
    handles = [
        legend_line(f"{level['models']} × width {level['width']:g}", color=_colour(level), **square)
        for level in reversed(levels)
    ]
    figure.legend(handles=handles, **LEGEND)
    return figure


def _unit_note(flops: float | None) -> str:
    return f" (1 = {readable_flops(flops)})" if flops else ""


def draw_blocks(node: Node, *, standard: Node | None = None) -> "Figure | None":
    """Draw the size of the off-diagonal blocks of a coupled model: layers x epochs, and their mean.

    It is the root mean square of the two off-diagonal blocks over that of the diagonal ones: 0
    right after a coupling, about 1 in a model that was never coupled. Standard training's mean is
    drawn beside the model's.
    """
    ratios = block_ratios(node)
    if ratios is None:
        return None
    height = max(3.6, 0.9 + 0.15 * min(ratios.shape[1], _MOST_NAMES))
    figure, (left, right) = new_figure("", (9.5, height), 1, 2, width_ratios=[3, 2])
    figure.set_layout_engine("constrained", wspace=0.06)
    _heat_map(figure, left, node["blocks"], ratios)
    for one in (node, standard):
        if one is not None and (values := block_ratios(one)) is not None:
            epochs, style = one["blocks"]["epoch"], {"color": _colour(one), "label": _name(one)}
            right.plot(epochs, values.mean(axis=1), **style, **markers(len(epochs)))
    right.set(xlim=(0, None), ylim=(0, None), xlabel="epochs of its own training")
    right.set_title("mean over layers", fontsize="medium", loc="left")
    right.legend(frameon=False, loc="best")
    return figure


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
    half = np.diff(epochs) / 2 if len(epochs) > 1 else np.array([0.5])  # the way to the neighbour
    edges = np.r_[epochs[0] - half[0], epochs[:-1] + half, epochs[-1] + half[-1]]
    mesh = axes.pcolormesh(edges, np.arange(len(names) + 1), ratios.T, cmap="viridis", vmin=0)
    shown = range(0, len(names), -(-len(names) // _MOST_NAMES))
    axes.set_yticks([n + 0.5 for n in shown], [names[n] for n in shown], fontsize=7)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()  # the first layer on top
    times = epochs[:: -(-len(epochs) // _MOST_TIMES)]
    axes.set_xticks(times, [f"{time:.3g}" for time in times])
    axes.set_xlabel("epochs")
    axes.set_title("each layer, from the image on", fontsize="medium", loc="left")
    figure.colorbar(mesh, ax=axes, label="RMS of off-diagonal / diagonal blocks")


def draw_precision_curves(
    nodes: Mapping[str, Mapping[str, Any]],
    backbones: Sequence[Mapping[str, Any]],
    metrics: Sequence[Metric],
) -> "Figure | None":
    """Draw every metric epoch by epoch: a colour for each backbone, a line for each seed."""
    if not metrics or not any(node["history"].get("epoch") for node in nodes.values()):
        return None
    figure, (row,) = new_figure("", (4.5 * len(metrics), 3.6), 1, len(metrics), squeeze=False)
    for axes, metric in zip(row, metrics, strict=True):
        for number, backbone in enumerate(backbones):
            for node in (nodes[key] for key in backbone["keys"]):
                if values := plotted_scores(node, metric):
                    style = _backbone_style(number, marked=bool(markers(len(values))))
                    axes.plot(node["history"]["epoch"], values, **style)
        axes.set(xlim=(0, None), ylim=(0, None), xlabel="epochs")
        axes.set_title(metric.axis, loc="left", fontsize="medium")
        axes.grid(axis="y", color="0.9")
    names = [_short(backbone["name"]) for backbone in backbones]
    handles = [legend_line(name, **_backbone_style(number)) for number, name in enumerate(names)]
    for text in figure.legend(handles=handles, **LEGEND).get_texts():
        text.set_parse_math(False)  # a dollar in a name is a dollar
    return figure


def draw_precision(precision: Mapping[str, Any]) -> "Figure | None":
    """Draw box and mask mAP of each backbone: means over seeds with their standard deviation."""
    lines = precision["boxes"]
    if not lines:
        return None
    figure, both = new_figure("", (9, 1.3 + 0.38 * len(lines)), 1, 2)
    many = any(line["seeds"] > 1 for line in lines)
    note = ", mean and standard deviation over seeds" if many else ""
    names = [_short(line["backbone"]) for line in lines]
    for axes, (part, title) in zip(both, PARTS.items(), strict=True):
        _bars(axes, [line["cells"]["ap"] for line in precision[part]])
        axes.set_xlabel(f"{title} mAP (%){note}", fontsize="small" if many else None)
        axes.set_yticks(range(len(lines)), names, parse_math=False)
        axes.invert_yaxis()  # the first backbone on top
        names = [""] * len(lines)  # said once
    return figure


def _bars(axes: Any, cells: Sequence[Any]) -> None:
    ends, error = [0.0], {"ecolor": "0.25", "capsize": 3, "elinewidth": 1}
    for number, cell in enumerate(cells):
        if cell is None:
            axes.text(0, number, " –", va="center")
            continue
        value, spread = 100 * cell["mean"], 100 * (cell["spread"] or 0.0)
        style = {"height": 0.65, "color": _backbone_style(number)["color"], "error_kw": error}
        axes.barh(number, value, xerr=spread or None, **style)
        axes.text(value + spread, number, f"  {cell_text(cell)}", va="center")
        ends.append(value + spread)
    axes.set_xlim(0, 1.35 * max(ends) or 1.0)  # room for the numbers


def _backbone_style(number: int, *, marked: bool = True) -> dict[str, Any]:
    colour = COLOURS[1:][number % (len(COLOURS) - 1)]  # black is standard training's
    marker = MARKERS[number % len(MARKERS)] if marked else None
    return {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.3}


def _short(name: str) -> str:
    half = _LONGEST // 2
    return name if len(name) <= _LONGEST else f"{name[: half - 1]}…{name[-half:]}"


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


def clip_axis(set_limits: Any, shown: tuple[float, float], metric: Metric) -> None:
    """Limit an axis to what the metric can be, with a little room for the marks at its end."""
    low, high = (None if end is None else metric.scale * end for end in metric.limits)
    room = 0.02 * (shown[1] - shown[0])
    set_limits(
        shown[0] if low is None else max(shown[0], low - room),
        shown[1] if high is None else min(shown[1], high + room),
    )


def legend_line(label: str, **style: Any) -> Any:
    """Return a line that only the legend shows."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **style)


def new_figure(
    title: str, size: tuple[float, float], *grid: int, **options: Any
) -> tuple["Figure", Any]:
    """Return a figure and its axes: one, or those of a grid of rows and columns."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    found = figure.subplots(*grid, **options)
    figure.axes[0].set_title(title, loc="left", fontsize="medium", parse_math=False)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, found


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a figure in the format of the path's suffix: .png, .svg or .pdf."""
    from matplotlib import rc_context

    with rc_context({"pdf.fonttype": 42, "svg.fonttype": "none"}):  # text stays text
        figure.savefig(path, dpi=150)


def save_each(
    figures: Mapping[str, "Figure | None"], folder: Path, ends: Sequence[str]
) -> list[Path]:
    """Write each figure that there is, by its name, once for each format; return the files."""
    drawn = {name: figure for name, figure in figures.items() if figure is not None}
    files = {folder / f"{name}.{end}": drawn[name] for name in drawn for end in ends}
    for path, figure in files.items():
        save_figure(figure, path)
    return list(files)
