"""A wrong call of a public function ends with two lines, and results print as tables."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import rbdc
from rbdc.errors import RbdcError
from tests.support import TINY

SMALL = TINY["resnet18d"]
PROTOCOLS: Any = "rbdc:1"


def model() -> torch.nn.Module:
    return rbdc.build("resnet18d", **SMALL)


WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "a name for a model": (
        lambda: rbdc.couple("a", "b", into=model()),  # type: ignore[arg-type]
        "first is 'a', expected an nn.Module",
    ),
    "a keyword by position": (
        lambda: rbdc.couple(model(), model(), model()),  # type: ignore[call-arg]
        "too many positional",
    ),
    "no model": (
        lambda: rbdc.couple(model(), model(), into=None),  # type: ignore[type-var]
        "into is None",
    ),
    "text for a number": (
        lambda: rbdc.make_plan("resnet18d", steps=1, budget="0.7"),  # type: ignore[arg-type]
        "budget is '0.7', expected a number or None",
    ),
    "a truth for a number": (
        lambda: rbdc.make_plan("resnet18d", steps=True, budget=0.7),
        "steps is True, expected a whole number",
    ),
    "a number for a folder": (
        lambda: rbdc.load(3),  # type: ignore[arg-type]
        "path is 3, expected text or a path",
    ),
    "two models of three": (
        lambda: rbdc.couple_optimizers(
            *(torch.optim.SGD(model().parameters()) for _ in range(2)),
            into=torch.optim.SGD(model().parameters()),
            models=(model(), model()),  # type: ignore[arg-type]
        ),
        "models is a tuple of 2, expected a tuple of 3",
    ),
    "a device for a machine": (
        lambda: rbdc.train("runs/x", machine="cpu"),  # type: ignore[arg-type]
        "machine is 'cpu', expected a Machine or None",
    ),
    "one protocol as text": (
        lambda: rbdc.ComparisonSpec(protocols=PROTOCOLS),
        "protocols of ComparisonSpec is 'rbdc:1', expected a tuple of texts",
    ),
    "a machine elsewhere": (
        lambda: rbdc.Where(machine="cpu"),  # type: ignore[arg-type]
        "machine of Where is 'cpu'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_types_end_with_two_lines(case: str) -> None:
    call, problem = WRONG[case]
    with pytest.raises(RbdcError, match=problem) as caught:
        call()
    assert isinstance(caught.value, TypeError | ValueError)
    assert len(str(caught.value).splitlines()) == 2 and "rbdc." in caught.value.remedy


def test_lists_are_taken_for_tuples() -> None:
    assert rbdc.ComparisonSpec(budgets=[0.5]).budgets == (0.5,)  # type: ignore[arg-type]


def test_public_functions_can_be_sent_to_other_processes() -> None:
    for name in rbdc.__all__:
        value = getattr(rbdc, name)
        assert pickle.loads(pickle.dumps(value)) is value, name


def test_a_plan_is_its_stages_and_prints_as_a_table() -> None:
    spec = rbdc.ModelSpec(name="deit_tiny_patch16_224", arguments=TINY["deit_tiny_patch16_224"])
    plan = rbdc.make_plan(spec, steps=1, budget=0.7, images=100)
    assert list(plan) == list(plan.stages) and len(plan) == 2
    title, *rows = [line.split() for line in repr(plan).splitlines() if line.strip()]
    assert title == ["Plan", "of", "deit_tiny_patch16_224"]
    assert next(row[:3] for row in rows if row[0].isdigit()) == ["2", "0.5", "random"]
    html = plan._repr_html_()
    assert html.startswith("<pre") and " of standard training" in html
