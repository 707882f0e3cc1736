"""Optimizers of one's own loop, coupled with their models."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2
from torch import nn
from torch.optim import SGD, AdamW, Optimizer, RMSprop

import rbdc
from rbdc.coupling import couple_moments, layout_of
from rbdc.errors import CouplingError
from rbdc.training.optimizer import optimizer_state
from tests.support import SMALL, images, parents

NAME = "resnet18d"
Make = Callable[[nn.Module], Optimizer]


def by_timm(opt: str) -> Make:
    """Two groups: biases and norms without weight decay."""
    settings = {"opt": opt, "lr": 1e-3, "weight_decay": 0.05}
    return lambda model: cast(Optimizer, create_optimizer_v2(model, **settings))


def grouped(model: nn.Module) -> Optimizer:
    head = [p for name, p in model.named_parameters() if name.startswith("fc.")]
    body = [p for name, p in model.named_parameters() if not name.startswith("fc.")]
    groups: list[dict[str, Any]] = [{"params": body}, {"params": head, "lr": 0.1}]
    if model.num_features == 32:  # the wide model's are in another order
        groups.reverse()
    return AdamW(groups, weight_decay=0.2)


MAKE: dict[str, Make] = {
    "AdamW": lambda model: AdamW(model.parameters(), amsgrad=True),
    "groups": grouped,
    "SGD": lambda model: SGD(model.parameters(), lr=0.01, momentum=0.9),
    "lamb": by_timm("lamb"),
    "lion": by_timm("lion"),
    "muon": by_timm("muon"),
}


def trained(model: nn.Module, make: Make, steps: int) -> Optimizer:
    optimizer = make(model)
    for step in range(steps):
        optimizer.zero_grad()
        model.train()(images(model) + step).square().mean().backward()
        optimizer.step()
    return optimizer


@pytest.fixture
def models() -> tuple[Any, Any, Any]:
    return (*parents(NAME), rbdc.build(NAME, **SMALL[NAME]))


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_state_is_what_the_carry_transition_makes_of_it(
    models: tuple[Any, Any, Any], make: Make
) -> None:
    first, second, wide = models
    one, two = trained(first, make, 3), trained(second, make, 2)
    rbdc.couple(first, second, into=wide)
    before = [dict(group) for group in make(wide).param_groups]
    found = rbdc.couple_optimizers(one, two, into=make(wide), models=models)
    states = [optimizer_state(*pair)[0] for pair in ((first, one), (second, two))]
    own = [{k: v for k, v in state.items() if not k.startswith("group ")} for state in states]
    expected = couple_moments(own[0], own[1], layout_of(first, wide))
    tensors, _ = optimizer_state(wide, found)
    assert expected.keys() == {name for name in tensors if not name.startswith("group ")}
    assert all(torch.equal(tensors[name], value) for name, value in expected.items())
    for group, was in zip(found.param_groups, before, strict=True):
        assert group["lr"] == was["lr"] and group["weight_decay"] == was["weight_decay"]
        # what timm's LAMB counts in its groups
        assert group.get("step") == one.param_groups[0].get("step")
    wide.train()(images(wide)).square().mean().backward()
    found.step()
    assert all(p.isfinite().all() for p in wide.parameters())


def test_wrapped_models_are_unwrapped(models: tuple[Any, Any, Any]) -> None:
    first, second, wide = models
    one, two = (trained(model, MAKE["AdamW"], 1) for model in (first, second))
    plain = rbdc.couple_optimizers(one, two, into=MAKE["AdamW"](wide), models=models)
    wrapped = (nn.DataParallel(first), cast(nn.Module, torch.compile(second)), wide)
    found = rbdc.couple_optimizers(one, two, into=MAKE["AdamW"](wide), models=wrapped)
    for parameter, slots in plain.state.items():
        assert all(torch.equal(found.state[parameter][k], v) for k, v in slots.items())


def test_optimizers_that_accelerate_wraps(models: tuple[Any, Any, Any]) -> None:
    """As Accelerator.prepare returns them, and a Trainer of transformers has them."""
    from accelerate import Accelerator

    left, right, wide = models
    make = MAKE["AdamW"]
    given = [trained(parent, make, 2) for parent in (left, right)]
    rbdc.couple(left, right, into=wide)
    plain, wrapped = make(wide), make(wide)
    rbdc.couple_optimizers(*given, into=plain, models=models)
    prepare = Accelerator(cpu=True).prepare_optimizer
    first, second, into = (prepare(optimizer) for optimizer in (*given, wrapped))
    assert rbdc.couple_optimizers(first, second, into=into, models=models) is into
    found, expected = (optimizer_state(wide, optimizer)[0] for optimizer in (wrapped, plain))
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def test_what_cannot_be_coupled_is_refused(models: tuple[Any, Any, Any]) -> None:
    first, second, wide = models
    one, two = (trained(model, MAKE["AdamW"], 1) for model in (first, second))
    average = timm.utils.ModelEmaV3(first)

    def refused(match: str, a: Any = one, b: Any = two, w: Any = None, of: Any = models) -> None:
        before = {k: v.clone() for k, v in wide.state_dict().items()}
        into = w or MAKE["AdamW"](wide)
        with pytest.raises(CouplingError, match=match) as error:
            rbdc.couple_optimizers(a, b, into=into, models=of)
        assert len(str(error.value).splitlines()) == 2
        assert not into.state
        assert all(torch.equal(v, before[k]) for k, v in wide.state_dict().items())

    refused("first optimizer is AdamW and the second one SGD", b=trained(second, MAKE["SGD"], 1))
    refused("first optimizer is AdamW and the wide one SGD", w=MAKE["SGD"](wide))
    refused("has 1 parameter groups and the wide one 2", w=grouped(wide))
    refused("second optimizer has no state", b=MAKE["AdamW"](second))
    refused("not the first model's\nGive the model", of=(average, second, wide))
    refused("not the first model's", of=(second, first, wide))
    a, b = (trained(model, by_timm("adan"), 1) for model in (first, second))
    refused("which has no coupling rule", a, b, by_timm("adan")(wide))
    second.fc.requires_grad_(False)
    refused("has exp_avg of fc.bias and the second one", b=trained(second, MAKE["AdamW"], 1))


def test_sharded_models_are_refused(models: tuple[Any, Any, Any], tmp_path: Any) -> None:
    """Each process has a part of the weights only; no advice leads to averaging a head."""
    first, second, wide = models
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        torch.distributed.fsdp.fully_shard(
            first, mesh=torch.distributed.init_device_mesh("cpu", (1,))
        )
        with pytest.raises(CouplingError, match="sharded over processes") as error:
            rbdc.couple(first, second, into=wide)
        assert "inexact" not in str(error.value)
        parallel = [nn.parallel.DistributedDataParallel(model) for model in (second, wide)]
        other = nn.parallel.DistributedDataParallel(parents(NAME)[0])
        rbdc.couple(other, parallel[0], into=parallel[1])
        assert rbdc.verify_coupling(other.module, second, wide, images(wide)).holds
    finally:
        torch.distributed.destroy_process_group()


def test_means_of_updates_are_refused(models: tuple[Any, Any, Any]) -> None:
    def make(model: nn.Module) -> Optimizer:
        return RMSprop(model.parameters(), momentum=0.9)

    one, two = (trained(model, make, 2) for model in models[:2])
    rbdc.couple(models[0], models[1], into=models[2])
    with pytest.raises(CouplingError, match="RMSprop keeps momentum_buffer, which is no mean"):
        rbdc.couple_optimizers(one, two, into=make(models[2]), models=models)
