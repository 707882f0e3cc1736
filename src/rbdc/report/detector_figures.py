"""Draw figures of detectors for a paper: their precision during training, and at the end."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rbdc.metrics import Metric
from rbdc.report.figures import COLOURS, MARKERS, markers, new_figure, plotted_scores, save_figure
from rbdc.report.precision import PARTS

_COLOURS = COLOURS[1:]  # black is standard training's
_LONGEST = 34  # letters of a name beside a figure


def draw_precision_curves(
    nodes: Mapping[str, Mapping[str, Any]],
    backbones: Sequence[Mapping[str, Any]],
    metrics: Sequence[Metric],
    path: Path,
) -> bool:
    """Draw every metric epoch by epoch: a colour for each backbone, a line for each seed."""
    if not metrics or not any(node["history"].get("epoch") for node in nodes.values()):
        return False
    from matplotlib.lines import Line2D

    figure, _ = new_figure("", (4.5 * len(metrics), 3.6), 1, len(metrics))
    for axes, metric in zip(figure.axes, metrics, strict=True):
        for number, backbone in enumerate(backbones):
            for node in (nodes[key] for key in backbone["keys"]):
                if values := plotted_scores(node, metric):
                    style = _style(number, marked=bool(markers(len(values))))
                    axes.plot(node["history"]["epoch"], values, **style)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("epochs")
        axes.set_title(metric.axis, loc="left", fontsize="medium")
        axes.grid(axis="y", color="0.9")
    handles = [
        Line2D([], [], label=_short(backbone["name"]), **_style(number))
        for number, backbone in enumerate(backbones)
    ]
    legend = figure.legend(handles=handles, loc="outside right upper", frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a dollar in a name is a dollar
    return save_figure(figure, path)


def draw_precision(precision: Mapping[str, Any], path: Path) -> bool:
    """Draw box and mask mAP of each backbone: means over seeds with their standard deviation."""
    lines = precision["boxes"]
    if not lines:
        return False
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
    return save_figure(figure, path)


def _bars(axes: Any, cells: Sequence[Mapping[str, Any] | None]) -> None:
    ends = [0.0]
    for number, cell in enumerate(cells):
        if cell is None:
            axes.text(0, number, " –", va="center")
            continue
        value, spread = 100 * cell["mean"], 100 * (cell["spread"] or 0.0)
        axes.barh(
            number,
            value,
            height=0.65,
            color=_style(number)["color"],
            xerr=spread or None,
            error_kw={"ecolor": "0.25", "capsize": 3, "elinewidth": 1},
        )
        ends.append(value + spread)
        known = f" ± {spread:.1f}" if cell["spread"] is not None else ""
        axes.text(value + spread, number, f"  {value:.1f}{known}", va="center")
    axes.set_xlim(0, 1.35 * max(ends) or 1.0)  # room for the numbers


def _style(number: int, *, marked: bool = True) -> dict[str, Any]:
    return {
        "color": _COLOURS[number % len(_COLOURS)],
        "marker": MARKERS[number % len(MARKERS)] if marked else None,
        "markersize": 4,
        "linewidth": 1.3,
    }


def _short(name: str) -> str:
    half = _LONGEST // 2
    return name if len(name) <= _LONGEST else f"{name[: half - 1]}…{name[-half:]}"
