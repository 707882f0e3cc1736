"""The architectures RBDC knows, and what "half as wide" means for each: one entry a family.

An entry names timm's model class and says which constructor arguments carry the width, by reading
them off a model that timm built. Everything else follows: a width is those arguments times a
fraction, a model can be halved while all of them stay whole, and how its tensors are coupled is
found by comparing two widths (`rbdc.coupling.layout`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from timm.models.resnet import ResNet
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from rbdc.errors import ModelError

Widths = Mapping[str, int | tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How an architecture is scaled, and the paper's schedule for it."""

    model_class: type[nn.Module]
    widths: Callable[[Any], Widths]
    """The constructor arguments that carry the width, read off a built model."""
    takes_image_size: bool
    """Whether the constructor has `img_size`: a network with a position embedding does."""
    baseline_epochs: int
    """Epochs of standard training that a budget is relative to (paper, Results)."""
    warmup_epochs: int
    recipe: str
    """The shipped recipe for it."""
    construct: Callable[[Any, Callable[..., nn.Module], dict[str, Any]], nn.Module] | None = None
    """Where timm's constructor alone does not give the scaled model:
    (model at width 1, timm's constructor, scaled arguments) -> the scaled model."""


def _vit_widths(model: Any) -> Widths:
    # The head dimension stays: half the width is half the heads.
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


def _construct_resnet(
    reference: Any, create: Callable[..., nn.Module], arguments: dict[str, Any]
) -> nn.Module:
    if not isinstance(reference.conv1, nn.Conv2d):
        return create(**arguments)
    # timm fixes a plain stem at 64 channels whatever the width. So let it build the deep stem,
    # whose width is an argument, and put the plain convolution in its place.
    model: Any = create(**{**arguments, "stem_type": "deep"})
    model.conv1 = nn.Conv2d(
        reference.conv1.in_channels,
        model.conv1[-1].out_channels,
        kernel_size=7,
        stride=2,
        padding=3,
        bias=False,
    )
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    return model  # type: ignore[no-any-return]


FAMILIES = (
    Family(
        model_class=VisionTransformer,  # DeiT, distilled or not, DeiT-III, ViT
        widths=_vit_widths,
        takes_image_size=True,
        baseline_epochs=300,
        warmup_epochs=5,
        recipe="deit",
    ),
    Family(
        model_class=ResNet,  # with and without the D stem
        widths=_resnet_widths,
        takes_image_size=False,
        baseline_epochs=90,
        warmup_epochs=2,
        recipe="resnet50d",
        construct=_construct_resnet,
    ),
)


def family_of(model: nn.Module) -> Family:
    for family in FAMILIES:
        if isinstance(model, family.model_class):
            return family
    known = " and ".join(family.model_class.__name__ for family in FAMILIES)
    raise ModelError(
        f"{type(model).__name__} is not an architecture whose width RBDC can scale",
        f"Known are timm's {known} models; another family is one entry in rbdc/models/families.py.",
    )
