"""Batches as a function of (seed, epoch, step), independent of workers, processes and resumption.

A global batch can be divided into equal micro-batches, one for each process and gradient
accumulation step. A micro-batch that contains image i of the global batch also contains image
n-1-i, because mixup mixes a batch with its reverse. So micro-batches are mixed exactly as the
global batch would be.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import prod
from typing import Any

import PIL
import timm
import torch
import torchvision
from torch import Tensor, nn
from torchvision.transforms.v2.functional import resize

from rbdc.data.augment import (
    BatchChanges,
    EvaluationTransform,
    ImageFormat,
    TrainingTransform,
    Windows,
)
from rbdc.data.exchange import Exchange, Membership, find_folder, window
from rbdc.data.images import DataSet, ImageSet
from rbdc.data.loader import PREFETCHED, read_batches
from rbdc.data.samples import Order, Read, Samples, Stream, Token
from rbdc.errors import DataError
from rbdc.settings import Augmentation

Pixels = tuple[Tensor, Tensor, Tensor, int]  # uint8 images, labels, image indices, images decoded
CACHE_BYTES = 512 << 20  # test images up to this size stay in memory after they were decoded once


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Normalized images with their targets."""

    images: Tensor
    targets: Tensor
    """Class labels, or a distribution over classes if images were mixed."""
    indices: Tensor
    """Indices of the images in the data set, for messages."""
    decoded: int = 0
    """Images that this process decoded since the batch before: 0 if all were in memory, or another
    process decoded them; more than the batch has if some were decoded in advance."""
    outputs: dict[nn.Module, Tensor] = field(default_factory=dict, init=False, repr=False)
    """Outputs of models that do not train: computed once for all trainings on this batch."""


def micro_batch_positions(batch_size: int, count: int, index: int) -> Tensor:
    """Return the positions in the global batch of micro-batch `index` of `count`."""
    if count == 1:
        return torch.arange(batch_size)
    size = batch_size // 2 // count
    first = torch.arange(index * size, (index + 1) * size)
    return torch.cat([first, (batch_size - 1 - first).flip(0)])


class TrainingBatches:
    """The batches of one training.

    `micro_batches` is (how many a global batch has, the indices of this process's ones). With
    `share`, processes on this machine that train on the same batches decode each batch once.
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
        share: bool = True,
    ) -> None:
        self.data, self.settings, self.image = data, settings, image
        self.seed, self.batch_size, self.device = seed, batch_size, device
        self.workers, self.share = workers, share
        self.micro_batches = count, mine = micro_batches
        check_batch_size(len(data.train), batch_size, count, mixes=settings.mixes)
        self.positions = [micro_batch_positions(batch_size, count, index) for index in mine]
        self.order = Order(
            images=len(data.train), seed=seed, batch_size=batch_size, repeats=settings.aug_repeats
        )
        self.steps_per_epoch = self.order.steps_per_epoch
        self._change = BatchChanges(settings, len(data.class_names))
        if isinstance(data.train, ImageSet) and settings.batched:
            check_image_size(data.train, image)

    def from_step(
        self, start: int, stop: int, stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[list[Batch]]:
        """Yield this process's micro-batches of each step from `start` to `stop` (exclusive).

        Once `stopped` returns True, other processes are not waited for.
        """
        train = self.data.train
        if isinstance(train, ImageSet) and self.settings.batched:
            read = self._in_memory(train, start, stop)
        else:
            read = self._decoded(start, stop, stopped)
        for step in range(start, stop):
            yield [self._finish(step, positions, *next(read)) for positions in self.positions]

    def _in_memory(self, train: ImageSet, start: int, stop: int) -> Iterator[Pixels]:
        windows = Windows(train.images.to(self.device), self.settings)
        labels = train.labels.to(self.device)
        for step in range(start, stop):
            order = self.order.step(step)
            for positions in self.positions:
                chosen = order[positions]
                images = windows.batch(chosen, positions, self.batch_size, *self._key(step))
                images = reduced(images, self.image)
                yield images, labels[chosen.to(self.device)], chosen, 0

    def _decoded(self, start: int, stop: int, stopped: Callable[[], bool]) -> Iterator[Pixels]:
        samples = Samples(
            self.data.train,
            TrainingTransform(self.settings, self.image),
            self.image.channels,
            self.data.skip_bad,
            self.seed,
            bool(self.settings.aa),
        )
        member = self._join(start, stopped) if self.share else None
        stream = Stream(
            samples=samples,
            order=self.order,
            positions=self.positions,
            stop=stop,
            exchange=Exchange(member) if member else None,
        )
        warned: set[str] = set()
        read = read_batches(stream, lambda: stream.requests(start), self.workers)
        try:
            for step, _ in stream.requests(start):
                if member:
                    member.move(step)
                found = next(read)
                _warn(problem for problem in found.problems if problem not in warned)
                warned.update(found.problems)
                yield _pixels(found, self.device)
        finally:
            if member:
                member.leave()

    def _join(self, step: int, stopped: Callable[[], bool]) -> Membership | None:
        """Meet the processes on this machine that need the same batches."""
        try:
            folder = find_folder(self.content())
        except DataError as error:
            warnings.warn(f"{error.problem}. {error.remedy}", stacklevel=2)
            return None
        if folder is None:
            return None
        size = sum(map(len, self.positions)) * prod(self.image.shape)
        ahead = window(size, PREFETCHED * self.workers)
        return Membership(folder, position=step, window=ahead, stopped=stopped)

    def content(self) -> list[Any]:
        """Return all that the decoded images of each step depend on."""
        return [
            self.data.fingerprint,
            self.data.skip_bad,
            {field.name: getattr(self.settings, field.name) for field in fields(Augmentation)},
            asdict(self.image),
            [self.seed, self.batch_size, self.micro_batches[0], *self.micro_batches[1]],
            [PIL.__version__, timm.__version__, torch.__version__, torchvision.__version__],
        ]

    def _finish(
        self,
        step: int,
        positions: Tensor,
        images: Tensor,
        labels: Tensor,
        indices: Tensor,
        decoded: int,
    ) -> Batch:
        images, targets = self._change(
            self.image.normalize(images), labels, positions, self.batch_size, *self._key(step)
        )
        return Batch(images=images, targets=targets, indices=indices, decoded=decoded)

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
        self.samples = Samples(data.test, EvaluationTransform(image), image.channels, data.skip_bad)
        parts, mine = part
        indices = list(range(mine, len(data.test), parts))
        self.batches = [indices[i : i + batch_size] for i in range(0, len(indices), batch_size)]
        most = -(-len(data.test) // parts)
        # batches that other processes have in addition
        self.idle = -(-most // batch_size) - len(self.batches)
        self.workers = workers
        self._cached: list[Read] | None = None

    def __iter__(self) -> Iterator[Batch]:
        test, image = self.test, self.image
        if isinstance(test, ImageSet) and _fits(test, image) and image.crop_pct == 1.0:
            for batch in self.batches:
                labels, images = test.labels[batch].tolist(), reduced(test.images[batch], image)
                yield self._batch(Read(images=images, labels=labels, indices=batch))
            return
        if self._cached is not None:
            for read in self._cached:
                yield self._batch(read)
            return
        # small test sets are decoded once per training, and workers are started once
        fits = sum(map(len, self.batches)) * prod(image.shape) <= CACHE_BYTES
        cached = []
        tokens: list[list[Token]] = [[(0, i, i) for i in batch] for batch in self.batches]
        for read in read_batches(self.samples, lambda: iter(tokens), self.workers):
            _warn(read.problems)
            if fits:  # the copy does not hold the worker's shared memory
                cached.append(replace(read, images=read.images.clone(), decoded=0))
            yield self._batch(read)
        self._cached = cached if fits else None

    def _batch(self, read: Read) -> Batch:
        images, labels, indices, decoded = _pixels(read, self.device)
        images = self.image.normalize(images)
        return Batch(images=images, targets=labels, indices=indices, decoded=decoded)


def _pixels(read: Read, device: torch.device) -> Pixels:
    images, targets = (
        x.to(device, non_blocking=True) for x in (read.images, torch.tensor(read.labels))
    )
    return images, targets, torch.tensor(read.indices), read.decoded


def _warn(problems: Iterable[str]) -> None:
    for problem in problems:
        warnings.warn(problem, stacklevel=3)


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


def reduced(images: Tensor, image: ImageFormat) -> Tensor:
    """Return uint8 images of the model's size: of stages of low resolution they are too large."""
    size = [image.height, image.width]
    if [*images.shape[-2:]] == size:
        return images
    smaller: Tensor = resize(images, size, antialias=True)
    return smaller


def _fits(images: ImageSet, image: ImageFormat) -> bool:
    """Return whether images in memory have the model's channels and are not too small for it."""
    channels, height, width = images.images.shape[1:]
    same = height * image.width == width * image.height  # the same aspect ratio
    return channels == image.channels and height >= image.height and same


def check_image_size(images: ImageSet, image: ImageFormat) -> None:
    """Refuse images in memory that are smaller than the model's input, or of another shape."""
    if not _fits(images, image):
        found = tuple(images.images.shape[1:])
        raise DataError(
            f"images are {found} (channels, height, width) and the model takes {image.shape}",
            "Build the model for the images (--img-size, in_chans), or set a scale to resize them.",
        )
