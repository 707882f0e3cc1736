"""The images and objects of a detector's batches, as a function of (seed, epoch, step)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

from rbdc.data import check_batch_size, derive_seed
from rbdc.data.batches import epoch_order
from rbdc.data.files import FORMATS
from rbdc.data.loader import read_batches
from rbdc.data.randomness import preserve_generators, set_seeds
from rbdc.data.sources import BAD_IMAGE
from rbdc.errors import DataError, RecipeError
from rbdc.settings.detection import DetectionRecipe
from rbdc.transfer.coco import CocoSet, Picture, masks_of

Target = dict[str, Tensor]
Sample = tuple[Tensor, Target]
Token = tuple[int, int]  # epoch, image
_GREY = 128  # padding of a jittered image


def make_transform(recipe: DetectionRecipe) -> v2.Transform:
    """Return the augmentation of training images: flips, and resizing or large-scale jitter.

    With jitter, the image is resized by a factor drawn from this range, relative to a square of
    `jitter_size` pixels, and then cropped to that square.
    """
    sizes, jitter = list(recipe.train_sizes or (recipe.min_size,)), recipe.jitter
    if max(sizes) > recipe.max_size:
        raise RecipeError(
            f"short sides of {sizes} px, and long sides of at most {recipe.max_size}",
            "Short sides must be at most max_size.",
        )
    steps = [v2.RandomShortestSize(sizes, max_size=recipe.max_size)]
    if jitter is not None:
        if jitter[0] > jitter[1]:
            raise RecipeError(f"the jitter is {jitter}", "Give the least scale, then the greatest.")
        square = (recipe.jitter_size, recipe.jitter_size)
        fill = {tv_tensors.Image: _GREY, "others": 0}
        steps = [
            v2.ScaleJitter(square, scale_range=jitter),
            v2.RandomCrop(square, pad_if_needed=True, fill=fill),
        ]
    steps += [v2.ClampBoundingBoxes(), v2.SanitizeBoundingBoxes()]  # no objects off the crop
    return v2.Compose([v2.RandomHorizontalFlip(recipe.flip), *steps])


class DetectionSamples(Dataset[Sample]):
    """Images and targets in the format of torchvision's Mask R-CNN.

    Samples are indexed by (epoch, image), and depend only on these and the seed. Without a
    transform, images are not augmented, for evaluation. Images are float32 (3, H, W) in [0, 1]. A
    target has boxes (N, 4) as left, top, right, bottom; labels (N,) from 1; masks (N, H, W) of 0
    and 1; and image_id. N may be 0. Crowds are left out, because torchvision's losses would treat
    each as a single object.
    """

    def __init__(
        self,
        data: CocoSet,
        class_names: Sequence[str],
        transform: v2.Transform | None = None,
        seed: int = 0,
    ) -> None:
        self.data, self.transform, self.seed = data, transform, seed
        self.labels = data.labels(class_names)

    def __len__(self) -> int:
        return len(self.data.pictures)

    def __getitem__(self, token: Token) -> Sample:
        epoch, index = token
        picture = self.data.pictures[index]
        image, target = tv_tensors.Image(read_pixels(picture)), self._target(picture)
        if self.transform is not None:
            with preserve_generators():
                set_seeds(derive_seed(self.seed, "sample", epoch, index), numpy=False)
                image, target = self.transform(image, target)
        pixels = image.as_subclass(Tensor).to(torch.float32) / 255
        tensors = {key: value.as_subclass(Tensor) for key, value in target.items()}
        return pixels, tensors | {"image_id": torch.tensor(picture.id)}

    def __getitems__(self, tokens: list[Token]) -> list[Sample] | DataError:
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
    at = picture.location
    try:
        image = Image.open(BytesIO(at.read()), formats=FORMATS).convert("RGB")
    except BAD_IMAGE as error:
        raise DataError(f"{at} cannot be decoded: {error}", "Replace the file.") from None
    if image.size != (picture.width, picture.height):
        raise DataError(
            f"{at} is {image.width} x {image.height} px, its annotations are for "
            f"{picture.width} x {picture.height}",
            "Use the images that were annotated: boxes and masks are in their pixels.",
        )
    return v2.functional.pil_to_tensor(image)  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True, slots=True)
class DetectionBatch:
    """A list of images and targets. Images differ in size until the detector pads them."""

    images: list[Tensor]
    targets: list[Target]
    indices: Tensor
    """Indices of the images in the data set."""


@dataclass(frozen=True, kw_only=True)
class DetectionBatches:
    """The batches of a data set.

    `part` is (number of processes, this process's rank), and `micro` the number of micro-batches of
    each process per step. In evaluation, rank r of n has every n-th image from r.
    """

    samples: DetectionSamples
    batch_size: int = 1
    device: torch.device
    workers: int = 0
    part: tuple[int, int] = (1, 0)
    micro: int = 1

    @property
    def steps_per_epoch(self) -> int:
        return len(self.samples) // self.batch_size

    def from_step(self, start: int, stop: int) -> Iterator[list[DetectionBatch]]:
        """Yield this process's micro-batches of each step from `start` to `stop` (exclusive)."""
        check_micro_batches(len(self.samples), self.batch_size, self.part[0] * self.micro)
        read = self._read(lambda: self._micro_batches(start, stop))
        for _ in range(start, stop):
            yield [next(read) for _ in range(self.micro)]

    def once(self) -> Iterator[DetectionBatch]:
        """Yield this process's images one at a time, so that none is padded."""
        size, rank = self.part
        mine = range(rank, len(self.samples), size)
        return self._read(lambda: ([(0, image)] for image in mine))

    def _micro_batches(self, start: int, stop: int) -> Iterator[list[Token]]:
        size, rank = self.part
        images = self.batch_size // (size * self.micro)
        for step in range(start, stop):
            epoch, within = divmod(step, self.steps_per_epoch)
            order = epoch_order(len(self.samples), self.samples.seed, epoch, 1)
            batch = order[within * self.batch_size : (within + 1) * self.batch_size].tolist()
            for number in range(rank * self.micro, (rank + 1) * self.micro):
                yield [(epoch, image) for image in batch[number * images : (number + 1) * images]]

    def _read(self, tokens: Callable[[], Iterator[list[Token]]]) -> Iterator[DetectionBatch]:
        def put(tensor: Tensor) -> Tensor:
            return tensor.to(self.device, non_blocking=True)

        read = read_batches(self.samples, tokens, self.workers)
        for samples, batch in zip(read, tokens(), strict=True):
            yield DetectionBatch(
                images=[put(image) for image, _ in samples],
                targets=[{name: put(t) for name, t in target.items()} for _, target in samples],
                indices=torch.tensor([image for _, image in batch]),
            )


def check_micro_batches(images: int, batch_size: int, micro_batches: int) -> None:
    """Refuse a batch larger than the data set or not divisible into its micro-batches."""
    check_batch_size(images, batch_size, 1, mixes=False)
    if batch_size % micro_batches:
        raise DataError(
            f"the batch size {batch_size} cannot be divided into {micro_batches} equal "
            "micro-batches (processes x accumulation)",
            f"Choose a multiple of {micro_batches}.",
        )
