"""Draw predictions on a sheet of images."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from rbdc.errors import DataError

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f5fa9")
_INCHES = 3.2  # width of a picture
_TITLE_INCHES = 0.3


def draw_sheet(
    images: Sequence[Tensor],
    outputs: Sequence[Mapping[str, Tensor]],
    class_names: Sequence[str],
    path: Path,
    *,
    titles: Sequence[str] = (),
    least_score: float = 0.5,
    columns: int = 4,
) -> None:
    """Draw images with the boxes, masks, classes and scores of their 20 best objects.

    Objects below `least_score` are not drawn; if an image has no others, its best one is. `images`
    are floats (3, H, W) in [0, 1], and `outputs` a detector's outputs. The suffix of `path` decides
    the file format.
    """
    if not images:
        raise DataError("there is no image to draw", "Give at least one.")
    from matplotlib.figure import Figure  # slow to import, and only needed here

    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    tallest = [
        max(image.shape[1] / image.shape[2] for image in images[first : first + columns])
        for first in range(0, len(images), columns)
    ]
    size = (_INCHES * columns, _INCHES * sum(tallest) + _TITLE_INCHES * rows)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, height_ratios=tallest)
    for axes in grid.flat:
        axes.set_axis_off()
        axes.set_anchor("N")
    for number, (axes, image, output) in enumerate(zip(grid.flat, images, outputs, strict=False)):
        shown = _best(output, least_score)
        axes.imshow(draw_objects(image, shown).permute(1, 2, 0).numpy())
        for index, label in enumerate(shown["labels"].tolist()):
            text = f"{class_names[label - 1]} {100 * shown['scores'][index].item():.0f}"
            style = {"facecolor": _colour(label), "edgecolor": "none", "pad": 0.8}
            left, top, *_ = shown["boxes"][index].tolist()
            axes.text(
                left, top, text, fontsize=6.5, color="white", va="top", bbox=style, clip_on=True
            )
        if titles:
            axes.set_title(titles[number], fontsize=7, loc="left", parse_math=False)
    figure.savefig(path, dpi=150)


def draw_objects(image: Tensor, output: Mapping[str, Tensor]) -> Tensor:
    """Return the image as uint8 with the masks and boxes of `output` drawn on it."""
    pixels = (image.cpu().clamp(0, 1) * 255).round().to(torch.uint8)
    if not len(output["boxes"]):
        return pixels
    colours = [_colour(label) for label in output["labels"].tolist()]
    masks = output["masks"][:, 0].cpu() > 0.5
    pixels = draw_segmentation_masks(pixels, masks, alpha=0.5, colors=colours)
    drawn: Tensor = draw_bounding_boxes(pixels, output["boxes"].cpu(), colors=colours, width=2)
    return drawn


def _best(output: Mapping[str, Tensor], least_score: float, most: int = 20) -> dict[str, Tensor]:
    scores = output["scores"]
    good = int((scores >= least_score).sum())
    chosen = scores.argsort(descending=True)[: min(max(good, 1), most)]
    return {key: output[key][chosen] for key in ("boxes", "labels", "masks", "scores")}


def _colour(label: int) -> str:
    return _COLOURS[label % len(_COLOURS)]
