"""Build torchvision's Mask R-CNN on a classifier's backbone, and count its FLOPs."""

import copy
from dataclasses import dataclass
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
from rbdc.settings.detection import DetectionRecipe
from rbdc.transfer.backbone import ViTBackbone, backbone_of
from rbdc.transfer.pyramid import STRIDES
from rbdc.transfer.weights import WeightReport

_BOX, _MASK = 7, 14  # side of the grid that a region is sampled to, in cells
DIVISOR = 64
"""Images are padded to multiples of this, the largest stride. With torchvision's 32, the coarsest
map would have half a cell too much in every other size, and its anchors a wrong distance."""


ARCHITECTURE = (
    "min_size", "max_size", "window", "drop_path", "pyramid_norm", "frozen_norms", "channels",
    "regions", "proposals",
)  # fmt: skip
"""Settings of a recipe that `build_detector` reads."""


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
    classifier: nn.Module, classes: int, recipe: DetectionRecipe
) -> tuple[Detector, WeightReport]:
    """Build a Mask R-CNN for `classes` classes on the classifier's features.

    Labels begin at 1, because 0 is torchvision's background. Images are floats in [0, 1], which the
    detector normalizes as for the classifier.
    """
    if classes < 1:
        raise ModelError(f"a detector cannot have {classes} classes", "Give 1 or more.")
    if recipe.min_size > recipe.max_size:
        raise ModelError(
            f"min_size is {recipe.min_size} and max_size {recipe.max_size} px",
            "min_size must be at most max_size.",
        )
    record: Any = classifier.pretrained_cfg
    backbone, report = backbone_of(classifier, recipe)
    channels, labels = recipe.channels, classes + 1
    detector = Detector(
        backbone,
        box_head=TwoMLPHead(channels * _BOX**2, 4 * channels),
        box_predictor=FastRCNNPredictor(4 * channels, labels),
        mask_head=MaskRCNNHeads(channels, (channels,) * 4, 1),
        mask_predictor=MaskRCNNPredictor(channels, channels, labels),
        rpn_post_nms_top_n_train=2 * recipe.proposals,
        rpn_post_nms_top_n_test=recipe.proposals,
        box_batch_size_per_image=recipe.regions,
        min_size=recipe.min_size,
        max_size=recipe.max_size,
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
    total_parameters: int
    total_flops: int
    counter: str = "torch"
    """FLOP counter: matrix products, convolutions and attention, but no RoIAlign, norms and NMS."""


def detector_cost(detector: Detector, height: int, width: int) -> DetectorCost:
    """Return the cost for an image of this size after padding. Runs on the meta device."""
    empty: Any = copy.deepcopy(detector).to("meta").eval()
    heads, backbone = empty.roi_heads, empty.backbone
    height, width = (DIVISOR * ceil(side / DIVISOR) for side in (height, width))
    proposals, detections = empty.rpn._post_nms_top_n["testing"], heads.detections_per_img
    parameters: dict[str, int] = {}
    flops: dict[str, int] = {}

    def count(part: str, given: Any, *modules: nn.Module) -> Any:
        module = nn.Sequential(*modules)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            result = module(given)
        parameters[part] = sum(parameter.numel() for parameter in module.parameters())
        flops[part] = counter.get_total_flops()
        return result

    with torch.device("meta"):
        image = torch.empty(1, 3, height, width)
        boxes = torch.empty(proposals, backbone.out_channels, _BOX, _BOX)
        masks = torch.empty(detections, backbone.out_channels, _MASK, _MASK)
    maps = count("pyramid", count("backbone", image, backbone.body), backbone.fpn)
    count("rpn", list(maps.values()), empty.rpn.head)
    count("box head", boxes, heads.box_head, heads.box_predictor)
    count("mask head", masks, heads.mask_head, heads.mask_predictor)
    return DetectorCost(
        height=height,
        width=width,
        proposals=proposals,
        detections=detections,
        parameters=parameters,
        flops=flops,
        total_parameters=sum(parameters.values()),
        total_flops=sum(flops.values()),
    )
