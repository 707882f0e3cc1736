"""Statistics of a comparison: means with intervals, differences, FLOPs to reach a score.

A row is one trial's result: a mapping with `protocol`, `budget`, `seed`, `flops` (normalized),
`metric` (the name of the primary metric) and `score` (its value, None where it is missing).
"""

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf, isfinite, sqrt
from statistics import fmean, stdev
from typing import Any

from rbdc.metrics import Metric, find_metric

Row = Mapping[str, Any]
Curve = dict[int, list[tuple[float, float]]]  # (FLOPs, score) of each seed, sorted by FLOPs

STANDARD = "standard"
RESAMPLES = 2000


def mean_and_interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the mean and half the width of its 95 % t-interval; None where it is unknown."""
    if len(values) < 2:
        return (values[0] if values else None), None
    from scipy.stats import t  # takes a second to import, and only results need it

    half = t.ppf(0.975, df=len(values) - 1) * stdev(values) / sqrt(len(values))
    return fmean(values), float(half)


def summarize(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a line of the table for each protocol and budget, in the order of the rows.

    `gap` is the score minus standard training's: the metric says which sign is good.
    """
    lines = []
    for protocol, budget in dict.fromkeys((row["protocol"], row["budget"]) for row in rows):
        here = [row for row in rows if (row["protocol"], row["budget"]) == (protocol, budget)]
        done = [row for row in here if row["score"] is not None]
        mean, interval = mean_and_interval([row["score"] for row in done])
        best, _ = mean_and_interval([row["best_score"] for row in done])
        gap, gap_interval = mean_and_interval(_gaps(rows, done))
        lines.append(
            {
                "protocol": protocol,
                "budget": budget,
                "flops": fmean(row["flops"] for row in here),
                "seeds": len(done),
                "missing": len(here) - len(done),
                "score": mean,
                "score_interval": interval,
                "best_score": best,
                "gap": gap,
                "gap_interval": gap_interval,
                "seconds": fmean(row["seconds"] for row in done) if done else None,
                "data_passes": fmean(row["data_passes"] for row in here),
                "epochs": here[0]["epochs"],
            }
        )
    return lines


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


def flops_to_reach(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Return the normalized FLOPs at which each protocol reaches standard training's best score.

    The goal is the score of standard training with the most FLOPs. A protocol's curve is linear
    between its budgets. `inf` says that the curve does not reach the goal; `-inf`, that it is
    better already at its smallest budget.

    The interval is a percentile bootstrap over seeds, the same ones for both curves. It is not
    `scipy.stats.bootstrap`: that one refuses a single seed, and interpolates between percentiles,
    which makes NaN of the infinite values.
    """
    curves = _curves(rows)
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
        ordered = sorted(found[1:])
        low, high = ordered[int(0.025 * len(ordered))], ordered[int(0.975 * len(ordered)) - 1]
        reached[protocol] = {"flops": found[0], "low": low, "high": high, "seeds": len(seeds)}
    return reached


def _curves(rows: Sequence[Row]) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    for row in sorted(rows, key=lambda row: row["flops"]):
        if row["score"] is not None:
            points = curves.setdefault(row["protocol"], {}).setdefault(row["seed"], [])
            points.append((row["flops"], row["score"]))
    return curves


def _mean_curve(curve: Curve, seeds: Sequence[int]) -> list[tuple[float, float]]:
    """Return the mean over seeds, up to the last budget that all of them have."""
    chosen = [curve[seed] for seed in seeds if seed in curve]
    if not chosen:
        return []
    points = min(map(len, chosen))
    return [
        (chosen[0][i][0], fmean(points_of_seed[i][1] for points_of_seed in chosen))
        for i in range(points)
    ]


def crossing(curve: Sequence[tuple[float, float]], goal: float, metric: Metric) -> float:
    """Return the FLOPs at which a curve of (FLOPs, score) first reaches the goal."""
    first_flops, first = curve[0]
    if first == goal or metric.is_better(first, goal):
        return first_flops if first == goal else -inf
    for (x0, y0), (x1, y1) in pairwise(curve):
        if y1 == goal or metric.is_better(y1, goal):
            return x0 + (goal - y0) / (y1 - y0) * (x1 - x0)
    return inf


def plain(value: float) -> float | str:
    """Return a number for JSON, which has no infinity."""
    return value if isfinite(value) else str(value)
