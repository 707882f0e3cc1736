"""Couple two optimizers of one's own training loop, as the carry transition does in a tree."""

import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from rbdc.coupling import COUNTERS, check_slots, check_whole, couple_moments, structure_of
from rbdc.errors import CouplingError
from rbdc.structure import Structure, unwrapped
from rbdc.training.optimizer import (
    GROUP,
    SLOW,
    check_degrees,
    optimizer_state,
    restore_optimizer,
)

Wide = TypeVar("Wide", bound=Optimizer)
_WHICH = ("first", "second", "wide")


def couple_optimizers(
    first: Optimizer,
    second: Optimizer,
    *,
    into: Wide,
    models: tuple[nn.Module, nn.Module, nn.Module],
    example: Any = None,
    structure: Structure | None = None,
) -> Wide:
    """Fill the optimizer of a coupled model with its parents' moments, and return it.

    `models` are the two parents and the wide model, in the order of the optimizers; DDP and
    `torch.compile` around them do not matter, nor does Accelerate around optimizers. The moments
    are coupled by the rules of the weights and scaled to the gradients of the wide model; step
    counts are the larger of both. Optimizers of `torch.optim` and timm can be coupled if they keep
    step counts and means of gradients only. Parameter groups are matched by the names of their
    parameters. Learning rate, weight decay and all other settings of `into` stay its own. `example`
    and `structure` are those of `rbdc.couple`.
    """
    given: tuple[Optimizer, ...] = (first, second, into)
    optimizers = tuple(map(_unwrapped, given))
    _check_types(optimizers)
    left, right, wide = bare = tuple(unwrapped(model) for model in models)
    for model in bare:
        check_whole(model)
    groups = [
        _groups(which, model, optimizer)
        for which, model, optimizer in zip(_WHICH, bare, optimizers, strict=True)
    ]
    _check_groups(groups)
    states = [_state(*each) for each in zip(_WHICH[:2], (left, right), optimizers, strict=False)]
    _check_same_state(*states)
    _check_degrees(first)
    layout = (structure or structure_of(left, wide, example)).layout
    moments = [{k: v for k, v in state.items() if isinstance(v, Tensor)} for state in states]
    moved = {name: moments[1][name].to(tensor.device) for name, tensor in moments[0].items()}
    tensors = couple_moments(moments[0], moved, layout)
    numbers = {k: max(v, states[1][k]) for k, v in states[0].items() if k not in tensors}
    counted = [_counters(groups[0][names], groups[1][names]) for names in groups[2]]
    restore_optimizer(wide, optimizers[2], tensors, {"numbers": numbers, "groups": counted})
    return into


def _unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside of Accelerate's, which a Trainer has, too."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, Optimizer) else optimizer


def _check_types(optimizers: tuple[Optimizer, ...]) -> None:
    for which, optimizer in zip(_WHICH, optimizers, strict=True):
        if type(optimizer) is not type(optimizers[0]):
            raise CouplingError(
                f"the first optimizer is {type(optimizers[0]).__name__} and the {which} one "
                f"{type(optimizer).__name__}",
                "Their states differ: use one type of optimizer for both parents and the wide "
                "model.",
            )


Groups = dict[frozenset[str], Mapping[str, Any]]
"""Parameter groups by the names of their parameters, in the optimizer's order."""


def _groups(which: str, model: nn.Module, optimizer: Optimizer) -> Groups:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups: Groups = {}
    for group in optimizer.param_groups:
        if any(id(parameter) not in names for parameter in group["params"]):
            raise CouplingError(
                f"the {which} optimizer updates parameters that are not the {which} model's",
                "Give the model that the optimizer was created for; an EMA copy has parameters of "
                "its own.",
            )
        groups[frozenset(names[id(parameter)] for parameter in group["params"])] = group
    return groups


def _check_groups(groups: list[Groups]) -> None:
    for which, found in zip(_WHICH, groups, strict=True):
        if different := found.keys() ^ groups[0].keys():
            name = min(min(names, default="") for names in different)
            raise CouplingError(
                f"the first optimizer has {len(groups[0])} parameter groups and the {which} one "
                f"{len(found)}, and they differ, for example in the group of {name}",
                "Create the three optimizers in the same way: each group must have the same "
                "parameters by name.",
            )


def _state(which: str, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the state by 'parameter/slot', without that of groups; refuse an empty one."""
    tensors, facts = optimizer_state(model, optimizer)
    both = {**tensors, **facts["numbers"]}
    state = {k: v for k, v in both.items() if v is not None and not k.startswith(GROUP)}
    if not state:
        raise CouplingError(
            f"the {which} optimizer has no state: it has taken no step, or keeps no moments",
            "Couple optimizers after the parents' training; without moments there is nothing to "
            "couple.",
        )
    check_slots({name.rpartition("/")[2] for name in state})
    return state


def _check_degrees(optimizer: Optimizer) -> None:
    """Refuse means of something else than gradients, if the optimizer can be made once more."""
    kind: Any = type(optimizer)
    known = inspect.signature(kind.__init__).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in known}

    def make(model: nn.Module) -> Optimizer:
        made: Optimizer = kind(model.parameters(), **{**options, "lr": SLOW})
        return made

    try:
        make(nn.Linear(1, 1))
    except TypeError:  # a class of the user's, with other arguments
        return
    check_degrees(kind.__name__, make)


def _check_same_state(first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    for name in sorted(first.keys() ^ second.keys()):
        parameter, _, slot = name.rpartition("/")
        has, lacks = ("first", "second") if name in first else ("second", "first")
        raise CouplingError(
            f"the {has} optimizer has {slot} of {parameter} and the {lacks} one has not",
            "Train both parents with the same settings, with all parameters or the same ones "
            "frozen.",
        )


def _counters(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the steps that a group counts, as timm's LAMB does: the larger of both parents'."""
    return {name: max(first[name], second[name]) for name in COUNTERS & first.keys()}
