"""Couple the optimizer's moments by the rules of the weights they belong to.

A moment is a running mean of gradients, or of their squares, in the shape of its weight, so it is
coupled along the same axes. A head's weight is halved when it is coupled (Eq. 6). Its first moment
is halved too, and its second moment, a mean of squares, is quartered. The moments of off-diagonal
blocks are zero, because these blocks have had no gradient.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from rbdc.coupling.layout import Layout
from rbdc.coupling.rules import couple_tensor
from rbdc.errors import CouplingError

FIRST = frozenset({"exp_avg", "momentum_buffer"})
SECOND = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg"})
COUNTERS = frozenset({"step", "mu_product"})


def check_slots(slots: set[str]) -> None:
    """Refuse optimizer state that is neither a moment nor a step counter."""
    unknown = slots - FIRST - SECOND - COUNTERS
    if unknown:
        raise CouplingError(
            f"the optimizer keeps {', '.join(sorted(unknown))}, which has no coupling rule",
            "Use the restart transition, or an optimizer such as adamw, sgd or momentum.",
        )


@torch.no_grad()
def couple_moments(
    first: Mapping[str, Tensor], second: Mapping[str, Tensor], layout: Layout
) -> dict[str, Tensor]:
    """Return the wide model's moments, by 'parameter/slot', from those of its parents."""
    check_slots({name.rpartition("/")[2] for name in first})
    coupled: dict[str, Tensor] = {}
    for name, left in first.items():
        parameter, _, slot = name.rpartition("/")
        if slot in COUNTERS:
            coupled[name] = torch.maximum(left, second[name])  # siblings take equally many steps
            continue
        axes = layout[parameter]
        coupled[name] = couple_tensor(left, second[name], axes)
        if slot in SECOND and axes.scaled == (axes.input_axis,):  # a head, whose weight is halved
            coupled[name] /= 2
    return coupled
