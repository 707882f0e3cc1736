"""Optimizer and schedule: timm's, stepped every update."""

from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from rbdc.data import DataSet
from rbdc.errors import CouplingError, RecipeError
from rbdc.growth.mixture_growth import Templates
from rbdc.training import initial_weights
from rbdc.training.optimizer import (
    check_carried,
    make_optimizer,
    make_schedule,
    optimizer_state,
    restore_optimizer,
)
from tests.support import small_data, small_recipe, small_task

DEIT = "deit_tiny_patch16_224"


@pytest.fixture(scope="module")
def data() -> DataSet:
    return small_data()


def rates(
    data: DataSet,
    *,
    anneal: bool = True,
    epochs: float = 10,
    schedule_epochs: float | None = None,
    **settings: Any,
) -> list[float]:
    task = small_task("resnet18d", data, epochs=epochs, lr=1.0, min_lr=0.1, **settings)
    task = replace(task, anneal=anneal, warmup_epochs=2.0, schedule_epochs=schedule_epochs)
    optimizer = make_optimizer(initial_weights(task).model, task.recipe)
    schedule = make_schedule(optimizer, task, 5)
    found = []
    for step in range(task.steps(5)):
        schedule.step(step)
        found.append(max(group["lr"] for group in optimizer.param_groups))
    return found


def test_warm_up_then_cosine_every_update(data: DataSet) -> None:
    found = rates(data, warmup_lr=0.0)
    assert found[:10] == pytest.approx([step / 10 for step in range(10)])
    assert all(left > right for left, right in pairwise(found[10:]))
    assert found[-1] == pytest.approx(0.1, abs=2e-3)
    cosine = 0.1 + 0.9 * (1 + torch.cos(torch.tensor(torch.pi * 25 / 50))) / 2
    assert found[25] == pytest.approx(float(cosine), rel=1e-5)


def test_without_annealing_the_rate_stays_at_its_peak(data: DataSet) -> None:
    found = rates(data, anneal=False)
    assert found[10:] == [1.0] * 40 and found[0] < 0.1


@pytest.mark.parametrize("sched", ["cosine", "linear", "1-sqrt"])
@pytest.mark.parametrize("start", [0.0, 0.6])
def test_a_decay_begins_where_the_recipe_says(data: DataSet, sched: str, start: float) -> None:
    found = rates(data, sched=sched, decay_start=start, warmup_lr=0.0)
    first = max(10, round(start * 50))
    assert found[:10] == pytest.approx([step / 10 for step in range(10)])
    assert found[10 : first + 1] == pytest.approx([1.0] * (first - 9), abs=0.1)
    assert all(left > right for left, right in pairwise(found[first:]))
    half = found[(first + 50) // 2]
    if start or sched != "cosine":  # timm's cosine begins with the warm-up
        expected = {"cosine": 0.5, "linear": 0.5, "1-sqrt": 1 - 0.5**0.5}[sched]
        assert half == pytest.approx(0.1 + 0.9 * expected, abs=0.01)


def test_a_decay_start_needs_a_schedule_that_has_one() -> None:
    with pytest.raises(RecipeError, match="sched step has no decay-start"):
        small_recipe(sched="step", decay_start=0.5)


@pytest.mark.parametrize("sched", ["cosine", "linear", "poly", "step"])
@pytest.mark.parametrize("epochs", [1.4, 7.2])
def test_a_truncated_schedule_is_the_long_ones_beginning(
    sched: str, epochs: float, data: DataSet
) -> None:
    long = rates(data, sched=sched, decay_epochs=3.0)
    short = rates(data, sched=sched, decay_epochs=3.0, epochs=epochs, schedule_epochs=10)
    assert short == long[: round(5 * epochs)]


def test_steps(data: DataSet) -> None:
    found = rates(data, sched="step", decay_epochs=4.0, decay_rate=0.5)
    assert found[15] == 1.0 and found[20] == 0.5 and found[40] == 0.25


def test_no_decay_on_norms_biases_tokens_and_positions(data: DataSet) -> None:
    model = initial_weights(small_task(DEIT, data)).model
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for decayed in (True, False):
        recipe = small_recipe(weight_decay=0.05, filter_bias_and_bn=decayed)
        groups = make_optimizer(model, recipe).param_groups
        free = {names[id(p)] for g in groups if not g["weight_decay"] for p in g["params"]}
        expected = {name for name in names.values() if name.endswith("bias") or "norm" in name}
        assert free == {"cls_token", "pos_embed"} | (expected if decayed else set())


@pytest.mark.parametrize("name", ["resnet18d", DEIT])
@pytest.mark.parametrize("spared", [True, False])
def test_templates_decay_and_coefficients_never_do(name: str, spared: bool, data: DataSet) -> None:
    task = replace(small_task(name, data), parametrization=Templates(count=3))
    model = initial_weights(task).model
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = make_optimizer(model, small_recipe(filter_bias_and_bn=spared)).param_groups
    decayed = {names[id(p)]: bool(g["weight_decay"]) for g in groups for p in g["params"]}
    assert decayed.keys() == set(names.values())
    found = {True: 0, False: 0}
    for part, is_decayed in decayed.items():
        if ".parametrizations." in part:
            assert is_decayed == (".original" in part), part
            found[is_decayed] += 1
    assert found[True] == 3 * found[False] > 0
    assert name != DEIT or not (decayed["cls_token"] or decayed["pos_embed"])


@pytest.mark.parametrize(("opt", "fused"), [("adamw", True), ("sgd", True), ("lamb", None)])
def test_fused_where_torch_has_it(opt: str, fused: bool | None, data: DataSet) -> None:
    model = initial_weights(small_task(DEIT, data)).model
    assert make_optimizer(model, small_recipe(opt=opt)).defaults.get("fused") is fused


def test_settings_reach_the_optimizer(data: DataSet) -> None:
    model = initial_weights(small_task(DEIT, data)).model
    optimizer = make_optimizer(model, small_recipe(opt_eps=1e-6, opt_betas=(0.8, 0.9)))
    assert optimizer.defaults["eps"] == 1e-6 and optimizer.defaults["betas"] == (0.8, 0.9)
    sgd = make_optimizer(model, small_recipe(opt="momentum", momentum=0.7)).defaults
    assert sgd["momentum"] == 0.7 and not sgd["nesterov"]


def test_an_unknown_optimizer_has_a_neighbour(data: DataSet) -> None:
    model = initial_weights(small_task(DEIT, data)).model
    with pytest.raises(RecipeError, match=r"Did you mean .*adamw"):
        make_optimizer(model, small_recipe(opt="adamww"))
    with pytest.raises(RecipeError, match="sgd has no betas"):
        make_optimizer(model, small_recipe(opt="sgd", opt_betas=(0.9, 0.9)))


@pytest.mark.parametrize("opt", ["adamw", "sgd", "lion", "muon", "lamb", "nadamw"])
def test_state_that_follows_the_gradients_can_be_carried(opt: str) -> None:
    check_carried(small_recipe(opt=opt))


@pytest.mark.parametrize(
    ("opt", "slot"),
    [("rmsprop", "momentum_buffer"), ("lars", "momentum_buffer"), ("adopt", "exp_avg"),
     ("adamuon", "exp_avg_sq"), ("adafactor", "RMS"), ("adagrad", "sum")],
)  # fmt: skip
def test_state_of_another_kind_is_refused_whatever_its_name(opt: str, slot: str) -> None:
    """RMSprop's momentum is of updates, and AdaMuon's squares are of directions."""
    with pytest.raises(CouplingError, match=f"keeps {slot}"):
        check_carried(small_recipe(opt=opt))


@pytest.mark.parametrize("opt", ["adamw", "sgd", "lion", "muon"])
def test_weights_without_a_past_start_as_in_a_new_optimizer(opt: str, data: DataSet) -> None:
    """Blocks that were inserted have no state; their first step is that of any new weight."""
    recipe, model = small_recipe(opt=opt), initial_weights(small_task(DEIT, data)).model
    torch.manual_seed(0)
    gradients = {name: torch.randn_like(weight) for name, weight in model.named_parameters()}

    def step(own: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for name, weight in own.named_parameters():
            weight.grad = gradients[name].clone()
        optimizer.step()

    past = deepcopy(model)
    trained = make_optimizer(past, recipe)
    step(past, trained)
    tensors, facts = optimizer_state(past, trained)
    new = "head.weight"
    old = {key: value for key, value in tensors.items() if not key.startswith(f"{new}/")}
    fresh, grown = deepcopy(model), deepcopy(model)
    optimizer = make_optimizer(grown, recipe)
    restore_optimizer(grown, optimizer, old, facts)
    step(grown, optimizer)
    step(fresh, make_optimizer(fresh, recipe))
    expected, found = dict(fresh.named_parameters()), dict(grown.named_parameters())
    assert torch.equal(found[new], expected[new])
    assert not torch.equal(found["head.bias"], expected["head.bias"]) or opt == "lion"
