"""What a comparison came to: means with intervals, differences, FLOPs to reach an accuracy.

A row is one trial's result: a mapping with `protocol`, `budget`, `seed`, `flops` (normalized) and
`top1`, which is None where it is missing.
"""

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf, isfinite, sqrt
from statistics import fmean, stdev
from typing import Any

Row = Mapping[str, Any]

STANDARD = "standard"
RESAMPLES = 2000
# Student's t for a two-sided 95 % interval, by degrees of freedom from 1; 1.96 far out
T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip


def mean_and_interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """The mean, and half the width of its 95 % interval; None where it cannot be known."""
    if not values:
        return None, None
    if len(values) == 1:
        return values[0], None
    freedom = len(values) - 1
    t = T_975[freedom - 1] if freedom <= len(T_975) else 1.96 + 2.4 / freedom
    return fmean(values), t * stdev(values) / sqrt(len(values))


def summarize(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A line for each protocol and budget, in the order of the rows."""
    lines = []
    for protocol, budget in dict.fromkeys((row["protocol"], row["budget"]) for row in rows):
        here = [row for row in rows if (row["protocol"], row["budget"]) == (protocol, budget)]
        done = [row for row in here if row["top1"] is not None]
        mean, interval = mean_and_interval([row["top1"] for row in done])
        best, _ = mean_and_interval([row["best_top1"] for row in done])
        gap, gap_interval = mean_and_interval(_gaps(rows, done))
        lines.append(
            {
                "protocol": protocol,
                "budget": budget,
                "flops": fmean(row["flops"] for row in here),
                "seeds": len(done),
                "missing": len(here) - len(done),
                "top1": mean,
                "top1_interval": interval,
                "best_top1": best,
                "gap": gap,
                "gap_interval": gap_interval,
                "seconds": fmean(row["seconds"] for row in done) if done else None,
                "data_passes": fmean(row["data_passes"] for row in here),
                "epochs": here[0]["epochs"],
            }
        )
    return lines


def _gaps(rows: Sequence[Row], here: Sequence[Row]) -> list[float]:
    """Differences from standard training at the same budget, seed by seed."""
    standard = {
        (row["budget"], row["seed"]): row["top1"] for row in rows if row["protocol"] == STANDARD
    }
    others = [(row, standard.get((row["budget"], row["seed"]))) for row in here]
    return [
        row["top1"] - other
        for row, other in others
        if other is not None and row["protocol"] != STANDARD
    ]


def flops_to_reach(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """For each protocol, the normalized FLOPs at which it is as good as standard training with the
    most FLOPs, read off its curve (linear between budgets).

    The interval is a bootstrap over seeds, the same ones for both curves. `inf` says that the
    curve does not get there; `-inf`, that it is there already at its smallest budget.
    """
    curves = _curves(rows)
    if STANDARD not in curves:
        return {}
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
                found.append(crossing(mine, goal[-1][1]))
        if not found:
            continue
        ordered = sorted(found[1:])
        low, high = ordered[int(0.025 * len(ordered))], ordered[int(0.975 * len(ordered)) - 1]
        reached[protocol] = {"flops": found[0], "low": low, "high": high, "seeds": len(seeds)}
    return reached


Curve = dict[int, list[tuple[float, float]]]  # of each seed: (FLOPs, accuracy), by FLOPs


def _curves(rows: Sequence[Row]) -> dict[str, Curve]:
    curves: dict[str, Curve] = {}
    for row in sorted(rows, key=lambda row: row["flops"]):
        if row["top1"] is not None:
            points = curves.setdefault(row["protocol"], {}).setdefault(row["seed"], [])
            points.append((row["flops"], row["top1"]))
    return curves


def _mean_curve(curve: Curve, seeds: Sequence[int]) -> list[tuple[float, float]]:
    """The mean over seeds, where all of them have been."""
    chosen = [curve[seed] for seed in seeds if seed in curve]
    if not chosen:
        return []
    points = min(map(len, chosen))
    return [
        (chosen[0][i][0], fmean(points_of_seed[i][1] for points_of_seed in chosen))
        for i in range(points)
    ]


def crossing(curve: Sequence[tuple[float, float]], goal: float) -> float:
    """Where a curve of (FLOPs, accuracy) first reaches the goal."""
    if curve[0][1] >= goal:
        return curve[0][0] if curve[0][1] == goal else -inf
    for (x0, y0), (x1, y1) in pairwise(curve):
        if y1 >= goal:
            return x0 + (goal - y0) / (y1 - y0) * (x1 - x0)
    return inf


def plain(value: float) -> float | str:
    """For JSON, which has no infinity."""
    return value if isfinite(value) else str(value)
