"""Detection and segmentation with a trained classifier: Mask R-CNN on its features.

`weights` and `backbone` turn a timm ViT or ResNet into a feature extractor for images of any size,
and `pyramid` adds the scales. `detector` builds torchvision's Mask R-CNN on it, and `groups` sets
the learning rate of each layer. `coco` reads and checks the data, `samples` transforms it, `scores`
evaluates with pycocotools, and `pictures` draws predictions.
"""

from rbdc.transfer.backbone import backbone_of, global_blocks
from rbdc.transfer.coco import CocoSet, check_splits, open_coco, read_coco
from rbdc.transfer.detector import (
    Detector,
    DetectorCost,
    DetectorSettings,
    build_detector,
    detector_cost,
)
from rbdc.transfer.folder import load_detector
from rbdc.transfer.groups import ParameterGroup, parameter_groups
from rbdc.transfer.pictures import draw_sheet
from rbdc.transfer.pyramid import SimpleFPN
from rbdc.transfer.samples import DetectionSamples, Views
from rbdc.transfer.scores import (
    DetectionScores,
    Precision,
    Results,
    read_results,
    results_of,
    score,
)
from rbdc.transfer.weights import WeightReport, open_classifier

__all__ = [
    "CocoSet",
    "DetectionSamples",
    "DetectionScores",
    "Detector",
    "DetectorCost",
    "DetectorSettings",
    "ParameterGroup",
    "Precision",
    "Results",
    "SimpleFPN",
    "Views",
    "WeightReport",
    "backbone_of",
    "build_detector",
    "check_splits",
    "detector_cost",
    "draw_sheet",
    "global_blocks",
    "load_detector",
    "open_classifier",
    "open_coco",
    "parameter_groups",
    "read_coco",
    "read_results",
    "results_of",
    "score",
]
