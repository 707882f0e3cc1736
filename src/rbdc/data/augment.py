"""How images are changed before the model sees them, as an `Augmentation` says.

Two ways of doing it. timm's transforms take one image at a time and can do everything. Crops with
padding, flips and erasing can also be done to a whole batch of tensors at once, many times faster:
`Augmentation.batched` says whether that is all that is asked for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from timm.data import Mixup, create_transform
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import str_to_pil_interp
from torch import Tensor
from torchvision import transforms

from rbdc.data.randomness import derive_seed, generator, preserve_generators, set_seeds
from rbdc.errors import RecipeError
from rbdc.settings import Augmentation


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageFormat:
    """What a model takes."""

    channels: int
    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_pct: float
    interpolation: str

    def normalize(self, images: Tensor) -> Tensor:
        """uint8 to float, zero mean and unit deviation, as timm does it."""
        mean, std = (
            torch.tensor(value, device=images.device).view(-1, 1, 1) * 255
            for value in (self.mean, self.std)
        )
        return images.float().sub_(mean).div_(std)


def training_transform(settings: Augmentation, image: ImageFormat) -> Callable[[Any], Tensor]:
    """From a PIL image to uint8 (3, height, width); erasing and mixing come later, on the batch."""
    size = (image.height, image.width)
    try:
        crop, colours, last = create_transform(
            (3, *size),
            is_training=True,
            scale=settings.scale,
            ratio=settings.aspect_ratio,
            hflip=settings.hflip,
            vflip=settings.vflip,
            color_jitter=settings.color_jitter or None,
            auto_augment=settings.aa,
            interpolation=settings.train_interpolation,
            mean=tuple(image.mean * (3 // image.channels)),
            std=tuple(image.std * (3 // image.channels)),
            use_prefetcher=True,
            separate=True,
        )
    except (AssertionError, ValueError, KeyError, IndexError) as error:  # timm's, for a wrong aa
        raise RecipeError(
            f"timm cannot read the augmentation {settings.aa!r}: {error}",
            "For example rand-m9-mstd0.5-inc1, augmix-m5-w4-d2 or original-mstd0.5.",
        ) from None
    if settings.scale is None:
        crop = transforms.Compose(
            [
                transforms.Resize(size, interpolation=str_to_pil_interp(_one(settings))),
                transforms.RandomCrop(size, padding=settings.crop_padding or None),
                transforms.RandomHorizontalFlip(settings.hflip),
                transforms.RandomVerticalFlip(settings.vflip),
            ]
        )
    transform: Callable[[Any], Tensor] = transforms.Compose([crop, colours, last])
    return transform


def _one(settings: Augmentation) -> str:
    chosen = settings.train_interpolation
    return "bicubic" if chosen == "random" else chosen


def evaluation_transform(image: ImageFormat) -> Callable[[Any], Tensor]:
    transform: Callable[[Any], Tensor] = create_transform(
        (3, image.height, image.width),
        is_training=False,
        crop_pct=image.crop_pct,
        interpolation=image.interpolation,
        use_prefetcher=True,
    )
    return transform


class Windows:
    """All crops of padded images in memory, as one view: cutting a batch is one gather."""

    def __init__(self, images: Tensor, settings: Augmentation) -> None:
        pad, (height, width) = settings.crop_padding, images.shape[-2:]
        self.settings = settings
        self.views = (
            torch.nn.functional.pad(images, (pad, pad, pad, pad))
            .unfold(2, height, 1)
            .unfold(3, width, 1)
        )

    def batch(self, chosen: Tensor, positions: Tensor, batch_size: int, *place: int) -> Tensor:
        """Images `chosen`, which stand at `positions` of the global batch at `place`.

        What is drawn is drawn for the whole global batch: who computes which part of it makes no
        difference.
        """
        draw = generator(*place, "crop")
        shifts = 2 * self.settings.crop_padding + 1
        top, left = torch.randint(shifts, (2, batch_size), generator=draw)[:, positions]
        flips = torch.rand(2, batch_size, generator=draw)[:, positions]
        device = self.views.device
        chosen, top, left, flips = (x.to(device) for x in (chosen, top, left, flips))
        images = self.views[chosen, :, top, left]
        for axis, flip, probability in (
            (-1, flips[0], self.settings.hflip),
            (-2, flips[1], self.settings.vflip),
        ):
            if probability:
                mask = (flip < probability).view(-1, 1, 1, 1)
                images = torch.where(mask, images.flip(axis), images)
        return images


class BatchChanges:
    """What is done to normalized batches on either way: random erasing, then mixup and cutmix."""

    def __init__(self, settings: Augmentation, classes: int) -> None:
        self.reprob = settings.reprob
        self.erase = RandomErasing(
            probability=1.0,
            mode=settings.remode,
            max_count=settings.recount,
            num_splits=0,
            device="cpu",  # drawn where the generator is seeded, whatever the images are on
        )
        self.mix = (
            Mixup(
                mixup_alpha=settings.mixup,
                cutmix_alpha=settings.cutmix,
                prob=settings.mixup_prob,
                switch_prob=settings.mixup_switch_prob,
                label_smoothing=0.0,  # the loss smooths
                num_classes=classes,
            )
            if settings.mixes
            else None
        )

    def __call__(
        self, images: Tensor, labels: Tensor, positions: Tensor, batch_size: int, *place: int
    ) -> tuple[Tensor, Tensor]:
        """Images and targets, changed as their positions in the global batch at `place` say."""
        if not self.reprob and self.mix is None:
            return images, labels
        with preserve_generators():
            if self.reprob:
                draw = torch.rand(batch_size, generator=generator(*place, "erase")).tolist()
                for row, position in enumerate(positions.tolist()):
                    if draw[position] < self.reprob:
                        set_seeds(derive_seed(*place, "erase", position))
                        self.erase(images[row])
            if self.mix is not None:
                set_seeds(derive_seed(*place, "mix"))
                images, labels = self.mix(images, labels)
        return images, labels
