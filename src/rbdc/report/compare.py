"""Print a comparison: its cost before it starts, its table and its plots afterwards."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rbdc.metrics import Metric, find_metric
from rbdc.report.figures import COLOURS, LEGEND, MARKERS, clip_axis, new_figure, save_each
from rbdc.report.units import counted, readable_flops

_TIMES = {"relative_time": "time", "time_gap": "at equal time"}  # columns of the table
_CLOCKS = {"elapsed": "time", "cpu": "CPU time"}
_LETTER_INCHES, _CURVES_INCHES = 0.058, 6.0  # of small print, and of the axes at least


def comparison_table(summary: Mapping[str, Any]) -> RenderableType:
    """Return a row for each protocol and budget, then the cost to reach standard's best score.

    A difference from standard training is green where it is better and red where it is worse, if
    its interval excludes 0. Columns that no row has anything for are left out.
    Where the comparison is one of the paper's, the paper's own score stands beside ours.
    """
    metric = find_metric(summary["metric"])
    table = Table(box=SIMPLE, pad_edge=False, collapse_padding=True)
    published = summary.get("published") or {}
    by_budget = sorted(summary["lines"], key=lambda line: line["budget"])
    has = {key: any(line[key] is not None for line in by_budget) for key in _TIMES}
    times = [title for key, title in _TIMES.items() if has[key]]
    columns = ["protocol", "FLOPs", metric.label, "from standard", *times, "epochs", "seeds"]
    for column in (*columns, *(["the paper"] if published else [])):
        justify: Any = "left" if column in ("protocol", "epochs") else "right"
        table.add_column(column, justify=justify, no_wrap=column != "epochs")  # they give way
    for _, lines in groupby(by_budget, key=lambda line: line["budget"]):
        for line in lines:
            time, missing = line["relative_time"], line["missing"]
            paper = metric.text(published.get(f"{line['protocol']} {line['budget']:g}"))
            table.add_row(
                escape(line["protocol"]),
                f"{line['flops']:.3f}",
                metric.text(*_cell(line, "score"), absent=_absent(line)),
                _gap(line, "gap", metric),
                *([f"{time:.2f}" if time else ""] if has["relative_time"] else []),
                *([_gap(line, "time_gap", metric)] if has["time_gap"] else []),
                Text(epochs_of_levels(line["epochs"]), no_wrap=True, overflow="ellipsis"),
                f"{line['seeds']} of {line['seeds'] + missing}" if missing else f"{line['seeds']}",
                *([paper] if published else []),
            )
        table.add_section()
    return Group(table, *(Text(line) for line in notes(summary)))


def _gap(line: Mapping[str, Any], key: str, metric: Metric) -> Text:
    gap, half, ends = _cell(line, key)
    clear = half is not None and abs(gap) > half
    colour = "green" if clear and metric.is_better(gap, 0.0) else "red" if clear else ""
    return Text(metric.difference(gap, half, ends), style=colour)


def _cell(line: Mapping[str, Any], key: str) -> tuple[Any, Any, Any]:
    """Return a mean over seeds, its interval, and the range of the seeds."""
    return line[key], line[f"{key}_interval"], line.get(f"{key}_range")


def _absent(line: Mapping[str, Any]) -> str:
    """Return what stands where a score will be, or will never be."""
    return "not yet" if line.get("unfinished") else "failed" if line["missing"] else ""


def notes(summary: Mapping[str, Any]) -> list[str]:
    """Return the lines below the table: units, the cost to reach standard's score, tuned rates."""
    metric = find_metric(summary["metric"])
    direction = "" if metric.higher_is_better else ", lower is better"
    standard = readable_flops(summary["baseline_flops"])
    lines = [
        f"FLOPs of all models involved, 1 is standard training for {summary['baseline_epochs']:g} "
        f"epochs ({standard}); {metric.label} of the last weights, {seeds_text(summary)}{direction}"
    ]
    if any(line["relative_time"] for line in summary["lines"]):
        lines.append(
            f"{_CLOCKS[summary.get('clock', 'elapsed')]} of all models involved, one after the "
            "other; 1 is standard training with the "
            "same FLOPs, and at equal time is the difference from it in the time it took"
        )
        if unknown := sum(bool(row["seconds"] is None and row["score"]) for row in summary["rows"]):
            trials = counted(unknown, "trial")
            lines.append(f"{trials} of unknown duration; times leave out that protocol's seed")
    budgets = Counter(line["protocol"] for line in summary["lines"])
    for protocol in summary["flops_to_reach"]:
        if protocol != "standard" and budgets[protocol] > 1:  # a curve to read it off
            lines.append(f"{protocol} {_reached(summary, protocol, metric)}")
    if summary["tuning"]:
        lines.append(_tuned(summary))
    return lines


def seeds_text(summary: Mapping[str, Any]) -> str:
    """Return what is shown of several seeds."""
    most = max((line["seeds"] for line in summary["lines"]), default=0)
    if most < 2:
        return "one seed"
    fewest = min(line["seeds"] for line in summary["lines"] if line["seeds"])
    ways = {
        "mean and 95 % interval over seeds": most >= 3,
        "mean and range of two seeds": fewest < 3,
    }
    return "; ".join(way for way, used in ways.items() if used)


def _tuned(summary: Mapping[str, Any]) -> str:
    """Return what tuning cost and found; a run that stopped while it tuned has found nothing."""
    tried = {(row["protocol"], row["lr"], row["decay_start"]) for row in summary["tuning"]}
    used = {(row["protocol"], row["lr"], row["decay_start"]): None for row in summary["rows"]}
    found = [f"{protocol} {lr:g}, {start:g}" for protocol, lr, start in used.keys() & tried]
    return (
        f"tuned on held-out data, at {summary['tuning_flops']:.2f} of the FLOPs of standard "
        "training in all; learning rate, and the share of the training at which it begins to fall: "
        + (", ".join(sorted(found)) or "not known yet")
    )


def epochs_of_levels(epochs: Mapping[str, Sequence[float]]) -> str:
    """Return the epochs of every model, leaves first: '4×1.3 + 2×2.6 + 5.2'."""
    parts = []
    for level in sorted(epochs, key=int, reverse=True):
        counts = [f"{count:.3g}" for count in epochs[level]]
        alike = len(counts) > 1 and len(set(counts)) == 1
        parts.append(f"{len(counts)}×{counts[0]}" if alike else "+".join(counts))
    return " + ".join(parts)


def short_epochs(line: Mapping[str, Any], between: str = " / ") -> str:
    """Return the different epochs of each level's models, leaves first: '1.3 / 2.6 / 5.2'."""
    levels = [line["epochs"][level] for level in sorted(line["epochs"], key=int, reverse=True)]
    texts = [dict.fromkeys(f"{count:.3g}" for count in counts) for counts in levels]
    return between.join(map("+".join, texts))


def cost_lines(
    trials: int, jobs: int, alone: float, shared: float, baseline_flops: float
) -> list[str]:
    """Return what a comparison will cost, to be printed before it starts."""
    return [
        f"{counted(trials, 'trial')} of {counted(jobs, 'job')}: {readable_flops(shared)}, "
        f"{shared / baseline_flops:.2f} times standard training",
        f"sharing jobs saves {1 - shared / alone:.0%} of {readable_flops(alone)}",
    ]


def hours_lines(seconds: float, images_per_second: float, measured_here: bool) -> list[str]:
    """Return the device-hours, from the speed of the target's training."""
    source = "measured here in a few steps" if measured_here else "as given"
    return [
        f"{seconds / 3600:,.1f} device-hours at {images_per_second:,.1f} images/s of the target "
        f"({source}), narrow models as fast by FLOPs"
    ]


def plan_lines(comparison_rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return a table of one seed's trials before anything runs: epochs and FLOPs."""
    table = Table(box=SIMPLE, pad_edge=False)
    for column in ("protocol", "FLOPs", "epochs", "passes"):
        table.add_column(column, justify="left" if column in ("protocol", "epochs") else "right")
    for row in comparison_rows:
        table.add_row(
            escape(row["protocol"]),
            f"{row['flops']:.3f}",
            epochs_of_levels(row["epochs"]),
            f"{row['data_passes']:.4g}",
        )
    return table


def _reached(summary: Mapping[str, Any], protocol: str, metric: Metric) -> str:
    """Return when a protocol is as good as standard training with the most FLOPs."""
    goal = f"standard training's best {metric.label}"
    found, time = (summary[f"{cost}_to_reach"].get(protocol) for cost in ("flops", "time"))
    waiting = sum(_unfinished(summary, name) for name in {protocol, "standard"})
    if waiting:
        state = f" ({counted(waiting, 'trial')} unfinished)"
        if found["flops"] == "inf":
            return f"has not reached {goal} yet{state}"
        return f"is compared with {goal} when both are finished{state}"
    if found["flops"] == "inf":
        return f"does not reach {goal}{_interval(found)}"
    if found["flops"] == "-inf":
        return f"is better than {goal} already at its smallest budget{_interval(found)}"
    text = f"reaches {goal} at {found['flops']:.2f} of the FLOPs{_interval(found)}"
    if time is None or isinstance(time["time"], str):  # trials of unknown duration are left out
        return text
    return f"{text} and {time['time']:.2f} of the time{_interval(time)}"


def _unfinished(summary: Mapping[str, Any], protocol: str) -> int:
    """Return how many trials of a protocol are still to come; failed ones are not."""
    mine = [line for line in summary["lines"] if line["protocol"] == protocol]
    return sum(line.get("unfinished", 0) for line in mine)


def _interval(found: Mapping[str, Any]) -> str:
    if found["low"] == found["high"]:
        return ""
    words = {"inf": "never", "-inf": "the smallest budget"}
    low, high = (words.get(end) or f"{end:.2f}" for end in (found["low"], found["high"]))
    return f" (95 %: {low} to {high})"


def save_comparison_plots(
    summary: Mapping[str, Any], folder: Path, ends: Sequence[str] = ("png", "svg")
) -> list[Path]:
    """Plot the score against FLOPs and, if known, time, once for each format; return the files."""
    if not _curves(summary):
        return []
    one = len({x["budget"] for x in summary["lines"] if x["protocol"] != "standard"}) == 1
    by_flops = _draw_side_by_side if one else _draw_flops
    figures = {"accuracy-flops": by_flops(summary), "accuracy-time": _draw_time(summary)}
    return save_each(figures, folder, ends)


def _draw_flops(summary: Mapping[str, Any]) -> Any:
    curves = _curves(summary)
    budgets = sorted(line["flops"] for line in summary["lines"])
    margin = 0.12 + 0.08 * (budgets[-1] - budgets[0])
    crowded = _crowded(curves, budgets[-1] - budgets[0] + 2 * margin)
    between = "\n" if crowded else " / "  # levels below each other, where there is no room beside
    heights = [
        max(len(line["epochs"]) for line in lines) if crowded else 1 for lines in curves.values()
    ]
    ends = list(accumulate(heights))
    middles = [end - height / 2 for end, height in zip(ends, heights, strict=True)]
    inches = 0.22 * ends[-1]
    figure, (axes, below) = new_figure(
        _title(summary), (9, 4.4 + inches), 2, 1, sharex=True, height_ratios=[4, inches]
    )
    axes.tick_params(labelbottom=True)
    below.spines[:].set_visible(False)
    below.tick_params(length=0, labelbottom=False)
    grey: Any = {"ha": "center", "va": "center", "fontsize": 8, "color": "0.35"}
    for lines, middle in zip(curves.values(), middles, strict=True):
        for line in lines:
            below.text(line["flops"], middle, short_epochs(line, between), **grey)
    below.set_yticks(middles, list(curves), fontsize=8)
    for number, label in enumerate(below.get_yticklabels()):
        label.set_color(COLOURS[number % len(COLOURS)])
    below.set(ylim=(ends[-1], 0), xlim=(budgets[0] - margin, budgets[-1] + margin))
    below.hlines(ends[:-1], 0, 1, "0.93", transform=below.get_yaxis_transform())
    below.set_xlabel(
        "FLOPs of all models, relative to standard training (points moved aside to be seen);\n"
        "in grey, epochs of one model of each level"
    )
    _draw_curves(axes, summary, "flops", aside=0.03 * margin)
    return figure


def _crowded(curves: Mapping[str, Sequence[Any]], span: float) -> bool:
    """Return whether a protocol's epochs at one budget would run into those at the next."""
    for one, other in (pair for lines in curves.values() for pair in pairwise(lines)):
        letters = 2 + sum(len(short_epochs(line)) for line in (one, other)) / 2
        room = (other["flops"] - one["flops"]) / span
        if letters * _LETTER_INCHES > room * _CURVES_INCHES:
            return True
    return False


def _draw_side_by_side(summary: Mapping[str, Any]) -> Any:
    """Draw the protocols of one budget below each other, the best one on top.

    As points of a curve they would lie on one spot.
    """
    metric = find_metric(summary["metric"])
    known = [line for line in summary["lines"] if line["score"] is not None]
    lines = metric.worst_first(known, lambda line: float(line["score"]))
    figure, axes = new_figure(_title(summary), (9, 1.4 + 0.32 * len(lines)))
    for row, line in enumerate(lines):
        kind = line["protocol"].partition(":")[0]
        colour = {"standard": COLOURS[0], "rbdc": COLOURS[2]}.get(kind, COLOURS[1])
        bars = _bars(line, metric)
        axes.errorbar(
            metric.scale * line["score"], row, xerr=bars, fmt="o", color=colour, capsize=3
        )
        axes.plot(*_points(line, metric, row), ".", color=colour, markersize=4)
    names = [f"{line['protocol']} ({line['flops']:.2g})" for line in lines]
    epochs = axes.twinx()
    epochs.tick_params(colors="0.35", labelsize=8, length=0)
    epochs.spines[["top", "right"]].set_visible(False)
    for side, labels in ((axes, names), (epochs, list(map(short_epochs, lines)))):
        side.set_yticks(range(len(lines)), labels)
        side.set_ylim(-0.6, len(lines) - 0.4)
    clip_axis(axes.set_xlim, axes.get_xlim(), metric)
    axes.grid(axis="x", color="0.9")
    axes.set_xlabel(f"{metric.axis}; in brackets FLOPs, on the right epochs of each level")
    return figure


def _draw_time(summary: Mapping[str, Any]) -> Any:
    if all(line.get("time") is None for line in summary["lines"]):
        return None
    figure, axes = new_figure(_title(summary, "by time"), (9, 4.4))
    axes.set_xlabel("time of all models one after the other, relative to standard training")
    _draw_curves(axes, summary, "time")
    return figure


def _title(summary: Mapping[str, Any], how: str = "at equal FLOPs") -> str:
    return f"{summary['model']['name']}: protocols {how}, {seeds_text(summary)}"


def _bars(line: Mapping[str, Any], metric: Metric) -> list[list[float]]:
    """Return how far the bar of a score goes down and up: its interval, else its seeds' range."""
    score, half, ends = _cell(line, "score")
    if half is not None:
        return [[metric.scale * half]] * 2
    low, high = ends or (score, score)
    return [[metric.scale * (score - low)], [metric.scale * (high - score)]]


def _points(line: Mapping[str, Any], metric: Metric, at: float) -> tuple[list[float], list[float]]:
    """Return the seeds' own scores, and where they are drawn: only where there is no interval."""
    scores = line.get("scores", []) if line["score_interval"] is None else []
    return [metric.scale * score for score in scores], [at] * len(scores)


def _draw_curves(axes: Any, summary: Mapping[str, Any], x: str, *, aside: float = 0.0) -> None:
    """Draw a curve of each protocol over x, moved aside so that bars can be seen."""
    metric, curves = find_metric(summary["metric"]), _curves(summary)
    for number, (protocol, found) in enumerate(curves.items()):
        lines = [line for line in found if line[x] is not None]
        moved = aside * (number - (len(curves) - 1) / 2)
        axes.errorbar(
            [line[x] + moved for line in lines],
            [metric.scale * line["score"] for line in lines],
            yerr=[[_bars(line, metric)[side][0] for line in lines] for side in (0, 1)],
            label=protocol,
            capsize=3,
            elinewidth=1,
            color=COLOURS[number % len(COLOURS)],
            marker=MARKERS[number % len(MARKERS)],
            linestyle="-" if number < len(COLOURS) else "--",
            linewidth=1.5,
            markersize=5,
        )
        for line in lines:
            scores, at = _points(line, metric, line[x] + moved)
            axes.plot(at, scores, ".", color=COLOURS[number % len(COLOURS)], markersize=4)
    clip_axis(axes.set_ylim, axes.get_ylim(), metric)
    axes.set_ylabel(metric.axis)
    axes.grid(axis="y", color="0.9")
    axes.figure.legend(**LEGEND)


def _curves(summary: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the lines of each protocol that have a score, by their FLOPs."""
    known = [line for line in summary["lines"] if line["score"] is not None]
    curves: dict[str, list[Any]] = {line["protocol"]: [] for line in known}
    for line in sorted(known, key=lambda line: line["flops"]):
        curves[line["protocol"]].append(line)
    return curves
