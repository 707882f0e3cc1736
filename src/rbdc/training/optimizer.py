"""Optimizers and schedules of timm, and the optimizer's state by parameter name."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isclose
from typing import Any

import torch
from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import Tensor, nn
from torch.optim import Optimizer

from rbdc.coupling import check_slots, degree_of
from rbdc.errors import CouplingError, RecipeError, nearest
from rbdc.settings import Optimization, Recipe
from rbdc.training.decay import Decay
from rbdc.training.sharding import is_sharded, shard_like
from rbdc.training.task import Task

MOMENTUM = "momentum_buffer"  # all that SGD keeps
SLOW = 1e-9  # learning rate of an optimizer that is only tried
GROUP = "group "  # prefix, in place of a parameter's name, of state that a group shares


def make_optimizer(model: nn.Module, recipe: Recipe) -> Optimizer:
    """Create a classifier's optimizer. Biases and norms have no weight decay if the recipe asks."""
    return timm_optimizer(
        model,
        recipe,
        next(model.parameters()).device,
        fused=not is_sharded(model),  # fused SGD, for one, does not support sharded weights
        filter_bias_and_bn=recipe.filter_bias_and_bn,
    )


def timm_optimizer(
    parameters: nn.Module | Sequence[Mapping[str, Any]],
    recipe: Optimization,
    device: torch.device,
    *,
    fused: bool = True,
    **options: Any,
) -> Optimizer:
    """Create the recipe's optimizer with timm, in torch's fused version if there is one."""
    if recipe.opt not in list_optimizers():
        raise RecipeError(
            f"timm has no optimizer called {recipe.opt!r}",
            nearest(recipe.opt, list_optimizers()) or "timm.optim.list_optimizers() lists them.",
        )
    known = inspect.signature(get_optimizer_info(recipe.opt).opt_class.__init__).parameters
    if "fused" in known and device.type in ("cpu", "cuda"):
        options["fused"] = fused
    for name, value in (("eps", recipe.opt_eps), ("betas", recipe.opt_betas)):
        if value is not None and name not in known:
            raise RecipeError(f"{recipe.opt} has no {name}", f"Leave opt-{name} out.")
        if value is not None:
            options[name] = value
    try:
        optimizer: Optimizer = create_optimizer_v2(
            parameters,
            opt=recipe.opt,
            lr=recipe.learning_rate,
            weight_decay=recipe.weight_decay,
            momentum=recipe.momentum,
            **options,
        )
    except Exception as error:  # a missing optional package, or an unknown option
        raise RecipeError(
            f"timm cannot make the optimizer {recipe.opt}: {error}", "Choose another --opt."
        ) from error
    return optimizer


def make_schedule(optimizer: Optimizer, task: Task, steps_per_epoch: int) -> Scheduler:
    """Create the schedule in updates: `step(update)` sets the learning rate of that update."""
    recipe, total = task.recipe, task.schedule_steps(steps_per_epoch)
    count = partial(task.updates, steps_per_epoch=steps_per_epoch, total=total)
    warmup = min(total, count(task.warmup_epochs))
    if task.anneal and (recipe.decay_start or recipe.sched in ("linear", "1-sqrt")):
        return Decay(
            optimizer,
            shape=recipe.sched,
            total=total,
            warmup=warmup,
            start=round(recipe.decay_start * total),
            warmup_lr=recipe.warmup_lr,
            min_lr=recipe.min_lr,
        )
    schedule, _ = create_scheduler_v2(
        optimizer,
        sched=recipe.sched if task.anneal else "step",
        num_epochs=total,
        warmup_epochs=warmup,
        warmup_lr=recipe.warmup_lr,
        min_lr=recipe.min_lr,
        decay_epochs=max(1, count(recipe.decay_epochs)),
        decay_rate=recipe.decay_rate if task.anneal else 1.0,
    )
    return schedule


def optimizer_state(
    model: nn.Module, optimizer: Optimizer
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the optimizer's state: tensors by 'parameter/slot', and other values for JSON."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        for slot, value in optimizer.state.get(parameter, {}).items():
            target: dict[str, Any] = tensors if isinstance(value, Tensor) else numbers
            target[f"{name}/{slot}"] = value
    groups: list[dict[str, Any]] = []
    for number, group in enumerate(optimizer.param_groups):
        own = {key: value for key, value in group.items() if key != "params"}
        counters = {key: value for key, value in own.items() if isinstance(value, Tensor)}
        tensors |= {f"{GROUP}{number}/{key}": value for key, value in counters.items()}
        groups.append({key: value for key, value in own.items() if key not in counters})
    return tensors, {"numbers": numbers, "groups": groups}


def optimizer_slots(recipe: Optimization) -> set[str]:
    """Return the names of the optimizer's state per parameter, by taking steps.

    Refuse an optimizer that cannot take a step here, or whose state cannot be saved.
    """
    tensors, facts = _tried(recipe.opt, partial(_by_timm, recipe), 1.0)
    return {name.rpartition("/")[2] for name in [*tensors, *facts["numbers"]]}


def _by_timm(recipe: Optimization, model: nn.Module) -> Optimizer:
    return timm_optimizer(model, recipe, torch.device("cpu"))


def check_carried(recipe: Recipe) -> None:
    """Refuse an optimizer whose state cannot be coupled, before any training."""
    check_slots(optimizer_slots(recipe))
    check_degrees(recipe.opt, partial(_by_timm, replace(recipe, lr=SLOW)))


def check_degrees(name: str, make: Callable[[nn.Module], Optimizer]) -> None:
    """Refuse an optimizer whose state does not follow the gradients as its name says.

    A mean of gradients is twice as large for gradients of twice the size, and a mean of their
    squares four times. State that is not (the momentum of RMSprop's updates, AdaMuon's squares of
    directions) does not follow the gradients of the wide model. `make` has the learning rate
    `SLOW`, so that weights stay small, and weight decay adds nothing to the gradients.
    """
    (small, _), (large, _) = (_tried(name, make, size) for size in (1.0, 2.0))
    for key, value in small.items():
        slot = key.rpartition("/")[2]
        grown = float(large[key].norm() / value.norm().clamp_min(1e-30))
        if degree_of(slot) and not isclose(grown, 2 ** degree_of(slot), rel_tol=1e-2):
            raise CouplingError(
                f"the optimizer {name} keeps {slot}, which is no mean of gradients or of their "
                "squares",
                "Start the wide model with a new optimizer (the restart transition), or use one "
                "such as adamw, sgd, lion or muon.",
            )


def _tried(
    name: str, make: Callable[[nn.Module], Optimizer], size: float
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the optimizer's state after a few steps with gradients of this relative size."""
    model = nn.Sequential(nn.Conv2d(4, 8, 2), nn.Flatten(), nn.Linear(8, 8))
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(1e-6 * torch.randn(weight.shape, generator=draws))
    optimizer = make(model)
    try:
        for _ in range(3):
            for weight in model.parameters():  # small ones: some optimizers clip the others
                weight.grad = 1e-3 * size * torch.randn(weight.shape, generator=draws)
            optimizer.step()
        tensors, facts = optimizer_state(model, optimizer)
        json.dumps(facts)
    except Exception as error:  # it needs more than gradients, or its state has other types
        raise RecipeError(
            f"the optimizer {name} cannot be used here: {error}", "Choose another --opt."
        ) from error
    return tensors, facts


def restore_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
) -> None:
    """Restore what `optimizer_state` returned, with each moment sharded as its parameter is."""
    # torch.distributed.checkpoint.set_optimizer_state_dict is no replacement. It takes a step with
    # zero gradients to create the state, which changes the weights under MADGRAD. It also restores
    # contiguous moments, while fused kernels need the memory format of the weights.
    parameters = dict(model.named_parameters())
    state = optimizer.state_dict()
    order = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    for key, value in {**tensors, **facts["numbers"]}.items():
        name, _, slot = key.rpartition("/")
        if name.startswith(GROUP):
            state["param_groups"][int(name.removeprefix(GROUP))][slot] = value
        else:
            state["state"].setdefault(order.index(id(parameters[name])), {})[slot] = value
    for group, saved in zip(state["param_groups"], facts["groups"], strict=True):
        # these depend on the device and do not change the result
        group.update({k: v for k, v in saved.items() if k not in ("fused", "foreach")})
    optimizer.load_state_dict(state)
    if {slot for slots in optimizer.state.values() for slot in slots} == {MOMENTUM}:
        # fused SGD refuses new weights beside old ones; zeros are what it would start with
        for weight in parameters.values():
            optimizer.state[weight].setdefault(MOMENTUM, torch.zeros_like(weight))
    for parameter, slots in optimizer.state.items():
        for slot, value in slots.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                sharded = shard_like(value, parameter)
                slots[slot] = torch.empty_like(parameter, dtype=value.dtype).copy_(sharded)
