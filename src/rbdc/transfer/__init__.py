"""Detection and segmentation with a trained classifier: Mask R-CNN on its features.

`weights` and `backbone` turn a timm ViT or ResNet into a feature extractor for images of any size,
and `pyramid` adds the scales. `detector` builds torchvision's Mask R-CNN on it. `coco` reads and
checks the data, `batches` transforms it, `scores` evaluates with pycocotools, and `pictures` draws
predictions. `detection` is the training problem.
"""

from rbdc.transfer.folder import load_detector
