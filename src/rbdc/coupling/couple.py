"""Couple two trained models into one wide model."""

import copy
from typing import Any, Literal, TypeVar, cast, get_args

import torch
from torch import Tensor, nn

from rbdc.coupling.checks import check_parents, check_wide, class_names, set_class_names
from rbdc.coupling.layout import inexact_tensors, layout_of
from rbdc.coupling.rules import couple_tensor
from rbdc.errors import CouplingError

OffDiagonal = Literal["zero", "random"]
Model = TypeVar("Model", bound=nn.Module)


@torch.no_grad()
def couple(
    first: nn.Module,
    second: nn.Module,
    *,
    into: Model,
    off_diagonal: OffDiagonal = "zero",
    seed: int = 0,
    allow_identical: bool = False,
    allow_inexact: bool = False,
) -> Model:
    """Fill `into`, twice as wide as its parents, with their weights, and return it.

    With `off_diagonal="zero"` the off-diagonal blocks are zero and the wide model computes the
    mean of its parents' outputs. With "random" they are the wide layer's default initialisation,
    drawn from `seed`. The diagonal blocks are the same in both cases. All checks run before any
    weight is written, and the parents are not changed. `into` may be on another device or have
    another dtype than its parents.

    Some architectures have weights outside the head that do not scale with the width. Both
    branches share such weights, so they can only be averaged, and the wide model is not the mean
    of its parents. They are refused unless `allow_inexact` is set.
    """
    if off_diagonal not in get_args(OffDiagonal):
        raise CouplingError(
            f"off_diagonal is {off_diagonal!r}, expected 'zero' or 'random'",
            "Use 'zero' (the paper's choice).",
        )
    if not 0 <= seed < 2**63:
        raise CouplingError(f"seed is {seed}", "Use a whole number from 0 to 2**63 - 1.")
    check_parents(first, second, allow_identical=allow_identical)
    check_wide(first, into)
    layout = layout_of(first, into)
    shared = inexact_tensors(layout, first)
    if shared and not allow_inexact:
        raise CouplingError(
            f"{shared[0]} is shared by both halves of the wide model and could only be averaged"
            + (f", and so are {len(shared) - 1} more tensors" if shared[1:] else ""),
            "The coupling would not be exact; allow an inexact coupling to use it anyway.",
        )
    background = _fresh_state(into, seed) if off_diagonal == "random" else {}
    target, states = into.state_dict(), (first.state_dict(), second.state_dict())
    for name, axes in layout.items():  # one tensor at a time, to save memory
        left, right = (state[name].to(target[name]) for state in states)
        target[name].copy_(couple_tensor(left, right, axes, background.get(name)))
    set_class_names(into, class_names(first) or class_names(second))
    return into


def _fresh_state(model: Any, seed: int) -> dict[str, Tensor]:
    """Return a state dict with the default initialisation of `model`, drawn on the CPU."""
    if not hasattr(model, "init_weights"):
        raise CouplingError(
            f"{type(model).__name__} has no init_weights(): its default initialisation is unknown",
            "Use off_diagonal='zero' for this architecture.",
        )
    fresh = copy.deepcopy(model).cpu()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed CUDA
        fresh.init_weights()
    return cast(dict[str, Tensor], fresh.state_dict())
