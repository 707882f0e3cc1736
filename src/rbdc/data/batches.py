"""Batches as a function of (seed, epoch, step), independent of workers, processes and resumption.

A global batch can be divided into equal micro-batches, one for each process and gradient
accumulation step. A micro-batch that contains image i of the global batch also contains image
n-1-i, because mixup mixes a batch with its reverse. So micro-batches are mixed exactly as the
global batch would be.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from rbdc.data.augment import (
    BatchChanges,
    ImageFormat,
    Windows,
    evaluation_transform,
    training_transform,
)
from rbdc.data.images import DataSet, ImageSet, ImageSource
from rbdc.data.loader import read_batches
from rbdc.data.randomness import derive_seed, generator, set_seeds
from rbdc.data.sources import read_rgb
from rbdc.errors import DataError
from rbdc.settings import Augmentation

Token = tuple[int, int, int]  # epoch, position in the epoch, image
Pixels = tuple[Tensor, Tensor, Tensor]  # uint8 images, labels, image indices
# What a worker sends: images, labels, indices, and the problems of images that were replaced. Lists
# are cheaper to send than small tensors, because each tensor would be a shared-memory file.
_Read = tuple[Tensor, list[int], list[int], list[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Normalized images with their targets."""

    images: Tensor
    targets: Tensor
    """Class labels, or a distribution over classes if images were mixed."""
    indices: Tensor
    """Indices of the images in the data set, for messages."""
    decoded: int = 0
    """Images that this process decoded for the batch."""


def micro_batch_positions(batch_size: int, count: int, index: int) -> Tensor:
    """Return the positions in the global batch of micro-batch `index` of `count`."""
    if count == 1:
        return torch.arange(batch_size)
    size = batch_size // 2 // count
    first = torch.arange(index * size, (index + 1) * size)
    return torch.cat([first, (batch_size - 1 - first).flip(0)])


@lru_cache(maxsize=4)  # data workers may be in the next epoch already
def epoch_order(images: int, seed: int, epoch: int, repeats: int) -> Tensor:
    """Return the image indices of an epoch in order. Repeats are adjacent. Do not change them."""
    order = torch.randperm(images, generator=generator(seed, "order", epoch))
    if repeats > 1:
        order = order.repeat_interleave(repeats)[:images]
    return order


class TrainingBatches:
    """The batches of one training.

    `micro_batches` is (how many a global batch has, the indices of this process's ones).
    """

    def __init__(
        self,
        data: DataSet,
        settings: Augmentation,
        image: ImageFormat,
        *,
        seed: int,
        batch_size: int,
        micro_batches: tuple[int, Sequence[int]] = (1, (0,)),
        device: torch.device = torch.device("cpu"),  # noqa: B008
        workers: int = 0,
    ) -> None:
        self.data, self.settings, self.image = data, settings, image
        self.seed, self.batch_size, self.device = seed, batch_size, device
        self.workers = workers
        count, mine = micro_batches
        check_batch_size(len(data.train), batch_size, count, mixes=settings.mixes)
        self.positions = [micro_batch_positions(batch_size, count, index) for index in mine]
        self.steps_per_epoch = len(data.train) // batch_size
        self._change = BatchChanges(settings, len(data.class_names))
        if isinstance(data.train, ImageSet) and settings.batched:
            check_image_size(data.train, image)

    def from_step(self, start: int, stop: int) -> Iterator[list[Batch]]:
        """Yield this process's micro-batches of each step from `start` to `stop` (exclusive)."""
        train = self.data.train
        if isinstance(train, ImageSet) and self.settings.batched:
            read = self._in_memory(train, start, stop)
        else:
            read = self._decoded(train, start, stop)
        for step in range(start, stop):
            yield [self._finish(step, positions, *next(read)) for positions in self.positions]

    def order(self, step: int) -> Tensor:
        """Return the image indices of a step's global batch."""
        epoch, within = divmod(step, self.steps_per_epoch)
        order = epoch_order(len(self.data.train), self.seed, epoch, self.settings.aug_repeats)
        return order[within * self.batch_size : (within + 1) * self.batch_size]

    def _in_memory(self, train: ImageSet, start: int, stop: int) -> Iterator[Pixels]:
        windows = Windows(train.images.to(self.device), self.settings)
        labels = train.labels.to(self.device)
        for step in range(start, stop):
            order = self.order(step)
            for positions in self.positions:
                chosen = order[positions]
                images = windows.batch(chosen, positions, self.batch_size, *self._key(step))
                yield images, labels[chosen.to(self.device)], chosen

    def _decoded(self, train: ImageSource, start: int, stop: int) -> Iterator[Pixels]:
        samples = _Samples(
            train,
            training_transform(self.settings, self.image),
            self.image.channels,
            self.data.skip_bad,
            self.seed,
            bool(self.settings.aa),
        )
        for read in read_batches(samples, lambda: self._tokens(start, stop), self.workers):
            yield _pixels(read, self.device)

    def _tokens(self, start: int, stop: int) -> Iterator[list[Token]]:
        for step in range(start, stop):
            epoch, within = divmod(step, self.steps_per_epoch)
            order, first = self.order(step), within * self.batch_size
            for positions in self.positions:
                yield [(epoch, first + at, int(order[at])) for at in positions.tolist()]

    def _finish(
        self, step: int, positions: Tensor, images: Tensor, labels: Tensor, indices: Tensor
    ) -> Batch:
        images, targets = self._change(
            self.image.normalize(images), labels, positions, self.batch_size, *self._key(step)
        )
        return Batch(images=images, targets=targets, indices=indices)

    def _key(self, step: int) -> tuple[int, int, int]:
        return (self.seed, *divmod(step, self.steps_per_epoch))


class EvaluationBatches:
    """The test images in order, each once.

    `part` is (number of processes, this process's rank): rank r evaluates every n-th image from r.
    """

    def __init__(
        self,
        data: DataSet,
        image: ImageFormat,
        *,
        batch_size: int,
        part: tuple[int, int] = (1, 0),
        device: torch.device = torch.device("cpu"),  # noqa: B008
        workers: int = 0,
    ) -> None:
        self.test, self.image, self.device = data.test, image, device
        self.samples = _Samples(
            data.test, evaluation_transform(image), image.channels, data.skip_bad
        )
        parts, mine = part
        indices = list(range(mine, len(data.test), parts))
        self.batches = [indices[i : i + batch_size] for i in range(0, len(indices), batch_size)]
        most = -(-len(data.test) // parts)
        # batches that other processes have in addition
        self.idle = -(-most // batch_size) - len(self.batches)
        self.workers = workers

    def __iter__(self) -> Iterator[Batch]:
        test, image = self.test, self.image
        if (  # the transform would leave the images in memory unchanged
            isinstance(test, ImageSet)
            and test.images.shape[1:] == image.shape
            and image.crop_pct == 1.0
        ):
            for batch in self.batches:
                yield self._batch((test.images[batch], test.labels[batch].tolist(), batch, []))
            return
        tokens: list[list[Token]] = [[(0, i, i) for i in batch] for batch in self.batches]
        for read in read_batches(self.samples, lambda: iter(tokens), self.workers):
            yield self._batch(read)

    def _batch(self, read: _Read) -> Batch:
        images, labels, indices = _pixels(read, self.device)
        return Batch(images=self.image.normalize(images), targets=labels, indices=indices)


@dataclass(frozen=True)
class _Samples(Dataset[Pixels]):
    """Transformed images for a batch of tokens. With a `seed`, each transform is seeded."""

    source: ImageSource
    transform: Callable[[Any], Tensor]
    channels: int
    skip_bad: bool
    seed: int | None = None
    numpy: bool = False
    """Whether the transform also draws from numpy."""

    def __getitems__(self, tokens: list[Token]) -> _Read | DataError:
        """Read and transform one batch of tokens. A DataError is returned, not raised."""
        images, indices, replaced = [], [], []
        try:
            for epoch, position, index in tokens:
                image, taken, problems = self._read(index)
                if self.seed is not None:
                    key = derive_seed(self.seed, "sample", epoch, position)
                    set_seeds(key, numpy=self.numpy)
                images.append(torch.as_tensor(self.transform(image)[: self.channels]))
                indices.append(taken)
                replaced += problems
        except DataError as error:
            return error
        labels = [int(self.source.labels[index]) for index in indices]
        return torch.stack(images), labels, indices, replaced

    def _read(self, index: int) -> tuple[Any, int, list[str]]:
        """Return an image, its index, and the problems of the unreadable images it replaces."""
        problems: list[str] = []
        while True:
            try:
                image = read_rgb(self.source, index)
            except DataError as error:
                if not self.skip_bad or len(problems) == len(self.source):
                    raise
                problems.append(error.problem)
                index = (index + 1) % len(self.source)
            else:
                # convert to gray as timm does; the first channel alone would be red
                gray = image.convert("L").convert("RGB") if self.channels == 1 else image
                return gray, index, problems


def _pixels(read: _Read, device: torch.device) -> Pixels:
    images, labels, indices, replaced = read
    for problem in replaced:
        warnings.warn(f"{problem}; the next image is used instead", stacklevel=2)
    images, targets = (x.to(device, non_blocking=True) for x in (images, torch.tensor(labels)))
    return images, targets, torch.tensor(indices)


def check_batch_size(images: int, batch_size: int, micro_batches: int, *, mixes: bool) -> None:
    """Refuse a batch larger than the data set or not divisible into its micro-batches."""
    if not 0 < batch_size <= images:
        raise DataError(
            f"the batch size is {batch_size}, and there are {images} training images",
            "Choose a batch size between 1 and the number of images.",
        )
    multiple = 2 * micro_batches if micro_batches > 1 else 2 if mixes else 1
    if batch_size % multiple:
        reason = (
            f"it is divided into {micro_batches} micro-batches (processes x accumulation) of pairs"
            if micro_batches > 1
            else "mixup and cutmix mix pairs"
        )
        raise DataError(
            f"the batch size {batch_size} is not a multiple of {multiple}: {reason}",
            f"Choose a multiple of {multiple}.",
        )


def check_image_size(images: ImageSet, image: ImageFormat) -> None:
    """Refuse images in memory whose shape is not the model's input shape."""
    found, wanted = tuple(images.images.shape[1:]), image.shape
    if found != wanted:
        raise DataError(
            f"images are {found} (channels, height, width) and the model takes {wanted}",
            "Build the model for the images (--img-size, in_chans), or set a scale to resize them.",
        )
