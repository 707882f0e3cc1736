"""Hours: the figures of timm's table by hand, budgets in hours, and steps chosen by them."""

import json
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rbdc
from rbdc.errors import PlanError
from rbdc.models import ModelSpec
from rbdc.plan import (
    Growth,
    Hours,
    LevelSpeed,
    Plan,
    Rounding,
    Speeds,
    assumed_speeds,
    check_equal_flops,
    fewest_hours,
    hours_by_steps,
)
from tests.support import SMALL_VIT

SMALL = ModelSpec(name="deit_tiny_patch16_224", arguments=SMALL_VIT)
BASE = ModelSpec(name="deit_base_patch16_224")
RTX_3090 = (390.88, 1053.64, 2290.53)  # DeiT-Base, Small and Tiny in timm's table


def speeds_of(model: ModelSpec, *images_per_second: float, loader: float | None = None) -> Speeds:
    levels = Growth().levels(model, len(images_per_second) - 1)
    return Speeds(
        device="a device",
        levels=tuple(
            LevelSpeed(model=level, images_per_second=speed, source="given")
            for level, speed in zip(levels, images_per_second, strict=True)
        ),
        loader=loader,
    )


@pytest.mark.parametrize(
    ("batches", "loader", "expected"),
    [
        ("separate", None, (0.76, 0.81)),
        ("separate", 2.0, (0.83, 1.05)),
        ("separate", 1.2, (1.02, 1.40)),
        ("shared", None, (0.76, 0.81)),
        ("shared", 2.0, (0.76, 0.81)),
        ("shared", 1.2, (0.79, 0.85)),
    ],
)
def test_the_papers_plans_at_the_speeds_of_an_rtx_3090(
    batches: Any, loader: float | None, expected: tuple[float, float]
) -> None:
    """`loader` is relative to the images that Base consumes. Epochs are not rounded."""
    for steps, ratio in zip((1, 2), expected, strict=True):
        plan = rbdc.make_plan(BASE, steps=steps, budget=0.7, batches=batches, rounding="none")
        speeds = speeds_of(BASE, *RTX_3090, loader=loader and loader * RTX_3090[0])
        assert Hours(plan=plan, speeds=speeds).ratio == pytest.approx(ratio, abs=0.005)


def test_a_level_by_hand() -> None:
    plan = rbdc.make_plan(SMALL, steps=1, epochs=8, images=3600, baseline_epochs=10)
    speeds = replace(speeds_of(SMALL, 2.0, 8.0, loader=3.0), peak_flops_per_second=1e9)
    hours = Hours(plan=plan, speeds=speeds, price=1.5)
    leaves, target = plan.stages
    assert hours.hours(target) == 8 / 2
    assert hours.hours(leaves) == pytest.approx(4 / 3)  # decoding 4 passes; computing takes 1 hour
    assert hours.loader_bound(leaves) and not hours.loader_bound(target)
    assert hours.standard == 5 and hours.total == pytest.approx(16 / 3)
    assert hours.money(hours.total) == pytest.approx(8)
    assert hours.peak_share(target) == pytest.approx(3 * target.forward_flops * 2 / 1e9)
    separate = replace(hours, plan=replace(plan, batches="separate"))
    assert separate.hours(leaves) == pytest.approx(8 / 3)
    content = json.loads(json.dumps(hours.to_json()))
    assert content["total"] == hours.total and content["money"] == hours.money(hours.total)
    assert content["stages"][0]["loader_bound"] and not content["stages"][1]["loader_bound"]
    assert Speeds.from_json(content["speeds"]) == speeds


@given(
    budget=st.floats(0.05, 2),
    narrow=st.floats(0.5, 50),
    loader=st.one_of(st.none(), st.floats(0.5, 50)),
    batches=st.sampled_from(["shared", "separate"]),
)
def test_a_budget_in_hours_is_spent_to_the_hour(
    budget: float, narrow: float, loader: float | None, batches: Any
) -> None:
    speeds = speeds_of(SMALL, 5.0, narrow, loader=loader)
    options: dict[str, Any] = {
        "steps": 1, "rounding": "none", "batches": batches, "speeds": speeds, "images": 500,
    }  # fmt: skip
    by_time = rbdc.make_plan(SMALL, budget_time=budget, **options)
    hours = Hours(plan=by_time, speeds=speeds)
    assert hours.ratio == pytest.approx(budget)
    by_hours = rbdc.make_plan(SMALL, budget_hours=hours.total, **options)
    assert by_hours.target.epochs == pytest.approx(by_time.target.epochs)


def by_steps(speeds: Speeds, **spent: Any) -> tuple[Hours, ...]:
    def plan_of(steps: int, rounding: Rounding) -> Plan:
        return rbdc.make_plan(SMALL, steps=steps, rounding=rounding, images=500, **spent)

    return hours_by_steps(plan_of, speeds, "whole")


def test_steps_are_chosen_by_hours_at_the_same_flops() -> None:
    assert Growth().most_steps(SMALL) == 2
    assert Growth().most_steps(ModelSpec(name="deit_tiny_patch16_224")) == 0  # 3 heads
    flops = [rbdc.forward_flops(level) for level in Growth().levels(SMALL, 2)]
    equal = [1e9 / each for each in flops]  # the same FLOP/s at every width
    for factors, best in (((1, 0.5, 0.5), 0), ((1, 2, 0.1), 1), ((1, 2, 4), 2)):
        speeds = speeds_of(SMALL, *(a * b for a, b in zip(equal, factors, strict=True)))
        found = by_steps(speeds, budget=0.7, baseline_epochs=50)
        assert [each.plan.steps for each in found] == [0, 1, 2]
        assert [each.plan.normalized_flops for each in found] == pytest.approx([0.7] * 3)
        assert fewest_hours(found) == best
        assert found[best].total == min(each.total for each in found)


def test_steps_that_leave_a_level_no_epoch_are_not_chosen() -> None:
    speeds = speeds_of(SMALL, 1, 10, 100)
    found = by_steps(speeds, budget=0.5, baseline_epochs=4)  # leaves of 2 steps: 0.4 epochs
    assert [each.plan.steps for each in found] == [0, 1]
    with pytest.raises(PlanError, match="rounds to 0"):
        by_steps(speeds, budget=0.01, baseline_epochs=4)
    with pytest.raises(PlanError, match="no FLOPs are given"):
        check_equal_flops(None, None)


def test_what_cannot_be_is_refused() -> None:
    speeds = speeds_of(SMALL, 5, 20)
    for name in ("budget_hours", "budget_time"):
        with pytest.raises(PlanError, match="a budget in hours needs the training speed"):
            rbdc.make_plan(SMALL, **{name: 1.0})  # type: ignore[arg-type]
        for value in (0.0, -1.0, nan, inf):
            with pytest.raises(PlanError, match=f"{name.replace('_', ' ')} is {value:g}"):
                rbdc.make_plan(SMALL, speeds=speeds, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="given budget, budget hours"):
        rbdc.make_plan(SMALL, budget=0.5, budget_hours=3, speeds=speeds)
    with pytest.raises(PlanError, match="the speeds are of deit_base"):
        rbdc.make_plan(SMALL, budget_hours=3, speeds=speeds_of(BASE, 5, 20))
    with pytest.raises(PlanError, match=r"the speeds are of .*the plan trains"):
        rbdc.make_plan(SMALL, steps=2, budget_hours=3, speeds=speeds)  # the leaves' is missing
    plan = rbdc.make_plan(SMALL, epochs=4)
    for value in (0.0, -2.1, nan, inf):
        with pytest.raises(PlanError, match=f"price is {value:g}"):
            Hours(plan=plan, speeds=speeds, price=value)
        with pytest.raises(PlanError, match=f"loader's images per second is {value:g}"):
            replace(speeds, loader=value)
        with pytest.raises(PlanError, match=f"images per second is {value:g}"):
            speeds_of(SMALL, value)


def test_a_budget_that_leaves_a_level_less_than_a_step_is_refused() -> None:
    options: dict[str, Any] = {"images": 100, "rounding": "none", "batch_size": 64}
    rbdc.make_plan(SMALL, epochs=1.3, **options)  # 65 images for each leaf
    with pytest.raises(PlanError, match=r"level 1 .* 60 images, less than one step"):
        rbdc.make_plan(SMALL, epochs=1.2, **options)


def test_assumed_speeds_say_so() -> None:
    levels = Growth().levels(SMALL, 1)
    flops = [rbdc.forward_flops(level) for level in levels]
    given = assumed_speeds(levels, flops, [10], flops_per_second=1e9, narrow_efficiency=0.5)
    assert [level.source for level in given.levels] == ["given", "assumed"]
    assert given.images_per_second[1] == pytest.approx(10 * flops[0] / flops[1] / 2)
