"""Transform images as an `Augmentation` describes.

There are two implementations. timm's transforms take one image at a time and support every setting.
Padded crops, flips and erasing can also be applied to a whole batch of tensors at once, many times
faster. `Augmentation.batched` is True if the settings need nothing else.
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
    """The input format of a model: size, channels and normalization."""

    channels: int
    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_pct: float
    interpolation: str

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        return self.channels, self.height, self.width

    def normalize(self, images: Tensor) -> Tensor:
        """Convert uint8 images to float and normalize them by mean and std, as timm does."""
        mean, std = (
            torch.tensor(value, device=images.device).view(-1, 1, 1) * 255
            for value in (self.mean, self.std)
        )
        return images.float().sub_(mean).div_(std)


def training_transform(settings: Augmentation, image: ImageFormat) -> Callable[[Any], Tensor]:
    """Return a transform from a PIL image to uint8 (3, height, width), no erasing or mixup."""
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
    except (AssertionError, ValueError, LookupError) as error:  # what timm raises for a wrong aa
        raise RecipeError(
            f"timm cannot read the augmentation {settings.aa!r}: {error}",
            "For example rand-m9-mstd0.5-inc1, augmix-m5-w4-d2 or original-mstd0.5.",
        ) from None
    if settings.scale is None:
        chosen = settings.train_interpolation
        crop = transforms.Compose(
            [
                transforms.Resize(
                    size, str_to_pil_interp("bicubic" if chosen == "random" else chosen)
                ),
                transforms.RandomCrop(size, padding=settings.crop_padding or None),
                transforms.RandomHorizontalFlip(settings.hflip),
                transforms.RandomVerticalFlip(settings.vflip),
            ]
        )
    transform: Callable[[Any], Tensor] = transforms.Compose([crop, colours, last])
    return transform


def evaluation_transform(image: ImageFormat) -> Callable[[Any], Tensor]:
    """Return timm's evaluation transform from a PIL image to uint8 (3, height, width)."""
    transform: Callable[[Any], Tensor] = create_transform(
        (3, image.height, image.width),
        is_training=False,
        crop_pct=image.crop_pct,
        interpolation=image.interpolation,
        use_prefetcher=True,
    )
    return transform


class Windows:
    """Random crops and flips of images in memory. All crops are one view: a batch is one gather."""

    def __init__(self, images: Tensor, settings: Augmentation) -> None:
        pad, (height, width) = settings.crop_padding, images.shape[-2:]
        self.settings = settings
        self.views = (
            torch.nn.functional.pad(images, (pad, pad, pad, pad))
            .unfold(2, height, 1)
            .unfold(3, width, 1)
        )

    def batch(self, chosen: Tensor, positions: Tensor, batch_size: int, *key: int) -> Tensor:
        """Return crops of the images `chosen`, which are at `positions` of the global batch.

        Random numbers are drawn from `key` for the whole global batch, so the result does not
        depend on how it is divided among processes.
        """
        draw = generator(*key, "crop")
        shifts = 2 * self.settings.crop_padding + 1
        top, left = torch.randint(shifts, (2, batch_size), generator=draw)[:, positions]
        flips = torch.rand(2, batch_size, generator=draw)[:, positions]
        device = self.views.device
        chosen, top, left, flips = (x.to(device) for x in (chosen, top, left, flips))
        images = self.views[chosen, :, top, left]
        rates = self.settings.hflip, self.settings.vflip
        for axis, flip, probability in zip((-1, -2), flips, rates, strict=True):
            if probability:
                mask = (flip < probability).view(-1, 1, 1, 1)
                images = torch.where(mask, images.flip(axis), images)
        return images


class BatchChanges:
    """Random erasing, then mixup and cutmix, of a normalized batch, for both implementations."""

    def __init__(self, settings: Augmentation, classes: int) -> None:
        self.reprob = settings.reprob
        self.erase = RandomErasing(
            probability=1.0,
            mode=settings.remode,
            max_count=settings.recount,
            num_splits=0,
            device="cpu",  # only the CPU generator is seeded, whatever device the images are on
        )
        self.mix = (
            Mixup(
                mixup_alpha=settings.mixup,
                cutmix_alpha=settings.cutmix,
                prob=settings.mixup_prob,
                switch_prob=settings.mixup_switch_prob,
                label_smoothing=0.0,  # the loss applies label smoothing
                num_classes=classes,
            )
            if settings.mixes
            else None
        )

    def __call__(
        self, images: Tensor, labels: Tensor, positions: Tensor, batch_size: int, *key: int
    ) -> tuple[Tensor, Tensor]:
        """Return changed images and targets. What is drawn depends on `key` and the positions."""
        if not self.reprob and self.mix is None:
            return images, labels
        with preserve_generators():
            if self.reprob:
                draw = torch.rand(batch_size, generator=generator(*key, "erase")).tolist()
                for row, position in enumerate(positions.tolist()):
                    if draw[position] < self.reprob:
                        set_seeds(derive_seed(*key, "erase", position))
                        self.erase(images[row])
            if self.mix is not None:
                set_seeds(derive_seed(*key, "mix"))
                images, labels = self.mix(images, labels)
        return images, labels
