"""Means, intervals, differences, and FLOPs to reach an accuracy."""

from math import inf, sqrt
from typing import Any

import pytest

from rbdc.experiments.statistics import crossing, flops_to_reach, mean_and_interval, summarize
from rbdc.metrics import METRICS

TOP1, PERPLEXITY = METRICS["top1"], METRICS["perplexity"]


def row(protocol: str, budget: float, seed: int, score: float | None) -> dict[str, Any]:
    return {
        "protocol": protocol,
        "budget": budget,
        "seed": seed,
        "metric": "top1",
        "score": score,
        "best_score": score,
        "flops": budget,
        "seconds": 1.0,
        "data_passes": 3.0,
        "epochs": {"0": [1.0]},
    }


def test_the_interval_is_students() -> None:
    mean, interval = mean_and_interval([1.0, 2.0, 3.0])
    assert mean == 2.0 and interval == pytest.approx(4.302653 * 1.0 / sqrt(3))
    assert mean_and_interval([5.0]) == (5.0, None)
    assert mean_and_interval([]) == (None, None)
    _, many = mean_and_interval([0.0, 2.0] * 200)
    assert many == pytest.approx(1.965927 * 20 / sqrt(399) / sqrt(400))  # t with 399 degrees


def test_differences_are_taken_seed_by_seed() -> None:
    rows = [row("standard", 1.0, seed, 0.5 + 0.1 * seed) for seed in range(3)]
    rows += [row("rbdc:1", 1.0, seed, 0.52 + 0.1 * seed) for seed in range(2)]
    rows += [row("rbdc:1", 1.0, 2, None)]
    standard, ours = summarize(rows)
    assert standard["gap"] is None and standard["missing"] == 0
    assert ours["gap"] == pytest.approx(0.02) and ours["gap_interval"] == pytest.approx(0, abs=1e-9)
    assert ours["seeds"] == 2 and ours["missing"] == 1
    assert ours["score_interval"] > 0.5  # the seeds themselves are far apart


@pytest.mark.parametrize(
    ("goal", "expected"),
    [(0.5, 0.4), (0.6, 0.5), (0.75, 0.8), (0.8, 1.0), (0.81, inf), (0.4, -inf)],
)
def test_where_a_curve_reaches_a_goal(goal: float, expected: float) -> None:
    assert crossing([(0.4, 0.5), (0.6, 0.7), (1.0, 0.8)], goal, TOP1) == pytest.approx(expected)


def test_flops_to_reach_standards_accuracy() -> None:
    rows = []
    for seed in range(3):
        shift = 0.01 * seed
        rows += [row("standard", b, seed, a + shift) for b, a in ((0.5, 0.6), (1.0, 0.7))]
        rows += [row("fast", b, seed, a + shift) for b, a in ((0.5, 0.65), (1.0, 0.75))]
        rows += [row("slow", b, seed, a + shift) for b, a in ((0.5, 0.5), (1.0, 0.6))]
    reached = flops_to_reach(rows)
    assert reached["standard"]["flops"] == pytest.approx(1.0)
    fast = reached["fast"]
    assert [fast[key] for key in ("flops", "low", "high")] == pytest.approx([0.75] * 3)
    assert reached["slow"]["flops"] == inf
    uneven = [
        {**r, "score": r["score"] + 0.05 * r["seed"] * (r["protocol"] == "fast")} for r in rows
    ]
    spread = flops_to_reach(uneven)["fast"]
    assert spread["low"] < spread["flops"] < spread["high"]  # seeds differ, so it is not certain
    assert flops_to_reach([r for r in rows if r["protocol"] != "standard"]) == {}


def test_missing_results_are_left_out_of_curves() -> None:
    rows = [row("standard", b, 0, a) for b, a in ((0.5, 0.6), (1.0, 0.7))]
    rows += [row("rbdc:1", 0.5, 0, 0.65), row("rbdc:1", 1.0, 0, None)]
    assert flops_to_reach(rows)["rbdc:1"]["flops"] == inf


def perplexity_rows() -> list[dict[str, Any]]:
    """Three seeds of two protocols and standard training, where lower is better."""
    curves = {
        "standard": ((0.5, 30.0), (1.0, 20.0)),
        "fast": ((0.5, 25.0), (1.0, 15.0)),
        "slow": ((0.5, 40.0), (1.0, 30.0)),
        "at once": ((0.5, 19.0), (1.0, 12.0)),
    }
    return [
        {**row(protocol, budget, seed, score + seed), "metric": "perplexity"}
        for protocol, points in curves.items()
        for budget, score in points
        for seed in range(3)
    ]


@pytest.mark.parametrize(
    ("goal", "expected"),
    [(30.0, 0.4), (25.0, 0.5), (17.5, 0.8), (15.0, 1.0), (14.0, inf), (31.0, -inf)],
)
def test_where_a_curve_that_goes_down_reaches_a_goal(goal: float, expected: float) -> None:
    curve = [(0.4, 30.0), (0.6, 20.0), (1.0, 15.0)]
    assert crossing(curve, goal, PERPLEXITY) == pytest.approx(expected)


def test_flops_to_reach_standards_perplexity() -> None:
    reached = flops_to_reach(perplexity_rows())
    assert reached["standard"]["flops"] == pytest.approx(1.0)
    fast = reached["fast"]
    assert [fast[key] for key in ("flops", "low", "high")] == pytest.approx([0.75] * 3)
    assert reached["slow"]["flops"] == inf and reached["at once"]["flops"] == -inf


def test_a_gap_is_signed_as_score_minus_standards_whichever_way_is_better() -> None:
    lines = {(line["protocol"], line["budget"]): line for line in summarize(perplexity_rows())}
    assert lines["fast", 1.0]["gap"] == -5.0 and lines["slow", 1.0]["gap"] == 10.0
    assert PERPLEXITY.is_better(lines["fast", 1.0]["gap"], 0.0)
    assert not PERPLEXITY.is_better(lines["slow", 1.0]["gap"], 0.0)
