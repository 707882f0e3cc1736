"""Find which axes of a tensor scale with the width of the model.

Build a model at width w and at width 2w. An axis whose size doubles is a width axis, and is called
scaled. An axis whose size stays the same is called shared. The coupling rules need only three facts
about a tensor: its scaled axes, its input axis, and how matrices are packed into it.
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
    """Describe how one tensor of the wide model is built from its parents' tensors."""

    scaled: tuple[int, ...]
    """Axes whose size doubles when the width doubles."""
    input_axis: int | None = None
    """Axis contracted with the layer's input; None if the tensor is not a layer's weight."""
    packed: tuple[int, ...] = ()
    """Rows, in the narrow model, of each matrix packed along axis 0; empty if not packed."""

    def unpack(self, tensor: Tensor, width: int = 1) -> tuple[Tensor, ...]:
        """Split a tensor of a model `width` times as wide as the narrow one into its matrices."""
        return tensor.split([width * rows for rows in self.packed]) if self.packed else (tensor,)


Layout = Mapping[str, Axes]

# Layers that pack several matrices into one weight, by the layer's name. The value returns how many
# rows each matrix has. The paper's layer type 1 is `qkv`. A layer not listed here is not packed.
PACKED: Mapping[str, Callable[[Any, int], tuple[int, ...]]] = {
    "qkv": lambda _owner, rows: (rows // 3,) * 3,
    "kv": lambda _owner, rows: (rows // 2,) * 2,
    "in_proj": lambda owner, _rows: tuple(owner.in_split),  # parallel blocks: MLP, q, k, v
    "fc1": lambda owner, rows: (rows // 2,) * 2 if isinstance(owner, GluMlp) else (),
}


def layout_of(narrow: nn.Module, wide: nn.Module) -> Layout:
    """Compare a model at width w with the same model at width 2w, tensor by tensor.

    Only names and shapes are compared, so both models may be on the meta device.
    """
    narrow_state, wide_state = narrow.state_dict(), wide.state_dict()
    if lacking := sorted(narrow_state.keys() ^ wide_state.keys()):
        have, lack = ("narrow", "wide") if lacking[0] in narrow_state else ("wide", "narrow")
        raise CouplingError(
            f"the {have} model has a tensor {lacking[0]} that the {lack} model lacks",
            "Parents and wide model must be the same architecture at widths w and 2w.",
        )
    return {
        name: _axes(name, tensor, wide_state[name], narrow) for name, tensor in narrow_state.items()
    }


def inexact_tensors(layout: Layout, model: nn.Module) -> tuple[str, ...]:
    """Return the names of tensors outside the heads that both branches of a coupled model share.

    Averaging weights, or halving the weights of an input, is exact only in the layer that returns
    the logits. A model with such tensors elsewhere (norms over a head's dimension, a stem that does
    not scale) can be coupled, but is then not the mean of its parents.
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
    """Return the module names of the classifiers, as timm's `pretrained_cfg` records them."""
    names = getattr(model, "pretrained_cfg", {}).get("classifier") or ()
    return (names,) if isinstance(names, str) else tuple(names)


def _axes(name: str, narrow: Tensor, wide: Tensor, model: nn.Module) -> Axes:
    path, _, attribute = name.rpartition(".")
    layer = model.get_submodule(path)
    ratios = [w / n for n, w in zip(narrow.shape, wide.shape, strict=False)]
    if narrow.ndim != wide.ndim or not set(ratios) <= {1, 2}:
        raise CouplingError(
            f"{name} is {tuple(narrow.shape)} in the narrow model and {tuple(wide.shape)} in the "
            "wide one: every axis must keep its size or double it",
            "Build the wide model at exactly twice the width of its parents.",
        )
    doubled = tuple(axis for axis, ratio in enumerate(ratios) if ratio == 2)
    is_weight = attribute == "weight" and isinstance(layer, nn.Linear | _ConvNd)
    if is_weight and 1 in doubled and getattr(layer, "groups", 1) > 1:
        raise CouplingError(
            f"{name} is a convolution of {layer.groups} groups, and each group gets wider",
            "Grouped convolutions can be coupled only where the number of groups doubles instead.",
        )
    owner, _, layer_name = path.rpartition(".")
    sizes = PACKED.get(layer_name) if 0 in doubled else None
    return Axes(
        scaled=doubled,
        input_axis=1 if is_weight else None,
        packed=sizes(model.get_submodule(owner), narrow.shape[0]) if sizes else (),
    )
