"""Two trained models in, one wide model out."""

import copy
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from rbdc.coupling.checks import check_parents, check_wide, class_names, set_class_names
from rbdc.coupling.layout import layout_of
from rbdc.coupling.rules import couple_tensor
from rbdc.errors import CouplingError, nearest

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
) -> Model:
    """Fill `into`, twice as wide as its parents, with the two of them side by side; return it.

    Off-diagonal blocks are zero, so that the wide model starts as the mean of its parents, or
    random: the wide layer's ordinary initialisation, drawn from `seed`. The diagonal blocks are
    the same either way. Everything is checked before anything is written; the parents are left
    as they are. `into` may be on another device or of another dtype than its parents.
    """
    if off_diagonal not in ("zero", "random"):
        raise CouplingError(
            f"off_diagonal is {off_diagonal!r}, expected 'zero' or 'random'",
            nearest(off_diagonal, ["zero", "random"]) or "Use 'zero' (the paper's choice).",
        )
    check_parents(first, second, allow_identical=allow_identical)
    check_wide(first, into)
    layout = layout_of(first, into)
    background = _fresh_state(into, seed) if off_diagonal == "random" else {}
    left, right = first.state_dict(), second.state_dict()
    for name, target in into.state_dict().items():  # tensor by tensor: no second copy of the model
        target.copy_(couple_tensor(left[name], right[name], layout[name], background.get(name)))
    set_class_names(into, class_names(first) or class_names(second))
    return into


def _fresh_state(model: Any, seed: int) -> dict[str, Tensor]:
    """The tensors of `model` as its architecture initialises them, whatever the device."""
    if not hasattr(model, "init_weights"):
        raise CouplingError(
            f"{type(model).__name__} has no init_weights(): its ordinary initialisation is unknown",
            "Use off_diagonal='zero' for this architecture.",
        )
    fresh = copy.deepcopy(model).cpu()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh.init_weights()
    return cast(dict[str, Tensor], fresh.state_dict())
