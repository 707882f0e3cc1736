"""Build torchvision's Mask R-CNN on a classifier's backbone, and count its FLOPs."""

import copy
from dataclasses import asdict, dataclass
from math import ceil, log2
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops import MultiScaleRoIAlign
from torchvision.ops.poolers import LevelMapper

from rbdc.errors import ModelError
from rbdc.transfer.backbone import CHANNELS, ViTBackbone, backbone_of
from rbdc.transfer.pyramid import STRIDES, Norm
from rbdc.transfer.weights import WeightReport

_BOX, _MASK = 7, 14  # side of the grid that a region is sampled to, in cells
DIVISOR = 64
"""Images are padded to multiples of this, the largest stride. With torchvision's 32, the coarsest
map would have half a cell too much in every other size, and its anchors a wrong distance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DetectorSettings:
    """The architecture of a detector. The defaults are the paper's."""

    min_size: int = 800
    """Pixels of the shorter side, in training and evaluation."""
    max_size: int = 1333
    """Largest number of pixels of the longer side."""
    window: int = 14
    """Side of an attention window in patches, for a ViT; 0: all blocks have global attention."""
    drop_path: float = 0.0
    """Rate of drop path in a ViT."""
    pyramid_norm: Norm = "layer"
    frozen_norms: bool = True
    """Whether the statistics of a ResNet's batch norms are frozen."""
    channels: int = CHANNELS
    """Channels of the pyramid's maps and the mask head; the box head has four times as many."""
    regions: int = 512
    """Proposals per image that the heads are trained on, at most a quarter of them objects."""
    proposals: int = 1000
    """Proposals per image in evaluation; training samples from twice as many."""

    def __post_init__(self) -> None:
        for name in ("channels", "regions", "proposals"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} is {getattr(self, name)}", "Give 1 or more.")
        if not 0 < self.min_size <= self.max_size:
            raise ModelError(
                f"min_size is {self.min_size} and max_size {self.max_size} px",
                "min_size must be positive and at most max_size.",
            )


class Detector(MaskRCNN):  # type: ignore[misc]
    """Mask R-CNN with timm's `group_matcher`, so that timm's layer-wise decay works on it.

    In training it does not resize images, because the data set has already done so. In evaluation
    it resizes them itself, and returns boxes and masks in the pixels of the original images.
    """

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return timm's patterns of parameter names. Parameters that match none are last."""
        del coarse  # a ResNet's layers are its stages in both cases
        vit = isinstance(self.backbone, ViTBackbone)
        stem, blocks = (
            ("pos_embed|patch_embed|norm_pre", r"blocks\.") if vit else ("conv1|bn1", "layer")
        )
        body = r"^backbone\.body\."
        return {"stem": rf"{body}(?:{stem})", "blocks": rf"{body}{blocks}(\d+)"}


def build_detector(
    classifier: nn.Module, *, classes: int, settings: DetectorSettings | None = None
) -> tuple[Detector, WeightReport]:
    """Build a Mask R-CNN for `classes` classes on the classifier's features.

    Labels begin at 1, because 0 is torchvision's background. Images are floats in [0, 1], which the
    detector normalizes as for the classifier.
    """
    if classes < 1:
        raise ModelError(f"a detector cannot have {classes} classes", "Give 1 or more.")
    settings = settings or DetectorSettings()
    record: Any = classifier.pretrained_cfg
    backbone, report = backbone_of(
        classifier,
        window=settings.window,
        drop_path=settings.drop_path,
        norm=settings.pyramid_norm,
        frozen_norms=settings.frozen_norms,
        channels=settings.channels,
    )
    channels, labels = settings.channels, classes + 1
    detector = Detector(
        backbone,
        box_head=TwoMLPHead(channels * _BOX**2, 4 * channels),
        box_predictor=FastRCNNPredictor(4 * channels, labels),
        mask_head=MaskRCNNHeads(channels, (channels,) * 4, 1),
        mask_predictor=MaskRCNNPredictor(channels, channels, labels),
        rpn_post_nms_top_n_train=2 * settings.proposals,
        rpn_post_nms_top_n_test=settings.proposals,
        box_batch_size_per_image=settings.regions,
        min_size=settings.min_size,
        max_size=settings.max_size,
        image_mean=list(record["mean"]),
        image_std=list(record["std"]),
        box_roi_pool=_roi_align(_BOX),
        mask_roi_pool=_roi_align(_MASK),
        size_divisible=DIVISOR,
        _skip_resize=True,  # in training only: see Detector
    )
    return detector, report


def _roi_align(size: int) -> MultiScaleRoIAlign:
    """Return torchvision's RoIAlign with explicit strides.

    By default it infers them from the first batch, and is wrong if padding made a small image much
    larger.
    """
    names = [str(number) for number in range(len(STRIDES))]
    pool = MultiScaleRoIAlign(featmap_names=names, output_size=size, sampling_ratio=2)
    pool.scales = [1 / stride for stride in STRIDES]
    pool.map_levels = LevelMapper(
        int(log2(STRIDES[0])), int(log2(STRIDES[-1])), pool.canonical_scale, pool.canonical_level
    )
    return pool


@dataclass(frozen=True, kw_only=True, slots=True)
class DetectorCost:
    """Parameters of the parts of a detector, and FLOPs of a forward pass of one image.

    The heads are counted with the largest number of regions, so that the result does not depend on
    the weights: `proposals` boxes, and masks for `detections` of them.
    """

    height: int
    width: int
    proposals: int
    detections: int
    parameters: dict[str, int]
    flops: dict[str, int]
    counter: str = "torch"
    """FLOP counter: matrix products, convolutions and attention, but no RoIAlign, norms and NMS."""

    @property
    def total_parameters(self) -> int:
        return sum(self.parameters.values())

    @property
    def total_flops(self) -> int:
        return sum(self.flops.values())

    def to_json(self) -> dict[str, Any]:
        totals = {"total_parameters": self.total_parameters, "total_flops": self.total_flops}
        return asdict(self) | totals


def detector_cost(detector: Detector, height: int = 800, width: int = 1333) -> DetectorCost:
    """Return the cost for an image of this size after padding. Runs on the meta device."""
    empty: Any = copy.deepcopy(detector).to("meta").eval()
    heads, backbone = empty.roi_heads, empty.backbone
    height, width = (DIVISOR * ceil(side / DIVISOR) for side in (height, width))
    cost = DetectorCost(
        height=height,
        width=width,
        proposals=empty.rpn._post_nms_top_n["testing"],
        detections=heads.detections_per_img,
        parameters={},
        flops={},
    )

    def count(part: str, given: Any, *modules: nn.Module) -> Any:
        module = nn.Sequential(*modules)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            result = module(given)
        cost.parameters[part] = sum(parameter.numel() for parameter in module.parameters())
        cost.flops[part] = counter.get_total_flops()
        return result

    with torch.device("meta"):
        image = torch.empty(1, 3, height, width)
        boxes = torch.empty(cost.proposals, backbone.out_channels, _BOX, _BOX)
        masks = torch.empty(cost.detections, backbone.out_channels, _MASK, _MASK)
    maps = count("pyramid", count("backbone", image, backbone.body), backbone.fpn)
    count("rpn", list(maps.values()), empty.rpn.head)
    count("box head", boxes, heads.box_head, heads.box_predictor)
    count("mask head", masks, heads.mask_head, heads.mask_predictor)
    return cost
