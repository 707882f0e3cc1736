"""Parameter groups: layer-wise decay of the learning rate, and weight decay.

timm computes them from `Detector.group_matcher`. A layer's learning rate is `layer_decay` times
that of the next: heads and pyramid have the full rate, the last block 0.7 times, and the patch
embedding 0.7^13 times in a ViT of twelve blocks. Norms, biases and the position embedding have no
weight decay.
"""

from dataclasses import dataclass
from typing import Any

from timm.optim import param_groups_layer_decay
from torch import nn

from rbdc.errors import RecipeError
from rbdc.transfer.detector import Detector


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterGroup:
    """Parameters with the same learning rate and weight decay."""

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    lr_scale: float
    """Factor by which timm's schedules multiply the learning rate."""
    weight_decay: float

    def to_torch(self) -> dict[str, Any]:
        """Return the group for an optimizer. timm's schedules use lr_scale; torch's do not."""
        return {
            "params": list(self.parameters),
            "lr_scale": self.lr_scale,
            "weight_decay": self.weight_decay,
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "names": list(self.names),
            "lr_scale": self.lr_scale,
            "weight_decay": self.weight_decay,
        }


def parameter_groups(
    detector: Detector, *, weight_decay: float = 0.1, layer_decay: float = 0.7
) -> tuple[ParameterGroup, ...]:
    """Return groups from the first layer to the heads, with each trainable parameter in one.

    The layers of a ResNet are its stages; its recipes use a `layer_decay` of 1.0, which is none.
    """
    if not 0 < layer_decay <= 1:
        raise RecipeError(f"layer_decay is {layer_decay:g}", "It must be above 0 and at most 1.")
    names = {id(parameter): name for name, parameter in detector.named_parameters()}
    groups = param_groups_layer_decay(
        detector,
        weight_decay=weight_decay,
        no_weight_decay_list=detector.no_weight_decay(),
        layer_decay=layer_decay,
    )
    return tuple(
        ParameterGroup(
            names=tuple(names[id(parameter)] for parameter in group["params"]),
            parameters=tuple(group["params"]),
            lr_scale=group["lr_scale"],
            weight_decay=group["weight_decay"],
        )
        for group in groups
    )
