"""Which axes of a tensor are wide.

Build a model at width w and at width 2w: an axis whose size doubles is wide, one that stays is
shared. That, the axis on which a layer takes its input, and how matrices are packed into one
tensor is all that the coupling rules need to know of an architecture.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from timm.layers import GluMlp
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from rbdc.errors import CouplingError


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """How one tensor of the wide model is made of its parents' tensors."""

    scaled: tuple[int, ...]
    """The axes whose size doubles."""
    input_axis: int | None = None
    """The axis that meets the layer's input; None where the tensor is not a layer's weight."""
    packed: tuple[int, ...] = ()
    """Sizes, in the narrow model, of the matrices packed one after the other along axis 0."""


Layout = Mapping[str, Axes]

# Layers that pack several matrices into one weight, by what the packing layer is called: how many
# rows each matrix has. The paper's layer type 1 is `qkv`. A layer not listed here is not packed.
PACKED: Mapping[str, Callable[[Any, int], tuple[int, ...]]] = {
    "qkv": lambda _owner, rows: (rows // 3,) * 3,
    "kv": lambda _owner, rows: (rows // 2,) * 2,
    "in_proj": lambda owner, _rows: tuple(owner.in_split),  # parallel blocks: MLP, q, k, v
    "fc1": lambda owner, rows: (rows // 2,) * 2 if isinstance(owner, GluMlp) else (),
}


def layout_of(narrow: nn.Module, wide: nn.Module) -> Layout:
    """Compare a model at width w with the same model at width 2w, tensor by tensor.

    Only names and shapes are looked at, so both may live on the meta device.
    """
    narrow_state, wide_state = narrow.state_dict(), wide.state_dict()
    _check_names(narrow_state, wide_state)
    return {
        name: _axes(name, tensor, wide_state[name], narrow) for name, tensor in narrow_state.items()
    }


def inexact_tensors(layout: Layout, model: nn.Module) -> tuple[str, ...]:
    """Tensors that a coupled model's two branches share although they are not a head's.

    Averaging, or halving an input, is exact where logits come out and nowhere else. A model with
    such tensors (norms over a head's dimension, a stem that does not scale) can be coupled, but is
    then not the mean of its parents.
    """
    heads, state = heads_of(model), model.state_dict()
    return tuple(
        name
        for name, axes in layout.items()
        if axes.scaled in ((), (axes.input_axis,))
        and state[name].is_floating_point()
        and name.rpartition(".")[0] not in heads
    )


def heads_of(model: nn.Module) -> tuple[str, ...]:
    """Where logits come out: timm's record of a model names its classifier, or two of them."""
    names = getattr(model, "pretrained_cfg", {}).get("classifier") or ()
    return (names,) if isinstance(names, str) else tuple(names)


def _axes(name: str, narrow: Tensor, wide: Tensor, model: nn.Module) -> Axes:
    path, _, attribute = name.rpartition(".")
    layer = model.get_submodule(path)
    ratios = [w / n for n, w in zip(narrow.shape, wide.shape, strict=False)]
    if narrow.ndim != wide.ndim or not set(ratios) <= {1, 2}:
        raise CouplingError(
            f"{name} is {tuple(narrow.shape)} in the narrow model and {tuple(wide.shape)} in the "
            "wide one: every axis must stay or double",
            "Build the wide model at exactly twice the width of its parents.",
        )
    doubled = tuple(axis for axis, ratio in enumerate(ratios) if ratio == 2)
    is_weight = attribute == "weight" and isinstance(layer, nn.Linear | _ConvNd)
    if is_weight and 1 in doubled and getattr(layer, "groups", 1) > 1:
        raise CouplingError(
            f"{name} is a convolution of {layer.groups} groups whose groups widen",
            "Grouped convolutions can be coupled only where the number of groups doubles instead.",
        )
    return Axes(
        scaled=doubled,
        input_axis=1 if is_weight else None,
        packed=_packed(model, path, narrow) if 0 in doubled else (),
    )


def _packed(model: nn.Module, path: str, tensor: Tensor) -> tuple[int, ...]:
    owner, _, layer = path.rpartition(".")
    sizes = PACKED.get(layer)
    return sizes(model.get_submodule(owner), tensor.shape[0]) if sizes else ()


def _check_names(narrow: Mapping[str, Tensor], wide: Mapping[str, Tensor]) -> None:
    for here, there, have, lack in (
        (narrow, wide, "narrow", "wide"),
        (wide, narrow, "wide", "narrow"),
    ):
        for name in here:
            if name not in there:
                raise CouplingError(
                    f"the {have} model has a tensor {name} of shape {tuple(here[name].shape)} "
                    f"that the {lack} model lacks",
                    "Parents and wide model must be the same architecture at widths w and 2w.",
                )
