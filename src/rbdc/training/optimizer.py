"""Optimizer and schedule, by timm; and the optimizer's state by parameter name."""

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import Tensor, nn
from torch.optim import Optimizer

from rbdc.errors import RecipeError, nearest
from rbdc.settings import Optimization, Recipe
from rbdc.training.sharding import is_sharded, shard_like
from rbdc.training.task import Task

GROUP = "group "  # instead of a parameter's name: state that a whole group of them shares


def make_optimizer(model: nn.Module, recipe: Recipe) -> Optimizer:
    """The recipe's optimizer of a classifier, with weight decay where it belongs."""
    return timm_optimizer(
        model,
        recipe,
        next(model.parameters()).device,
        fused=not is_sharded(model),  # SGD's, for one, does not know weights in parts
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
    """timm's optimizer of that name, in torch's fused version where there is one."""
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
    except Exception as error:  # an optional package that is missing, an option it does not take
        raise RecipeError(
            f"timm cannot make the optimizer {recipe.opt}: {error}", "Choose another --opt."
        ) from error
    return optimizer


def make_schedule(optimizer: Optimizer, task: Task, steps_per_epoch: int) -> Scheduler:
    """timm's schedule, with time in updates: `step(update)` sets the rate of that update."""
    recipe, total = task.recipe, task.schedule_steps(steps_per_epoch)
    schedule, _ = create_scheduler_v2(
        optimizer,
        sched=recipe.sched if task.anneal else "step",
        num_epochs=total,
        warmup_epochs=min(total, round(task.warmup_epochs * steps_per_epoch)),
        warmup_lr=recipe.warmup_lr,
        min_lr=recipe.min_lr,
        decay_epochs=max(1, round(recipe.decay_epochs * steps_per_epoch)),
        decay_rate=recipe.decay_rate if task.anneal else 1.0,
    )
    return schedule


def optimizer_state(
    model: nn.Module, optimizer: Optimizer
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's state: tensors by 'parameter/slot', and plain numbers for JSON."""
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
    """What the recipe's optimizer keeps of a parameter, by letting it take a step; an error if it
    cannot, or if that could not be saved."""
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(2, 2))
    optimizer = timm_optimizer(model, recipe, torch.device("cpu"))
    try:
        model(torch.ones(1, 1, 2, 2)).square().sum().backward()
        optimizer.step()
        tensors, facts = optimizer_state(model, optimizer)
        json.dumps(facts)
    except Exception as error:  # needs more than a gradient, or keeps more than tensors
        raise RecipeError(
            f"the optimizer {recipe.opt} cannot be used here: {error}", "Choose another --opt."
        ) from error
    return {name.rpartition("/")[2] for name in [*tensors, *facts["numbers"]]}


def restore_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
) -> None:
    """Put back what `optimizer_state` gave; a tensor like its parameter gets its layout."""
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
        # how it is computed is this machine's affair
        group.update({k: v for k, v in saved.items() if k not in ("fused", "foreach")})
    optimizer.load_state_dict(state)
    for parameter, slots in optimizer.state.items():
        for slot, value in slots.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                spread = shard_like(value, parameter)
                slots[slot] = torch.empty_like(parameter, dtype=value.dtype).copy_(spread)
