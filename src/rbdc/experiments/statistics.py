"""Statistics of a comparison: means with intervals, differences, FLOPs and time to reach a score.

A row is one trial's result: a mapping with `protocol`, `budget`, `seed`, `flops` (normalized),
`seconds` (of all its jobs, None where some are unknown), `metric` (the name of the primary metric)
and `score` (its value, None where it is missing). `with_times` adds `time`, normalized as FLOPs
are: FLOPs and time are the two costs of a score.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import inf, isfinite, sqrt
from statistics import fmean, stdev
from typing import Any, Literal, get_args

import numpy as np

from rbdc.metrics import Metric, find_metric

Row = Mapping[str, Any]
Cost = Literal["flops", "time"]
Clock = Literal["elapsed", "cpu"]
"""How time is measured: on the wall, or the CPU time of the trainings' processes."""
SECONDS: Mapping[Clock, str] = {"elapsed": "seconds", "cpu": "cpu_seconds"}
Curve = dict[int, dict[float, tuple[float, float]]]  # (cost, score) by seed and by budget

STANDARD = "standard"
RESAMPLES = 2000
FEWEST_SEEDS = 3  # for an interval: that of two is 12.7 times their standard error


def mean_and_interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the mean and half the width of its 95 % t-interval; None where it is unknown.

    Below three values there is no interval: the values themselves say more.
    """
    if len(values) < FEWEST_SEEDS:
        return (fmean(values) if values else None), None
    from scipy.stats import t  # takes a second to import, and only results need it

    half = t.ppf(0.975, df=len(values) - 1) * stdev(values) / sqrt(len(values))
    return fmean(values), float(half)


def statistics_of(rows: Sequence[Row], clock: Clock = "elapsed") -> dict[str, Any]:
    """Return the rows with times, the table's lines, and the cost to reach standard's score."""
    timed = with_times(rows, clock)
    reached = {
        f"{cost}_to_reach": {
            protocol: {key: plain(value) for key, value in found.items()}
            for protocol, found in cost_to_reach(timed, cost).items()
        }
        for cost in get_args(Cost)
    }
    return {"rows": timed, "lines": summarize(timed), **reached}


def with_times(rows: Sequence[Row], clock: Clock = "elapsed") -> list[dict[str, Any]]:
    """Return the rows with `time`: 1 is the mean of standard training with the most FLOPs.

    It is None where the seconds of the row or of standard training are unknown.
    """
    seconds = [row.get(SECONDS[clock]) for row in rows]
    standard = [
        (row["flops"], own)
        for row, own in zip(rows, seconds, strict=True)
        if row["protocol"] == STANDARD and own
    ]
    most = max((flops for flops, _ in standard), default=None)
    unit, _ = mean_and_interval([own for flops, own in standard if flops == most])
    return [
        {**row, "time": own / unit if unit and own else None}
        for row, own in zip(rows, seconds, strict=True)
    ]


def sum_known(values: Iterable[float | None]) -> float | None:
    """Return the sum; None if a value is unknown."""
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def _described(name: str, values: Sequence[float]) -> dict[str, Any]:
    """Return the mean of the values, its interval, and their range where there are several."""
    mean, interval = mean_and_interval(values)
    ends = [min(values), max(values)] if len(values) > 1 else None
    return {name: mean, f"{name}_interval": interval, f"{name}_range": ends}


def summarize(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a line of the table for each protocol and budget, in the order of the rows.

    `gap` is the score minus standard training's at the same budget, `time_gap` the same in the time
    that standard training took there: the metric says which sign is good.
    """
    lines = []
    for protocol, budget in dict.fromkeys((row["protocol"], row["budget"]) for row in rows):
        here = [row for row in rows if (row["protocol"], row["budget"]) == (protocol, budget)]
        done = [row for row in here if row["score"] is not None]
        failed = sum(bool(row.get("failed")) for row in here if row["score"] is None)
        scores = [row["score"] for row in done]
        lines.append(
            {
                "protocol": protocol,
                "budget": budget,
                "flops": fmean(row["flops"] for row in here),
                "seeds": len(done),
                "missing": len(here) - len(done),
                "unfinished": len(here) - len(done) - failed,
                "scores": scores,
                **_described("score", scores),
                "best_score": _mean(done, "best_score"),
                **_described("gap", _gaps(rows, done)),
                "time": _mean(done, "time"),
                **_described("time_gap", _time_gaps(rows, protocol, budget)),
                "seconds": _mean(done, "seconds"),
                "data_passes": fmean(row["data_passes"] for row in here),
                "epochs": here[0]["epochs"],
            }
        )
    standard = {line["budget"]: line["time"] for line in lines if line["protocol"] == STANDARD}
    for line in lines:
        other = standard.get(line["budget"])
        line["relative_time"] = line["time"] / other if other and line["time"] else None
    return lines


def _mean(rows: Sequence[Row], key: str) -> float | None:
    """Return the mean over the rows that have it, None if none has."""
    return mean_and_interval([row[key] for row in rows if row[key] is not None])[0]


def _gaps(rows: Sequence[Row], here: Sequence[Row]) -> list[float]:
    """Return the differences from standard training at the same budget, seed by seed."""
    standard = {
        (row["budget"], row["seed"]): row["score"] for row in rows if row["protocol"] == STANDARD
    }
    others = [(row, standard.get((row["budget"], row["seed"]))) for row in here]
    return [
        row["score"] - other
        for row, other in others
        if other is not None and row["protocol"] != STANDARD
    ]


def _time_gaps(rows: Sequence[Row], protocol: str, budget: float) -> list[float]:
    """Return the differences from standard training in its time at a budget, seed by seed.

    Scores are linear between the protocol's budgets. Times are means over seeds: those of one seed
    are noise. There is no difference where the protocol has no budgets below and above that time.
    """
    curves = _curves(rows, "time")
    if protocol not in curves or protocol == STANDARD:
        return []
    mine, standard = curves[protocol], curves.get(STANDARD, {})
    seeds = [seed for seed in mine if budget in standard.get(seed, {})]
    budgets = _common_budgets(mine, seeds)
    ordered = sorted((fmean(mine[seed][b][0] for seed in seeds), b) for b in budgets)
    time = fmean(standard[seed][budget][0] for seed in seeds) if seeds else inf
    if not ordered or not ordered[0][0] <= time <= ordered[-1][0]:
        return []
    times = [own for own, _ in ordered]
    scores = {seed: [mine[seed][b][1] for _, b in ordered] for seed in seeds}
    return [float(np.interp(time, times, scores[s])) - standard[s][budget][1] for s in seeds]


def cost_to_reach(rows: Sequence[Row], cost: Cost = "flops") -> dict[str, dict[str, Any]]:
    """Return the normalized cost at which each protocol reaches standard training's best score.

    The goal is the score of standard training with the most FLOPs. A protocol's curve is linear
    between its budgets. `inf` says that the curve does not reach the goal; `-inf`, that it is
    better already at its smallest budget.

    The interval is a percentile bootstrap over seeds, the same ones for both curves. It is not
    `scipy.stats.bootstrap`: that one refuses a single seed, and interpolates between percentiles,
    which makes NaN of the infinite values. Below three seeds there is none: both ends are the
    value itself.
    """
    curves = _curves(rows, cost)
    if STANDARD not in curves:
        return {}
    metric = find_metric(rows[0]["metric"])
    seeds = sorted({row["seed"] for row in rows})
    draw = random.Random(0)
    samples = [seeds, *(draw.choices(seeds, k=len(seeds)) for _ in range(RESAMPLES))]
    reached: dict[str, dict[str, Any]] = {}
    for protocol, curve in curves.items():
        found = []
        for sample in samples:
            goal = _mean_curve(curves[STANDARD], sample)
            mine = _mean_curve(curve, sample)
            if goal and mine:
                found.append(crossing(mine, goal[-1][1], metric))
        if not found:
            continue
        ordered = sorted(found[1:]) if len(seeds) >= FEWEST_SEEDS else found[:1] * 2
        low, high = ordered[int(0.025 * len(ordered))], ordered[int(0.975 * len(ordered)) - 1]
        reached[protocol] = {cost: found[0], "low": low, "high": high, "seeds": len(seeds)}
    return reached


def _curves(rows: Sequence[Row], cost: Cost) -> dict[str, Curve]:
    """Return each protocol's results, smallest FLOPs first.

    A seed with an unknown cost is left out: without one of its budgets, a curve would seem to end.
    """
    curves: dict[str, Curve] = {}
    scored = [row for row in rows if row["score"] is not None]
    unknown = {(row["protocol"], row["seed"]) for row in scored if row[cost] is None}
    for row in sorted(scored, key=lambda row: row["flops"]):
        if (row["protocol"], row["seed"]) not in unknown:
            points = curves.setdefault(row["protocol"], {}).setdefault(row["seed"], {})
            points[row["budget"]] = row[cost], row["score"]
    return curves


def _common_budgets(curve: Curve, seeds: Sequence[int]) -> list[float]:
    """Return the budgets that all these seeds have, smallest first."""
    first, *others = [curve[seed] for seed in seeds] or [{}]
    return [budget for budget in first if all(budget in points for points in others)]


def _mean_curve(curve: Curve, seeds: Sequence[int]) -> list[tuple[float, float]]:
    """Return the mean over the seeds that there are, at the budgets that all of them have."""
    chosen = [seed for seed in seeds if seed in curve]
    points = [[curve[seed][b] for seed in chosen] for b in _common_budgets(curve, chosen)]
    return [(fmean(x for x, _ in here), fmean(y for _, y in here)) for here in points]


def crossing(curve: Sequence[tuple[float, float]], goal: float, metric: Metric) -> float:
    """Return the cost at which a curve of (cost, score) first reaches the goal."""
    first_cost, first = curve[0]
    if first == goal or metric.is_better(first, goal):
        return first_cost if first == goal else -inf
    for (x0, y0), (x1, y1) in pairwise(curve):
        if y1 == goal or metric.is_better(y1, goal):
            return x0 + (goal - y0) / (y1 - y0) * (x1 - x0)
    return inf


def plain(value: float) -> float | str:
    """Return a number for JSON, which has no infinity."""
    return value if isfinite(value) else str(value)
