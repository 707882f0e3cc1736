"""The optimizer's moments, coupled by the rules of the weights they belong to.

A moment is a mean of gradients, or of their squares, in the shape of its weight. Gradients of a
coupled model lie where its weights do, so block-diagonal moments are concatenated along the same
axes. A head is halved when it is coupled (Eq. 6), and so is its first moment; the mean of squares
then goes with the square of that, a quarter. Off-diagonal blocks have had no gradient: zero.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from rbdc.coupling.layout import Axes, Layout
from rbdc.coupling.rules import couple_tensor
from rbdc.errors import CouplingError

FIRST = frozenset({"exp_avg", "momentum_buffer"})
SECOND = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg"})
COUNTERS = frozenset({"step", "mu_product"})


def check_slots(slots: set[str]) -> None:
    """Refuse an optimizer with state that is not a moment."""
    unknown = slots - FIRST - SECOND - COUNTERS
    if unknown:
        raise CouplingError(
            f"the optimizer keeps {', '.join(sorted(unknown))}, and how that is coupled is unknown",
            "Use the restart transition, or an optimizer such as adamw, sgd or momentum.",
        )


@torch.no_grad()
def couple_moments(
    first: Mapping[str, Tensor], second: Mapping[str, Tensor], layout: Layout
) -> dict[str, Tensor]:
    """The wide model's moments from its parents': tensors named 'parameter/slot'."""
    check_slots({name.rpartition("/")[2] for name in first})
    coupled: dict[str, Tensor] = {}
    for name, left in first.items():
        parameter, _, slot = name.rpartition("/")
        if slot in COUNTERS:
            coupled[name] = torch.maximum(left, second[name])  # siblings have taken equally many
            continue
        axes = layout[parameter]
        coupled[name] = couple_tensor(left, second[name], axes)
        if slot in SECOND and _is_halved(axes):
            coupled[name] /= 2
    return coupled


def _is_halved(axes: Axes) -> bool:
    return len(axes.scaled) == 1 and axes.scaled[0] == axes.input_axis
