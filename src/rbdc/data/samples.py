"""Read, decode and transform the images of a batch, in the main process or in a data worker."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from rbdc.data.augment import Transform, to_tensor
from rbdc.data.exchange import Content, Exchange, Request
from rbdc.data.images import ImageSet, ImageSource
from rbdc.data.randomness import derive_seed, generator, set_seeds
from rbdc.data.sources import naming, to_rgb
from rbdc.errors import DataError

Token = tuple[int, int, int]  # epoch, position in the epoch, image


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """What a worker sends. Lists are cheaper to send than small tensors, which would be files."""

    images: Tensor
    labels: list[int]
    indices: list[int]
    problems: list[str] = field(default_factory=list)
    """Warnings: images that were replaced, and why batches are not shared."""
    decoded: int = 0
    """Images decoded since the previous batch of the same worker."""

    def pin_memory(self) -> "Read":
        """Return a copy in pinned memory. torch's DataLoader calls this if there is a GPU."""
        return replace(self, images=self.images.pin_memory())


@lru_cache(maxsize=4)  # data workers may be in the next epoch already
def epoch_order(images: int, seed: int, epoch: int, repeats: int) -> Tensor:
    """Return the image indices of an epoch in order. Repeats are adjacent. Do not change them."""
    order = torch.randperm(images, generator=generator(seed, "order", epoch))
    if repeats > 1:
        order = order.repeat_interleave(repeats)[:images]
    return order


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """The images of each step, as a function of the seed."""

    images: int
    seed: int
    batch_size: int
    repeats: int

    @property
    def steps_per_epoch(self) -> int:
        return self.images // self.batch_size

    def step(self, step: int) -> Tensor:
        """Return the image indices of a step's global batch."""
        epoch, within = divmod(step, self.steps_per_epoch)
        order = epoch_order(self.images, self.seed, epoch, self.repeats)
        return order[within * self.batch_size : (within + 1) * self.batch_size]

    def tokens(self, step: int, positions: Tensor) -> list[Token]:
        """Return the tokens of the micro-batch at these positions of a step's global batch."""
        epoch, within = divmod(step, self.steps_per_epoch)
        first, images = within * self.batch_size, self.step(step)[positions]
        return [
            (epoch, first + at, index)
            for at, index in zip(positions.tolist(), images.tolist(), strict=True)
        ]


@dataclass(frozen=True)
class Samples(Dataset[Any]):
    """Transformed images for a batch of tokens. With a `seed`, each transform is seeded."""

    source: ImageSource
    transform: Transform
    channels: int
    skip_bad: bool
    seed: int | None = None
    numpy: bool = False
    """Whether the transform also draws from numpy."""

    def __getitems__(self, tokens: list[Token]) -> Read | DataError:
        """Read and transform one batch of tokens. A DataError is returned, not raised."""
        try:
            images, (indices, problems) = self.read(tokens)
        except DataError as error:
            return error
        return self.result(images, indices, problems, len(tokens))

    def read(self, tokens: Sequence[Token]) -> Content:
        """Return the images of a batch, their indices, and the problems of replaced images."""
        images: list[Image.Image] = []
        indices, problems = [], []
        for epoch, position, index in tokens:
            seed = self.seed
            key = None if seed is None else derive_seed(seed, "sample", epoch, position)
            image, taken, found = self._readable(index, key)
            images.append(image)
            indices.append(taken)
            problems += [f"{problem}; the next image is used instead" for problem in found]
        return to_tensor(images, self.channels), [indices, problems]

    def result(self, images: Tensor, indices: list[int], problems: list[str], decoded: int) -> Read:
        """Add the labels. Images that were in memory do not count as decoded."""
        return Read(
            images=images,
            labels=[int(self.source.labels[index]) for index in indices],
            indices=indices,
            problems=problems,
            decoded=0 if isinstance(self.source, ImageSet) else decoded,
        )

    def _readable(self, index: int, key: int | None) -> tuple[Image.Image, int, list[str]]:
        """Return an image, its index, and the problems of the unreadable images it replaces."""
        problems: list[str] = []
        while True:
            try:
                return self._image(index, key), index, problems
            except DataError as error:
                if not self.skip_bad or len(problems) == len(self.source):
                    raise
                problems.append(error.problem)
                index = (index + 1) % len(self.source)

    def _image(self, index: int, key: int | None) -> Image.Image:
        """Return a transformed image. `key` seeds what the transform draws."""
        with naming(self.source, index):
            image = self.source.read(index)
            if key is not None:
                set_seeds(key, numpy=self.numpy)
            crop = self.transform.draw(image)  # before the image is decoded
            image = to_rgb(image)
        if self.channels == 1:  # convert to gray as timm does; the first channel alone would be red
            image = image.convert("L").convert("RGB")
        return self.transform.apply(image, crop)


@dataclass(frozen=True, kw_only=True)
class Stream(Dataset[Any]):
    """The micro-batches of a training by (step, micro-batch), shared with other processes."""

    samples: Samples
    order: Order
    positions: Sequence[Tensor]
    """Positions in the global batch of each micro-batch of this process."""
    stop: int
    """The step after the last one."""
    exchange: Exchange | None

    def requests(self, step: int, micro: int = 0) -> Iterator[Request]:
        """Yield the requests for all micro-batches from this one, in order."""
        count = len(self.positions)
        return (divmod(number, count) for number in range(step * count + micro, self.stop * count))

    def __getitems__(self, request: Request) -> Read | DataError:
        """Read one micro-batch. A DataError is returned, not raised."""
        decoded, exchange = 0, self.exchange

        def decode(request: Request) -> Content:
            nonlocal decoded
            step, micro = request
            tokens = self.order.tokens(step, self.positions[micro])
            decoded += len(tokens)
            return self.samples.read(tokens)

        try:
            if exchange is None:
                images, (indices, problems) = decode(request)
            else:
                images, (indices, problems) = exchange.get(
                    request, lambda: self.requests(request[0], request[1] + 1), decode
                )
        except DataError as error:
            return error
        if exchange is not None and exchange.problem:
            problems = [*problems, f"{exchange.problem}; this process decodes all images itself"]
        return self.samples.result(images, indices, problems, decoded)
