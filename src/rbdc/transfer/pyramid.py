"""ViTDet's simple feature pyramid: several scales from the single scale of a transformer.

Li, Mao, Girshick, He: Exploring Plain Vision Transformer Backbones for Object Detection (2022).
"""

from collections import OrderedDict
from collections.abc import Callable
from math import log2
from typing import Literal

from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

STRIDES = (4, 8, 16, 32)
Norm = Literal["layer", "batch", "none"]
# A layer norm is over the channels of each position, as in ViTDet.
_NORMS = {"layer": LayerNorm2d, "batch": nn.BatchNorm2d, "none": nn.Identity}


class SimpleFPN(nn.Module):
    """Feature maps of strides 4, 8, 16, 32 and 64 from one map of stride `stride`.

    Finer maps are made by transposed convolutions that halve the channels, coarser ones by pooling.
    Then each has its own 1 x 1 and 3 x 3 convolution with norms. The maps are named as in
    torchvision's FPN: "0" to "3", and "pool".
    """

    def __init__(
        self, in_channels: int, stride: int, out_channels: int = 256, norm: Norm = "layer"
    ) -> None:
        super().__init__()
        assert log2(stride).is_integer(), "torchvision's heads need powers of two"
        self.out_channels = out_channels
        self.stages = nn.ModuleList(
            _stage(in_channels, round(log2(stride / wanted)), out_channels, norm)
            for wanted in STRIDES
        )
        self.top = LastLevelMaxPool()

    def forward(self, features: Tensor) -> "OrderedDict[str, Tensor]":
        maps = [stage(features) for stage in self.stages]
        maps, names = self.top(maps, maps, [str(number) for number in range(len(maps))])
        return OrderedDict(zip(names, maps, strict=True))


def _stage(channels: int, doublings: int, out_channels: int, norm: Norm) -> nn.Sequential:
    make_norm: Callable[[int], nn.Module] = _NORMS[norm]
    layers: list[nn.Module] = [nn.MaxPool2d(2) for _ in range(-doublings)]
    for left in range(doublings, 0, -1):
        layers.append(nn.ConvTranspose2d(channels, channels // 2, kernel_size=2, stride=2))
        channels //= 2
        if left > 1:  # the convolutions after the last one have norms
            layers += [make_norm(channels), nn.GELU()]
    for size, given in ((1, channels), (3, out_channels)):
        layers += [
            nn.Conv2d(given, out_channels, size, padding=size // 2, bias=norm == "none"),
            make_norm(out_channels),
        ]
    return nn.Sequential(*layers)
