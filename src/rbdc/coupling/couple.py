"""Couple two trained models into one wide model."""

import copy
from typing import Any, Literal, TypeVar, cast, get_args

import torch
from torch import Tensor, nn

from rbdc.coupling.checks import check_parents, check_wide, class_names, set_class_names
from rbdc.coupling.layout import check_conflicts, structure_of
from rbdc.coupling.rules import couple_tensor
from rbdc.errors import CouplingError
from rbdc.structure import Structure, unwrapped

OffDiagonal = Literal["zero", "random"]
Model = TypeVar("Model", bound=nn.Module)


@torch.no_grad()
def couple(
    first: nn.Module,
    second: nn.Module,
    *,
    into: Model,
    example: Any = None,
    structure: Structure | None = None,
    off_diagonal: OffDiagonal = "zero",
    seed: int = 0,
    allow_identical: bool = False,
    allow_inexact: bool = False,
) -> Model:
    """Fill `into`, twice as wide as its parents, with their weights, and return it.

    The models may be of any class. How their tensors couple is found by running them on `example`
    (a tensor, or a tuple or dict of arguments; default: an image for a timm model), unless their
    `structure` is already known.

    With `off_diagonal="zero"` the off-diagonal blocks are zero and the wide model computes the
    mean of its parents' outputs. With "random" they are the wide layer's default initialisation,
    drawn from `seed`. The diagonal blocks are the same in both cases. All checks run before any
    weight is written, and the parents are not changed. `into` may be on another device or have
    another dtype than its parents.

    Some architectures have weights outside the head that both branches share, or operations that
    mix the branches, so that the wide model is not the mean of its parents. They are refused
    unless `allow_inexact` is set. A model with tensors whose layout cannot be found is always
    refused.
    """
    if off_diagonal not in get_args(OffDiagonal):
        raise CouplingError(
            f"off_diagonal is {off_diagonal!r}, expected 'zero' or 'random'",
            "Use 'zero' (the paper's choice).",
        )
    if not 0 <= seed < 2**63:
        raise CouplingError(f"seed is {seed}", "Use a whole number from 0 to 2**63 - 1.")
    first, second, wide = unwrapped(first), unwrapped(second), unwrapped(into)
    check_parents(first, second, allow_identical=allow_identical)
    check_wide(first, wide)
    structure = structure or structure_of(first, wide, example)
    check_conflicts(structure)
    if not allow_inexact:
        check_exact(structure)
    background = _fresh_state(wide, seed) if off_diagonal == "random" else {}
    target, states = wide.state_dict(), (first.state_dict(), second.state_dict())
    for name, axes in structure.layout.items():  # one tensor at a time, to save memory
        left, right = (state[name].to(target[name]) for state in states)
        target[name].copy_(couple_tensor(left, right, axes, background.get(name)))
    set_class_names(wide, class_names(first) or class_names(second))
    return into


def check_exact(structure: Structure) -> None:
    """Refuse a structure whose coupling is not the mean of the parents."""
    for what, cause in structure.inexact.items():
        more = len(structure.inexact) - 1
        raise CouplingError(
            f"the coupling would not be exact, because of {what}: {cause}"
            + (f"; and {more} more" if more else ""),
            "Choose an architecture that couples exactly (rbdc explain MODEL). allow_inexact would "
            "average what is named here, and the wide model would not be its parents' mean.",
        )


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
