"""Print a plan on a cluster: a table, a Gantt chart in the terminal, and one as a picture."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rbdc.cluster.allocation import STANDARD, ClusterPlan
from rbdc.cluster.timetable import Row, Slot, Timetable
from rbdc.plan import Stage
from rbdc.report.figures import LEGEND, legend_line, new_figure, save_figure
from rbdc.report.plan import LEVEL_COLOURS
from rbdc.report.units import counted

MOST_BARS = 16  # jobs with a bar each in the terminal; of more jobs, each level has one bar
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_GREY = "#AAAAAA"  # standard training's
_WHITE_ON = {"#0072B2", "#D55E00"}  # colours too dark for black letters
_BOUND: dict[str, Any] = {"color": "black", "marker": "^", "markersize": 7, "linestyle": ""}
_FIGURE_INCHES, _AXES_POINTS = (9.0, 4.6), (400.0, 190.0)  # the axes: about, for labels that fit


def timetable_table(cluster: ClusterPlan) -> RenderableType:
    """Return devices, waves and times of every level, target first, then bounds and ratios."""
    tree, standard = cluster.tree, cluster.standard
    unit, seconds = time_unit(max(tree.makespan_seconds, standard.makespan_seconds))
    table = Table(box=SIMPLE, pad_edge=False, title=_title(cluster), title_justify="left")
    table.add_column("models", no_wrap=True)
    for column in ("devices\neach", "waves", "scaling", "from", f"to\n{unit}", f"device-\n{unit}"):
        table.add_column(column, justify="right", no_wrap=True)

    def add(label: str, row: Row) -> None:
        scaling = cluster.scaling.efficiency(row.level, row.devices)
        times = (row.start_seconds, row.end_seconds, row.device_seconds)
        figures = [_number(value / seconds) for value in times]
        table.add_row(label, f"{row.devices:,}", str(row.waves), f"{scaling:.0%}", *figures)

    for stage, row in zip(reversed(cluster.plan.stages), tree.rows, strict=True):
        add(_models(stage), row)
    table.add_section()
    totals = (_number(x / seconds) for x in (tree.makespan_seconds, tree.device_seconds))
    table.add_row("everything", "", "", "", "0", *totals, style="bold")
    add("standard training", standard.rows[0])
    return Group(table, *(Text(line) for line in _notes(cluster)))


def time_unit(seconds: float) -> tuple[str, float]:
    """Return the unit for a time of so many seconds, and the seconds in that unit."""
    if seconds >= 2 * 3600:
        return "hours", 3600.0
    return ("minutes", 60.0) if seconds >= 120 else ("seconds", 1.0)


def gantt(cluster: ClusterPlan, *, width: int = 80) -> Text:
    """Return a chart with a bar per job over time, standard training's last.

    With many jobs there is a bar per level, as high as the number of devices it uses.
    """
    tree, standard = cluster.tree, cluster.standard
    end = max(tree.makespan_seconds, standard.makespan_seconds)
    few = len(tree.slots) <= MOST_BARS
    slots = tree.slots if few else sorted(tree.slots, key=lambda slot: -slot.level)
    rows = [list(row) for _, row in groupby(slots, lambda slot: slot.name if few else slot.level)]
    names = [" - ".join(dict.fromkeys((row[0].name, row[-1].name))) for row in rows]
    rows, names = [*rows, list(standard.slots)], [*names, "standard training"]
    labels = [f"{name} on {row[0].devices:,}" for name, row in zip(names, rows, strict=True)]
    margin = max(map(len, labels)) + 2
    columns = max(10, width - margin)
    chart = Text(no_wrap=True, overflow="crop")
    for label, row in zip(labels, rows, strict=True):
        most = min(tree.devices, sum(slot.devices for slot in row))
        profile = _bar(row[0], end, columns) if len(row) == 1 else _profile(row, end, columns, most)
        chart.append(label.ljust(margin))
        chart.append(profile + "\n", style=_colour(row[0]))
    unit, seconds = time_unit(end)
    last = f"{_number(end / seconds)} {unit}"
    chart.append(" " * margin + "0" + last.rjust(columns - 1), style="dim")
    return chart


def save_timetable_plot(cluster: ClusterPlan, path: Path) -> None:
    """Draw devices against time, a rectangle per job; below it standard training."""
    tree, standard = cluster.tree, cluster.standard
    end = max(tree.makespan_seconds, standard.makespan_seconds)
    unit, seconds = time_unit(end)
    figure, (upper, lower) = new_figure(
        _title(cluster), _FIGURE_INCHES, 2, 1, sharex=True, height_ratios=(2, 1)
    )
    for axes, timetable in ((upper, tree), (lower, standard)):
        _draw(axes, timetable, seconds, end)
    # below the axis, where it crosses no name
    place = {"transform": upper.get_xaxis_transform(), "clip_on": False}
    upper.plot(tree.bound_seconds / seconds, -0.03, **_BOUND, **place)
    lower.set(xlim=(0, 1.02 * end / seconds), xlabel=unit)
    figure.legend(handles=_legend(cluster), **LEGEND)
    save_figure(figure, path)


def _draw(axes: Any, timetable: Timetable, seconds: float, end: float) -> None:
    used = max(first + count for slot in timetable.slots for first, count in slot.places)
    for slot in timetable.slots:
        colour = _colour(slot)
        span = (slot.start_seconds / seconds, slot.seconds / seconds)
        points = _AXES_POINTS[1] / used  # of one device
        for first, count in slot.places:
            edge = min(0.8, count * points / 6)  # of thin ones a wide edge would leave nothing
            style = {"facecolors": colour, "edgecolors": "white", "linewidth": edge}
            axes.broken_barh([span], (first, count), **style)
        first, count = max(slot.places, key=lambda place: place[1])
        wide = slot.seconds / end * _AXES_POINTS[0]
        if wide > 6.5 * len(slot.name) and count * points > 11:
            middle = (span[0] + span[1] / 2, first + count / 2)
            ink = "white" if colour in _WHITE_ON else "black"
            axes.text(*middle, slot.name, ha="center", va="center", fontsize=8, color=ink)
    axes.set(ylim=(0, used), yticks=sorted({0, used // 2, used}), ylabel="devices")


def _legend(cluster: ClusterPlan) -> list[Any]:
    from matplotlib.patches import Patch

    slots = {slot.level: slot for slot in cluster.tree.slots}
    rows = [(_models(s), slots[s.level], s.models) for s in reversed(cluster.plan.stages)]
    handles: list[Any] = []
    for name, slot, models in (*rows, ("standard training", cluster.standard.slots[0], 1)):
        each = " each" * (models > 1)
        label = f"{name}\non {counted(slot.devices, 'device')}{each}"
        handles.append(Patch(color=_colour(slot), label=label))
    return [*handles, legend_line("no timetable of\nthe tree is shorter", **_BOUND)]


def _title(cluster: ClusterPlan) -> str:
    tree, standard = cluster.tree, cluster.standard
    unit, seconds = time_unit(max(tree.makespan_seconds, standard.makespan_seconds))
    ours, theirs = tree.makespan_seconds / seconds, standard.makespan_seconds / seconds
    return (
        f"{cluster.plan.model} on {counted(tree.devices, 'device')}: {_number(ours)} {unit}, "
        f"standard training {_number(theirs)}"
    )


def _notes(cluster: ClusterPlan) -> list[str]:
    tree, scaling = cluster.tree, cluster.scaling
    hardware = scaling.hardware
    unit, seconds = time_unit(max(tree.makespan_seconds, cluster.standard.makespan_seconds))
    speeds = ", ".join(map(_number, scaling.images_per_second))
    bounds = tree.critical_path_seconds / seconds, tree.work_seconds / tree.devices / seconds
    allocation = ",".join(map(str, cluster.allocation))
    return [
        f"makespan {cluster.makespan_ratio:.3f} and device-{unit} {cluster.device_ratio:.3f} of "
        "standard training's",
        f"{tree.gap:.1%} above the bound: critical path {_number(bounds[0])}, "
        f"work / devices {_number(bounds[1])} {unit}",
        f"devices are idle {tree.idle_share:.1%} of the time",
        f"on GPUs: rbdc train --engine ray --gpus-per-job {allocation}",
        f"assumed: images/s of one device {speeds} (target first); batch {scaling.batch_size};",
        f"  all-reduce {hardware.node_bytes_per_second / 1e9:g} GB/s in a node of "
        f"{hardware.devices_per_node}, {hardware.network_bytes_per_second / 1e9:g} GB/s between; "
        f"a step {1000 * hardware.least_step_seconds:g} ms or more",
    ]


def _models(stage: Stage) -> str:
    return f"{stage.models} × width {stage.width:.3g}"


def _number(value: float) -> str:
    """Return three digits, or all of a large number: '1,234', '92.8', '0.0139'."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _colour(slot: Slot) -> str:
    return _GREY if slot.name == STANDARD else LEVEL_COLOURS[slot.level % len(LEVEL_COLOURS)]


def _bar(slot: Slot, end: float, columns: int) -> str:
    start = min(columns - 1, round(slot.start_seconds / end * columns))
    length = max(1, round(slot.end_seconds / end * columns) - start)
    return " " * start + "█" * length


def _profile(slots: Sequence[Slot], end: float, columns: int, most: int) -> str:
    """Return the devices in use in each column, in eighths of `most`."""
    step, busy = end / columns, np.zeros(columns)
    edges = step * np.arange(columns + 1)
    for slot in slots:
        ends = np.minimum(slot.end_seconds, edges[1:])
        shared = ends - np.maximum(slot.start_seconds, edges[:-1])
        busy += slot.devices * shared.clip(min=0) / step
    eighths = [min(8, -(-int(80 * value / most) // 10)) for value in busy]
    return "".join(_EIGHTHS[n] for n in eighths).rstrip()
