"""Means, intervals, differences, and FLOPs and time to reach an accuracy."""

from math import inf, sqrt
from typing import Any

import pytest

from rbdc.experiments.statistics import (
    cost_to_reach,
    crossing,
    mean_and_interval,
    statistics_of,
    summarize,
    with_times,
)
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
        "seconds": 100 * budget,
        "time": budget,
        "data_passes": 3.0,
        "epochs": {"0": [1.0]},
    }


def test_the_interval_is_students() -> None:
    mean, interval = mean_and_interval([1.0, 2.0, 3.0])
    assert mean == 2.0 and interval == pytest.approx(4.302653 * 1.0 / sqrt(3))
    assert mean_and_interval([5.0]) == (5.0, None)
    assert mean_and_interval([]) == (None, None)
    two, none = mean_and_interval([57.2, 68.6])
    assert two == pytest.approx(62.9) and none is None  # and not ± 72.42
    _, many = mean_and_interval([0.0, 2.0] * 200)
    assert many == pytest.approx(1.965927 * 20 / sqrt(399) / sqrt(400))  # t with 399 degrees


def test_differences_are_taken_seed_by_seed() -> None:
    rows = [row("standard", 1.0, seed, 0.5 + 0.1 * seed) for seed in range(3)]
    rows += [row("rbdc:1", 1.0, seed, 0.52 + 0.1 * seed) for seed in range(2)]
    rows += [row("rbdc:1", 1.0, 2, None)]
    standard, ours = summarize(rows)
    assert standard["gap"] is None and standard["missing"] == 0
    assert ours["gap"] == pytest.approx(0.02) and ours["gap_interval"] is None
    assert ours["seeds"] == 2 and ours["missing"] == 1
    assert ours["score_interval"] is None  # of two seeds: the points and their range
    assert ours["score_range"] == pytest.approx([0.52, 0.62]) and len(ours["scores"]) == 2
    assert ours["unfinished"] == 1
    (failed,) = summarize([{**row("rbdc:1", 1.0, 0, None), "failed": True}])
    assert failed["missing"] == 1 and failed["unfinished"] == 0


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
    reached = cost_to_reach(rows)
    assert reached["standard"]["flops"] == pytest.approx(1.0)
    fast = reached["fast"]
    assert [fast[key] for key in ("flops", "low", "high")] == pytest.approx([0.75] * 3)
    assert reached["slow"]["flops"] == inf
    uneven = [
        {**r, "score": r["score"] + 0.05 * r["seed"] * (r["protocol"] == "fast")} for r in rows
    ]
    spread = cost_to_reach(uneven)["fast"]
    assert spread["low"] < spread["flops"] < spread["high"]  # seeds differ, so it is not certain
    assert cost_to_reach([r for r in rows if r["protocol"] != "standard"]) == {}


def test_missing_results_are_left_out_of_curves() -> None:
    rows = [row("standard", b, 0, a) for b, a in ((0.5, 0.6), (1.0, 0.7))]
    rows += [row("rbdc:1", 0.5, 0, 0.65), row("rbdc:1", 1.0, 0, None)]
    assert cost_to_reach(rows)["rbdc:1"]["flops"] == inf


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
    reached = cost_to_reach(perplexity_rows())
    assert reached["standard"]["flops"] == pytest.approx(1.0)
    fast = reached["fast"]
    assert [fast[key] for key in ("flops", "low", "high")] == pytest.approx([0.75] * 3)
    assert reached["slow"]["flops"] == inf and reached["at once"]["flops"] == -inf


def test_a_gap_is_signed_as_score_minus_standards_whichever_way_is_better() -> None:
    lines = {(line["protocol"], line["budget"]): line for line in summarize(perplexity_rows())}
    assert lines["fast", 1.0]["gap"] == -5.0 and lines["slow", 1.0]["gap"] == 10.0
    assert PERPLEXITY.is_better(lines["fast", 1.0]["gap"], 0.0)
    assert not PERPLEXITY.is_better(lines["slow", 1.0]["gap"], 0.0)


def timed_rows() -> list[dict[str, Any]]:
    """Three seeds; the tree is better and takes 1.4 times as long, in uneven seconds."""
    rows = []
    for seed in range(3):
        for budget in (0.4, 0.6, 1.0):
            noise, shift = 1 + 0.1 * (seed - 1), 0.01 * seed
            standard = row("standard", budget, seed, 0.5 + 0.2 * budget + shift)
            tree = row("tree", budget, seed, 0.6 + 0.2 * budget + 2 * shift)
            rows += [
                {**standard, "seconds": 200 * budget * noise},
                {**tree, "seconds": 280 * budget / noise},
            ]
    return rows


def test_time_is_relative_to_standard_training_with_the_most_flops() -> None:
    rows = with_times(timed_rows())
    longest = [r["time"] for r in rows if r["protocol"] == "standard" and r["budget"] == 1.0]
    assert longest == pytest.approx([0.9, 1.0, 1.1])
    assert rows[1]["time"] == pytest.approx(280 * 0.4 / 0.9 / 200)
    other = with_times([r for r in rows if r["protocol"] == "tree"])
    assert all(r["time"] is None for r in other)  # nothing to compare with
    assert all(line["relative_time"] is None for line in summarize(other))


def test_the_difference_in_the_time_of_standard_training() -> None:
    found = summarize(with_times(timed_rows()))
    lines = {(line["protocol"], line["budget"]): line for line in found}
    longer = 1.4 * (1 / 0.9 + 1 + 1 / 1.1) / 3
    for budget in (0.4, 0.6, 1.0):
        tree = lines["tree", budget]
        assert tree["gap"] == pytest.approx(0.1 + 0.01)
        assert tree["relative_time"] == pytest.approx(longer)
        assert lines["standard", budget]["relative_time"] == 1
        assert lines["standard", budget]["time_gap"] is None
    assert lines["tree", 0.4]["time_gap"] is None  # the tree has nothing as short as that
    for budget in (0.6, 1.0):
        line = lines["tree", budget]
        assert line["time_gap"] == pytest.approx(0.11 + 0.2 * (budget / longer - budget))
        paired = mean_and_interval([0.0, 0.01, 0.02])[1]  # of the differences, not of the scores
        assert line["time_gap_interval"] == pytest.approx(paired)


def test_time_to_reach_standards_accuracy() -> None:
    """Seconds count like FLOPs: 1.4 times as many at a budget, 1.4 times as many to reach it."""
    rows = [r for r in timed_rows() if r["seed"] == 1]
    (flops, time) = (cost_to_reach(with_times(rows), cost)["tree"] for cost in ("flops", "time"))
    assert flops["flops"] == pytest.approx(0.45)  # 0.01 better for the seed: 0.62 + 0.2 b = 0.71
    assert time["time"] == pytest.approx(1.4 * 0.45) and time["low"] == time["high"]
    assert cost_to_reach(with_times(timed_rows()), "time")["standard"]["time"] == pytest.approx(1)
    spread = cost_to_reach(with_times(timed_rows()), "time")["tree"]
    assert spread["low"] < spread["time"] < spread["high"]  # the seconds differ, too


def test_trials_of_unknown_duration_are_left_out_of_times_alone() -> None:
    rows = timed_rows()
    lost = [
        {**r, "seconds": None if r["seed"] == 2 and r["budget"] == 1.0 else r["seconds"]}
        for r in rows
    ]
    found, kept = statistics_of(lost), statistics_of([r for r in rows if r["seed"] != 2])
    assert found["time_to_reach"]["tree"]["time"] == kept["time_to_reach"]["tree"]["time"]
    assert found["flops_to_reach"] == statistics_of(rows)["flops_to_reach"]
    assert [line["time_gap"] for line in found["lines"]] == [
        line["time_gap"] for line in kept["lines"]
    ]
    never = statistics_of([{**r, "seconds": None} for r in rows])
    assert never["time_to_reach"] == {} and never["flops_to_reach"] == found["flops_to_reach"]


def test_a_budget_that_a_seed_lacks_is_no_other_seeds_budget() -> None:
    rows = [r for r in timed_rows() if (r["protocol"], r["budget"], r["seed"]) != ("tree", 0.4, 0)]
    assert cost_to_reach(with_times(rows))["tree"]["low"] == -inf  # starts at 0.6, and is better
    assert cost_to_reach(with_times(rows))["tree"]["flops"] == -inf
