"""Batches of a detector, as a function of (seed, epoch, step)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rbdc.data.loader import read_batches
from rbdc.data.samples import epoch_order
from rbdc.errors import DataError
from rbdc.transfer.samples import DetectionSamples, Target

Token = tuple[int, int]  # epoch, image


@dataclass(frozen=True, kw_only=True, slots=True)
class DetectionBatch:
    """A list of images and targets. Images differ in size until the detector pads them."""

    images: list[Tensor]
    targets: list[Target]
    indices: Tensor
    """Indices of the images in the data set."""


class DetectionBatches:
    """The batches of a data set.

    `part` is (number of processes, this process's rank), and `micro` the number of micro-batches of
    each process per step. In evaluation, rank r of n has every n-th image from r.
    """

    def __init__(
        self,
        samples: DetectionSamples,
        *,
        batch_size: int,
        device: torch.device,
        workers: int = 0,
        part: tuple[int, int] = (1, 0),
        micro: int = 1,
    ) -> None:
        self.samples, self.batch_size, self.device = samples, batch_size, device
        self.workers, self.part, self.micro = workers, part, micro
        self.steps_per_epoch = len(samples) // batch_size

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
        yield from self._read(lambda: ([(0, image)] for image in mine))

    def _micro_batches(self, start: int, stop: int) -> Iterator[list[Token]]:
        size, rank = self.part
        images = self.batch_size // (size * self.micro)
        order, known = torch.empty(0), -1
        for step in range(start, stop):
            epoch, within = divmod(step, self.steps_per_epoch)
            if epoch != known:
                order, known = epoch_order(len(self.samples), self.samples.seed, epoch, 1), epoch
            batch = order[within * self.batch_size : (within + 1) * self.batch_size].tolist()
            for number in range(rank * self.micro, (rank + 1) * self.micro):
                yield [(epoch, image) for image in batch[number * images : (number + 1) * images]]

    def _read(self, tokens: Callable[[], Iterator[list[Token]]]) -> Iterator[DetectionBatch]:
        read = read_batches(self.samples, tokens, self.workers)
        for samples, batch in zip(read, tokens(), strict=True):
            yield DetectionBatch(
                images=[image.to(self.device, non_blocking=True) for image, _ in samples],
                targets=[
                    {name: value.to(self.device, non_blocking=True) for name, value in t.items()}
                    for _, t in samples
                ],
                indices=torch.tensor([image for _, image in batch]),
            )


def check_micro_batches(images: int, batch_size: int, micro_batches: int) -> None:
    """Refuse a batch larger than the data set or not divisible into its micro-batches."""
    if batch_size > images:
        raise DataError(
            f"the batch size is {batch_size}, and there are {images} training images",
            "Choose a batch size between 1 and the number of images.",
        )
    if batch_size % micro_batches:
        raise DataError(
            f"the batch size {batch_size} cannot be divided into {micro_batches} equal "
            "micro-batches (processes x accumulation)",
            f"Choose a multiple of {micro_batches}.",
        )
