"""The settings that a finished run can be repeated with, whoever began it and however."""

import re
from collections.abc import Mapping
from math import isclose
from typing import Any, Literal

from rbdc.data.sources import NAMES
from rbdc.errors import PlanError
from rbdc.models import ModelSpec
from rbdc.plan import make_plan

_ASKED = ("seed", "transition", "carry_warmup_epochs", "narrow_lr", "allow_inexact")


def repeat_settings(run: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe file's content: all that decided the result, the data's name where it has one.

    `run` is what `read_run` gives. Every setting is there, defaults included: they may change.
    """
    plan, model = run["about"], run["about"]["model"]
    arguments = {k: v for k, v in model["arguments"].items() if k != "num_classes"}  # the data's
    settings = {
        "model": model["name"],
        "model_kwargs": arguments,
        "width": model["width"],
        **({"data": name} if (name := named_data(run["data"]["name"])) else {}),
        **({"in_memory": True} if "--in-memory" in run["command"].split() else {}),
        **{name: plan[name] for name in ("steps", "ratio", "schedule", "counter")},
        "baseline_epochs": plan["baseline_epochs"],
        "rounding": _rounding(plan),
        **_spending(plan),
        "with_baseline": "standard" in run["result"],
        **{name: run["asked"][name] for name in _ASKED if name in run["asked"]},
    }
    return {**settings, **run["recipe"]}


def named_data(name: str) -> str | None:
    """What `--data` takes for a data set that has a name; None for one known by its path."""
    return name if name in NAMES or hub_name(name) else None


def hub_name(name: str) -> str | None:
    """The name of a data set on the Hugging Face hub."""
    match = re.fullmatch(r"hf:(\w[\w.-]*(?:/\w[\w.-]*)?)", name)
    return match[1] if match else None


def _rounding(plan: Mapping[str, Any]) -> Literal["whole", "none"]:
    return "whole" if all(isinstance(s["epochs"], int) for s in plan["stages"]) else "none"


def _spending(plan: Mapping[str, Any]) -> dict[str, float]:
    """How much to spend, said so that the plan comes out with the very same epochs.

    A plan does not keep which way it was asked for. Said by the target's epochs it may differ by
    what they were rounded by; said in FLOPs, by rounding in the last digit, where a level's epochs
    lie halfway between two whole numbers.
    """
    by_epochs = {"epochs": plan["stages"][-1]["epochs"]}
    return by_epochs if _gives(by_epochs, plan) else {"total_flops": plan["asked_flops"]}


def _gives(way: Mapping[str, float], plan: Mapping[str, Any]) -> bool:
    """Whether a plan made so has this plan's epochs."""
    same: Any = {
        name: plan[name]
        for name in ("steps", "ratio", "schedule", "counter", "baseline_epochs", "images")
    } | dict(way)
    try:
        made = make_plan(ModelSpec(**plan["model"]), rounding=_rounding(plan), **same)
    except PlanError:  # some level would be left without an epoch
        return False
    pairs = zip(made.stages, plan["stages"], strict=True)
    return all(isclose(ours.epochs, theirs["epochs"]) for ours, theirs in pairs)
