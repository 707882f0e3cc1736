"""The settings to repeat a run with; that they give the same jobs is in test_card."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import rbdc
from rbdc.report.card import hub_name, repeat_settings
from rbdc.report.read import read_run
from rbdc.settings import PLAN, Request, split_settings

SPENDING: dict[str, dict[str, Any]] = {
    "epochs that halve to a half": {"epochs": 10.0},  # 10, 5, 2.5: rounds to 2
    "and FLOPs that are rounded": {
        "epochs": 110.0,
        "images": 1_281_167,
    },  # 27.5: rounds to 28
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
    spec = rbdc.ModelSpec(name="deit_base_patch16_224")
    request = Request(
        steps=2, baseline_epochs=20.0, **{k: v for k, v in asked.items() if k in PLAN}
    )
    images = asked.get("images", 4000)
    plan = rbdc.make_plan(spec, images=images, **{name: getattr(request, name) for name in PLAN})
    asked_for = json.loads(json.dumps(request.to_json()))
    said = repeat_settings({**read_run(finished), "request": asked_for})
    written, _ = split_settings(yaml.safe_load(yaml.safe_dump(said)))
    again = rbdc.make_plan(spec, images=images, **{name: getattr(written, name) for name in PLAN})
    assert [stage.epochs for stage in again.stages] == [stage.epochs for stage in plan.stages]


def test_names_on_the_hub() -> None:
    assert hub_name("hf:a/b-c.d") == "a/b-c.d" and hub_name("hf:mnist") == "mnist"
    assert hub_name("mnist") is None and hub_name("hf:/data/x") is None
