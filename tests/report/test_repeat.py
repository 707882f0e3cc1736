"""The settings to repeat a run with; that they give the same jobs is in test_card."""

import json
from pathlib import Path
from typing import Any

import pytest

import rbdc
from rbdc.report.read import read_run
from rbdc.report.repeat import hub_name, repeat_settings

SPENDING: dict[str, dict[str, Any]] = {
    "epochs that halve to a half": {"epochs": 10},  # 10, 5, 2.5: rounds to 2
    "and FLOPs that are rounded": {"epochs": 110, "images": 1_281_167},  # 27.5 or so: rounds to 28
    "budget": {"budget": 0.7},
    "FLOPs": {"total_flops": 1.2345e16},
    "passes": {"total_epochs": 41.0},
    "the paper's costs": {"budget": 0.7, "costs": "quarter"},
    "not rounded": {"budget": 0.61, "rounding": "none"},
    "algorithm 1": {"total_epochs": 60.0, "schedule": "algorithm-1"},
}


@pytest.mark.parametrize("asked", SPENDING.values(), ids=SPENDING)
def test_however_much_was_asked_for_the_epochs_come_out_again(
    asked: dict[str, Any], finished: Path
) -> None:
    run = read_run(finished)
    spec = rbdc.ModelSpec(name="deit_base_patch16_224")
    more: dict[str, Any] = {"steps": 2, "baseline_epochs": 20.0, "images": 4000, **asked}
    plan = rbdc.make_plan(spec, **more)
    said = repeat_settings({**run, "about": json.loads(json.dumps(plan.to_json()))})
    names = ("steps", "ratio", "schedule", "counter", "baseline_epochs", "rounding", "total_flops",
             "epochs")  # fmt: skip
    again = rbdc.make_plan(spec, images=more["images"], **{n: said[n] for n in names if n in said})
    assert [s.epochs for s in again.stages] == pytest.approx([s.epochs for s in plan.stages])


def test_names_on_the_hub() -> None:
    assert hub_name("hf:a/b-c.d") == "a/b-c.d" and hub_name("hf:mnist") == "mnist"
    assert hub_name("mnist") is None and hub_name("hf:/data/x") is None
