"""The samples of a detector, an image and its objects, as a function of (seed, epoch, image)."""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

from rbdc.data import derive_seed
from rbdc.data.files import FORMATS
from rbdc.data.randomness import preserve_generators, set_seeds
from rbdc.data.sources import BAD_IMAGE
from rbdc.errors import DataError, RecipeError
from rbdc.transfer.coco import CocoSet, Picture, masks_of

Target = dict[str, Tensor]
Sample = tuple[Tensor, Target]
_GREY = 128  # padding of a jittered image


@dataclass(frozen=True, kw_only=True, slots=True)
class Views:
    """The augmentation of training images: flips and resizing. The defaults are the paper's."""

    min_size: tuple[int, ...] = (800,)
    """Pixels of the shorter side; if several, one is drawn for each image."""
    max_size: int = 1333
    """Largest number of pixels of the longer side."""
    flip: float = 0.5
    """Probability of a horizontal flip."""
    jitter: tuple[float, float] | None = None
    """Range of large-scale jitter, which replaces resizing to `min_size`. The image is resized by a
    factor drawn from this range, relative to a square of `jitter_size` pixels, and then cropped to
    that square. (0.1, 2.0) is usual; None for no jitter."""
    jitter_size: int = 1024

    def __post_init__(self) -> None:
        sizes_fit = self.min_size and all(0 < size <= self.max_size for size in self.min_size)
        if not sizes_fit or not 0 <= self.flip <= 1 or self.jitter_size < 1:
            raise RecipeError(
                f"views of {self.min_size} to {self.max_size} px, flipped with probability "
                f"{self.flip:g}, jittered in {self.jitter_size} px",
                "Sizes must be positive and at most max_size, and the probability between 0 and 1.",
            )
        if self.jitter is not None and not 0 < self.jitter[0] <= self.jitter[1]:
            raise RecipeError(f"the jitter is {self.jitter}", "Give (least, greatest), above 0.")

    def transform(self) -> v2.Transform:
        """Return the augmentation as a torchvision transform."""
        if self.jitter is None:
            steps = [v2.RandomShortestSize(list(self.min_size), max_size=self.max_size)]
        else:
            square = (self.jitter_size, self.jitter_size)
            fill = {tv_tensors.Image: _GREY, "others": 0}
            steps = [
                v2.ScaleJitter(square, scale_range=self.jitter),
                v2.RandomCrop(square, pad_if_needed=True, fill=fill),
            ]
        steps += [v2.ClampBoundingBoxes(), v2.SanitizeBoundingBoxes()]  # no objects off the crop
        return v2.Compose([v2.RandomHorizontalFlip(self.flip), *steps])


class DetectionSamples(Dataset[Sample]):
    """Images and targets in the format of torchvision's Mask R-CNN.

    Samples are indexed by (epoch, image), and depend only on these and the seed. Without `views`,
    images are not augmented, for evaluation. Images are float32 (3, H, W) in [0, 1]. A target has
    boxes (N, 4) as left, top, right, bottom; labels (N,) from 1; masks (N, H, W) of 0 and 1; and
    image_id. N may be 0. Crowds are left out, because torchvision's losses would treat each as a
    single object.
    """

    def __init__(
        self,
        data: CocoSet,
        class_names: Sequence[str],
        *,
        views: Views | None = None,
        seed: int = 0,
    ) -> None:
        self.data, self.seed = data, seed
        self.labels = data.labels(class_names)
        self._transform = None if views is None else views.transform()

    def __len__(self) -> int:
        return len(self.data.pictures)

    def __getitem__(self, token: tuple[int, int]) -> Sample:
        epoch, index = token
        picture = self.data.pictures[index]
        image, target = tv_tensors.Image(read_pixels(picture)), self._target(picture)
        if self._transform is not None:
            with preserve_generators():
                set_seeds(derive_seed(self.seed, "sample", epoch, index), numpy=False)
                image, target = self._transform(image, target)
        pixels = image.as_subclass(Tensor).to(torch.float32) / 255
        tensors = {key: value.as_subclass(Tensor) for key, value in target.items()}
        return pixels, tensors | {"image_id": torch.tensor(picture.id)}

    def __getitems__(self, tokens: list[tuple[int, int]]) -> list[Sample] | DataError:
        """Return a batch, in a worker of the loader. A DataError is returned, not raised."""
        try:
            return [self[token] for token in tokens]
        except DataError as error:
            return error

    def _target(self, picture: Picture) -> dict[str, Any]:
        regions = [r for r in picture.regions if not r.crowd and r.category in self.labels]
        size = (picture.height, picture.width)
        boxes = torch.tensor([r.box for r in regions], dtype=torch.float32).reshape(-1, 4)
        return {
            "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=size),
            "labels": torch.tensor([self.labels[r.category] for r in regions], dtype=torch.int64),
            "masks": tv_tensors.Mask(masks_of(regions, *size)),
        }


def read_pixels(picture: Picture) -> Tensor:
    """Read an image as uint8 (3, H, W). Refuse one that differs in size from its annotations."""
    try:
        image = Image.open(BytesIO(picture.location.read()), formats=FORMATS).convert("RGB")
    except BAD_IMAGE as error:
        raise DataError(
            f"{picture.location} cannot be decoded: {error}", "Replace the file."
        ) from None
    if image.size != (picture.width, picture.height):
        raise DataError(
            f"{picture.location} is {image.width} x {image.height} px, its annotations are for "
            f"{picture.width} x {picture.height}",
            "Use the images that were annotated: boxes and masks are in their pixels.",
        )
    return v2.functional.pil_to_tensor(image)  # type: ignore[no-any-return]
