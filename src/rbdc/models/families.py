"""The epochs and recipes of architectures, and how to scale those that need to be told.

An entry names a model class and the constructor arguments that define the width, with their values
read from a built model. A model at a width has these arguments multiplied by a fraction, and can be
halved as long as all of them are whole numbers. A model without an entry is scaled by `narrow`.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from timm.models.resnet import ResNet
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from rbdc.errors import ModelError
from rbdc.models.hugging_face import depths_of, widths_of

Widths = Mapping[str, int | tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How an architecture is scaled, and the paper's epochs for it."""

    model_class: type[nn.Module]
    widths: Callable[[Any], Widths] | None
    """Return the constructor arguments that define the width, read from a built model.

    None if they are found by trying (`rbdc.models.narrow`).
    """
    depths: Callable[[Any], Widths] | None
    """Return the constructor argument that defines the depth, read from a built model.

    None if it is found by its name.
    """
    takes_image_size: bool
    """Whether the constructor takes `img_size`, as models with position embeddings do."""
    baseline_epochs: int
    """Epochs of standard training, to which a budget is relative (paper, Results)."""
    warmup_epochs: int
    """Epochs of learning rate warm-up."""
    recipe: str
    """Name of the included recipe."""
    grow: tuple[str, ...] = ("width",)
    """What `rbdc train` grows such a model in by default (docs/train.md has the evidence)."""
    ratio: float = 2.0
    """Epochs of a wide model over its parents' by default, likewise."""
    construct: Callable[[Any, Callable[..., nn.Module], dict[str, Any]], nn.Module] | None = None
    """Build the scaled model from (model at width 1, timm's constructor, scaled arguments).

    None if timm's constructor alone can build it.
    """


def _vit_widths(model: Any) -> Widths:
    # The dimension of a head does not scale: half the width means half the heads.
    heads = [m.num_heads for m in model.blocks.modules() if hasattr(m, "num_heads")]
    if not heads:
        raise ModelError("a transformer without blocks has no heads", "Give it a depth above 0.")
    return {"embed_dim": model.embed_dim, "num_heads": heads[0]}


def _resnet_widths(model: Any) -> Widths:
    channels = tuple(
        info["num_chs"] // getattr(model, info["module"])[0].expansion
        for info in model.feature_info[1:]
    )
    return {"channels": channels, "stem_width": model.feature_info[0]["num_chs"] // 2}


def _resnet_depths(model: Any) -> Widths:
    return {"layers": tuple(len(getattr(model, info["module"])) for info in model.feature_info[1:])}


def _construct_resnet(
    reference: Any, create: Callable[..., nn.Module], arguments: dict[str, Any]
) -> nn.Module:
    if not isinstance(reference.conv1, nn.Conv2d):
        return create(**arguments)
    # timm's standard stem always has 64 channels. So build the deep stem, whose width is an
    # argument, and replace it by a single convolution of that width.
    model: Any = create(**{**arguments, "stem_type": "deep"})
    channels = (reference.conv1.in_channels, model.conv1[-1].out_channels)
    model.conv1 = nn.Conv2d(*channels, kernel_size=7, stride=2, padding=3, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    return model  # type: ignore[no-any-return]


FAMILIES = [
    Family(
        model_class=VisionTransformer,  # DeiT, with or without distillation token, DeiT-III, ViT
        widths=_vit_widths,
        depths=lambda model: {"depth": len(model.blocks)},
        takes_image_size=True,
        baseline_epochs=300,
        warmup_epochs=5,
        recipe="deit",
        grow=("width", "resolution"),
        ratio=1.0,
    ),
    Family(
        model_class=ResNet,  # with and without the D stem
        widths=_resnet_widths,
        depths=_resnet_depths,
        takes_image_size=False,
        baseline_epochs=90,
        warmup_epochs=2,
        recipe="resnet50d",
        grow=("width", "depth", "resolution"),
        ratio=1.0,
        construct=_construct_resnet,
    ),
]


def register_family(family: Family) -> None:
    """Add a family of your own. It comes before all others, so it can also replace one."""
    FAMILIES.insert(0, family)


LANGUAGE = Family(
    model_class=nn.Module,  # the causal language models of transformers
    widths=widths_of,
    depths=depths_of,
    takes_image_size=False,
    baseline_epochs=1,
    warmup_epochs=0,
    recipe="gpt-demo",
)


def family_of(model: nn.Module) -> Family:
    """Return the family of a model; one without an entry trains as a DeiT does."""
    model_class: Any = type(model)
    if model_class.__module__.startswith("transformers."):
        return _vision(model) if hasattr(model, "num_classes") else LANGUAGE
    for family in FAMILIES:
        if isinstance(model, family.model_class):
            return family
    return _other(model_class)


def _vision(model: Any) -> Family:
    model_class: Any = type(model)
    sized = hasattr(model.config, "image_size")
    return replace(_other(model_class), widths=widths_of, depths=depths_of, takes_image_size=sized)


@cache
def _other(model_class: Any) -> Family:
    return Family(
        model_class=model_class,
        widths=None,
        depths=None,
        takes_image_size="img_size" in inspect.signature(model_class).parameters,
        baseline_epochs=300,
        warmup_epochs=5,
        recipe="deit",
    )
