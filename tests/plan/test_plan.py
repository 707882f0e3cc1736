"""The planner gives the paper's numbers, and keeps its own promises for any budget."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import rbdc
from rbdc.errors import PlanError, RbdcError
from rbdc.models import ModelSpec
from rbdc.plan import training_flops
from rbdc.plan.schedule import cost_of_unit, data_passes, quartered, relative_epochs
from tests.support import SMALL_RESNET, SMALL_VIT

VIT = ModelSpec(
    name="deit_tiny_patch16_224", arguments=SMALL_VIT | {"embed_dim": 64, "num_heads": 8}
)
RESNET = ModelSpec(name="resnet18d", arguments=SMALL_RESNET)


def mixture_growth(full: float, half: float) -> float:
    """As the paper recounts it: 90 and 74 epochs at half width, 14 at full; against 90 at full."""
    spent = training_flops(half, 90, 1) + training_flops(half, 74, 1) + training_flops(full, 14, 1)
    return spent / training_flops(full, 90, 1)


MIXTURE_GROWTH = mixture_growth(8_705_517_568, 2_194_789_376)


def epochs(plan: rbdc.Plan) -> list[float]:
    """Target first, as the paper lists them."""
    return [stage.epochs for stage in reversed(plan.stages)]


def test_mixture_growths_budget() -> None:
    assert mixture_growth(8.7e9, 2.2e9) == pytest.approx(0.616, abs=5e-4)  # as the paper rounds
    assert pytest.approx(0.615, abs=5e-4) == MIXTURE_GROWTH


@pytest.mark.parametrize(
    ("published", "formula"),
    [
        ([44, 22], [44.28, 22.14]),
        ([42, 21, 10], [42.12, 21.06, 10.53]),
        ([42, 20, 10, 5], [41.60, 20.80, 10.40, 5.20]),
    ],
    ids=["1 step", "2 steps", "3 steps"],
)
def test_the_papers_resnet50d_plans(published: list[int], formula: list[float]) -> None:
    def plan_for(budget: float, rounding: Any) -> rbdc.Plan:
        return rbdc.make_plan(
            "resnet50d",
            steps=len(published) - 1,
            ratio=2,
            budget=budget,
            baseline_epochs=90,
            counter="fvcore",
            rounding=rounding,
        )

    assert epochs(plan_for(0.616, "none")) == pytest.approx(formula, abs=0.01)
    plan = plan_for(MIXTURE_GROWTH, "whole")
    assert epochs(plan) == pytest.approx(published, abs=1)
    assert plan.normalized_flops == pytest.approx(0.61, abs=0.015)
    assert [stage.models for stage in plan.stages][::-1] == [1, 2, 4, 8][: len(published)]


def test_normalized_flops_of_the_papers_own_epochs() -> None:
    flops = [8_705_517_568, 2_194_789_376, 557_902_336, 144_078_080]
    for published in ([44, 22], [42, 21, 10], [42, 20, 10, 5]):
        spent = cost_of_unit((1, 2, 4, 8)[: len(published)], published, flops[: len(published)])
        assert spent / (90 * flops[0]) == pytest.approx(0.61, abs=0.01)


def test_data_passes_of_the_papers_two_step_plan() -> None:
    assert data_passes([1, 2, 4], [42, 21, 10]) == 124


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_simplified_formula(steps: int) -> None:
    plan = rbdc.make_plan(VIT, steps=steps, budget=0.7, costs="quarter", rounding="none")
    expected = 0.7 * 300 / sum((1 / (2 * 2)) ** i for i in range(steps + 1))
    assert plan.target.epochs == pytest.approx(expected)
    exact = [stage.forward_flops for stage in reversed(plan.stages)]
    assert exact != quartered(exact[0], steps)  # what is reported is what is spent


def test_algorithm_1_splits_as_the_pseudocode_does() -> None:
    def pseudocode(given: float, depth: int, ratio: float) -> list[float]:
        if depth == 0:
            return [given]
        return [given * ratio / (ratio + 2), *pseudocode(given / (ratio + 2), depth - 1, ratio)]

    for ratio, steps in ((2, 2), (1, 1), (3.5, 3), (0.5, 0)):
        plan = rbdc.make_plan(
            VIT,
            steps=steps,
            ratio=ratio,
            total_epochs=300,
            schedule="algorithm-1",
            rounding="none",
        )
        assert epochs(plan) == pytest.approx(pseudocode(300, steps, ratio))
        assert plan.data_passes == pytest.approx(300)
    assert relative_epochs("algorithm-1", 2, 2) == [0.5, 0.125, 0.0625]
    assert relative_epochs("appendix", 2, 2) == [1, 0.5, 0.25]


@settings(max_examples=40, deadline=None)
@given(
    model=st.sampled_from([VIT, RESNET]),
    steps=st.integers(0, 2),
    ratio=st.floats(0.2, 8),
    budget=st.floats(0.01, 5),
    baseline=st.floats(1, 1000),
    schedule=st.sampled_from(["appendix", "algorithm-1"]),
    images=st.integers(1, 10**7),
)
def test_a_budget_is_spent_exactly_and_all_ways_to_say_it_agree(
    model: ModelSpec,
    steps: int,
    ratio: float,
    budget: float,
    baseline: float,
    schedule: Any,
    images: int,
) -> None:
    common: dict[str, Any] = {
        "steps": steps,
        "ratio": ratio,
        "baseline_epochs": baseline,
        "schedule": schedule,
        "images": images,
        "rounding": "none",
    }
    plan = rbdc.make_plan(model, budget=budget, **common)
    assert plan.normalized_flops == pytest.approx(budget)
    assert sum(stage.share for stage in plan.stages) == pytest.approx(1)
    for narrow, wide in zip(plan.stages, plan.stages[1:], strict=False):
        if schedule == "appendix" or narrow is not plan.leaves:
            expected = ratio if schedule == "appendix" else ratio + 2
        else:
            expected = ratio
        assert wide.epochs / narrow.epochs == pytest.approx(expected)
        assert (narrow.models, narrow.width) == (2 * wide.models, wide.width / 2)
    ways: list[dict[str, Any]] = [
        {"total_flops": plan.training_flops},
        {"epochs": plan.target.epochs},
        {"total_epochs": plan.data_passes},
    ]
    for way in ways:
        same = rbdc.make_plan(model, **way, **common)
        assert epochs(same) == pytest.approx(epochs(plan))


@settings(max_examples=40, deadline=None)
@given(steps=st.integers(0, 3), ratio=st.floats(0.3, 5), budget=st.floats(0.05, 2))
def test_whole_epochs_are_costed_as_they_will_run(steps: int, ratio: float, budget: float) -> None:
    try:
        plan = rbdc.make_plan(VIT, steps=steps, ratio=ratio, budget=budget, images=1000)
    except PlanError as error:
        assert "rounds to 0" in error.problem
        assume(False)
    spent = sum(
        stage.models * training_flops(stage.forward_flops, stage.epochs, 1000)
        for stage in plan.stages
    )
    assert all(isinstance(stage.epochs, int) for stage in plan.stages)
    assert plan.training_flops == pytest.approx(spent)
    assert plan.normalized_flops == pytest.approx(
        spent / training_flops(plan.target.forward_flops, 300, 1000)
    )


def test_standard_training_is_no_steps() -> None:
    plan = rbdc.make_plan("resnet50d", steps=0, budget=1)
    assert epochs(plan) == [90] and plan.normalized_flops == 1 and not plan.warnings


def test_a_plan_says_what_is_unwise() -> None:
    assert rbdc.make_plan(VIT, steps=1, budget=1).warnings == ()
    short = rbdc.make_plan(VIT, steps=3, epochs=40)
    assert "leaves train for 5 epochs, not more than the 5 epochs of warm-up" in short.warnings[0]
    rounded = rbdc.make_plan(VIT, steps=1, budget=0.7, baseline_epochs=2, warmup_epochs=0)
    assert "rounding to whole epochs spends" in rounded.warnings[0]
    shared = replace(VIT, arguments={**VIT.arguments, "qk_norm": True})
    assert "will not be exact: blocks.0" in rbdc.make_plan(shared, budget=1).warnings[0]
    assert "suboptimal" in rbdc.make_plan(VIT, steps=1, ratio=0.5, epochs=100).warnings[0]


def test_a_plan_goes_through_json() -> None:
    plan = rbdc.make_plan(VIT, steps=2, budget=0.7)
    content = json.loads(json.dumps(plan.to_json()))
    assert content["normalized_flops"] == plan.normalized_flops
    assert content["counter"] == "fvcore+sdpa" and content["schedule"] == "appendix"
    assert [stage["level"] for stage in content["stages"]] == [2, 1, 0]
    assert set(content["stages"][0]) >= {
        "level",
        "width",
        "models",
        "epochs",
        "forward_flops",
        "training_flops",
    }


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"ratio": 0}, "ratio is 0, expected more than 0"),
        ({"ratio": -2}, "ratio is -2"),
        ({"ratio": 1e-200}, "ratio is 1e-200"),
        ({"warmup_epochs": float("nan")}, "warm-up epochs is nan"),
        ({"ratio": float("nan")}, "ratio is nan"),
        ({"budget": 0}, "budget is 0, expected more than 0"),
        ({"budget": float("inf")}, "budget is inf"),
        ({"budget": None}, "was given no budget"),
        ({"epochs": 3}, "given budget, epochs"),
        ({"budget": 0.0001}, "rounds to 0"),
        ({"steps": 4}, "num_heads is 8 at full width and would be 0.5 at width 0.0625"),
        ({"steps": -1}, "steps is -1"),
        ({"images": 0}, "images is 0"),
        ({"images": -3}, "images is -3"),
        ({"images": 1.5}, "images is 1.5"),
        ({"baseline_epochs": 0}, "baseline epochs is 0"),
        ({"schedule": "apendix"}, "Did you mean appendix?"),
        ({"costs": "exactly"}, "Did you mean exact?"),
        ({"rounding": "hole"}, "Did you mean whole?"),
    ],
)
def test_bad_input(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(RbdcError) as caught:
        rbdc.make_plan(VIT, **({"budget": 0.7} | change))
    assert expected in str(caught.value)
