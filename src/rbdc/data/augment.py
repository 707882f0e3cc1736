"""Transform images as an `Augmentation` describes.

There are two implementations. timm's transforms take one image at a time and support every setting.
Padded crops, flips and erasing can also be applied to a whole batch of tensors at once, many times
faster. `Augmentation.batched` is True if the settings need nothing else.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image, ImageEnhance
from timm.data import Mixup, create_transform
from timm.data.random_erasing import RandomErasing
from timm.data.transforms import RandomResizedCropAndInterpolation, str_to_pil_interp
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


@dataclass(frozen=True, slots=True)
class Crop:
    """A part of an image that is resized to the model's input size."""

    box: tuple[int, int, int, int]
    """Left, upper, right and lower edge, in pixels of the full image."""
    factor: int
    """The decoded image has 1/factor of the full image's height and width."""
    interpolation: Image.Resampling


class TrainingTransform:
    """Change one image as timm's training transforms do, without erasing and mixup.

    The random numbers and pixels are those of timm's own objects, with less overhead per image,
    which is most of the time for small images. The crop is drawn before the image is decoded, so
    that the decoder can reduce the image.
    """

    def __init__(self, settings: Augmentation, image: ImageFormat) -> None:
        self.settings, self.size = settings, (image.width, image.height)
        chosen = [settings.train_interpolation]
        if settings.train_interpolation == "random":
            chosen = ["bilinear", "bicubic"] if settings.scale else ["bicubic"]
        self.interpolations = [str_to_pil_interp(name) for name in chosen]
        self.pad = transforms.RandomCrop(image.shape[1:], padding=settings.crop_padding or None)
        self.flips = [
            (float(torch.tensor(share)), direction)  # torch compares in float32
            for share, direction in (
                (settings.hflip, Image.Transpose.FLIP_LEFT_RIGHT),
                (settings.vflip, Image.Transpose.FLIP_TOP_BOTTOM),
            )
            if share > 0 or settings.scale is None
        ]
        self.colours = [
            _Jitter(change) if isinstance(change, transforms.ColorJitter) else change
            for change in _colours(settings, image)
        ]

    def draw(self, image: Image.Image) -> Crop:
        """Draw the crop of an image that is not decoded yet, and reduce a JPEG if it allows it."""
        settings, (width, height) = self.settings, image.size
        top, left = 0, 0
        if settings.scale is not None:
            top, left, height, width = RandomResizedCropAndInterpolation.get_params(
                image, settings.scale, settings.aspect_ratio
            )
        known = self.interpolations
        interpolation = random.choice(known) if known[1:] else known[0]
        most = min(width // self.size[0], height // self.size[1])
        factor = _reduce(image, most) if most > 1 and settings.decode == "reduced" else 1
        return Crop((left, top, left + width, top + height), factor, interpolation)

    def apply(self, image: Image.Image, crop: Crop | None) -> Image.Image:
        """Return the transformed RGB image."""
        assert crop is not None
        image = _resized_crop(image, crop, self.size)
        if self.settings.scale is None:
            image = self.pad(image)
        for share, direction in self.flips:
            if torch.rand(1).item() < share:
                image = image.transpose(direction)
        for change in self.colours:
            image = change(image)
        return image


class EvaluationTransform:
    """Resize and crop one image as timm's evaluation transform does."""

    def __init__(self, image: ImageFormat) -> None:
        *changes, _to_tensor = create_transform(
            (3, image.height, image.width),
            is_training=False,
            crop_pct=image.crop_pct,
            interpolation=image.interpolation,
            use_prefetcher=True,
        ).transforms
        self.change = transforms.Compose(changes)

    def draw(self, image: Image.Image) -> None:
        """Draw nothing. Test images are decoded in full, as everywhere."""

    def apply(self, image: Image.Image, crop: Crop | None) -> Image.Image:  # noqa: ARG002
        """Return the transformed RGB image."""
        changed: Image.Image = self.change(image)
        return changed


Transform = TrainingTransform | EvaluationTransform


def to_tensor(images: Sequence[Image.Image], channels: int) -> Tensor:
    """Return RGB images of one size as uint8 (images, channels, height, width)."""
    width, height = images[0].size
    pixels = bytearray().join([image.tobytes() for image in images])
    tensor = torch.frombuffer(pixels, dtype=torch.uint8).view(-1, height, width, 3)
    return tensor[..., :channels].permute(0, 3, 1, 2).contiguous()


def _colours(settings: Augmentation, image: ImageFormat) -> list[Callable[[Any], Any]]:
    """Return timm's colour jitter or AutoAugment policy."""
    try:
        _, colours, _ = create_transform(
            (3, image.height, image.width),
            is_training=True,
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
    changes: list[Callable[[Any], Any]] = colours.transforms
    return changes


def _reduce(image: Image.Image, most: int) -> int:
    """Let the decoder of a JPEG divide height and width by 8, 4 or 2, at most by `most`.

    Return the divisor; it is 1 for other formats and for images that are decoded already.
    """
    factor = next(factor for factor in (8, 4, 2) if factor <= most)
    width, height = image.size
    reduced = image.draft(None, (width // factor, height // factor))
    return round(width / reduced[1][2]) if reduced and image.format == "JPEG" else 1


def _resized_crop(image: Image.Image, crop: Crop, size: tuple[int, int]) -> Image.Image:
    if crop.factor > 1:
        left, upper, right, lower = (edge / crop.factor for edge in crop.box)
        return image.resize(size, crop.interpolation, (left, upper, right, lower))
    if crop.box != (0, 0, *image.size):
        image = image.crop(crop.box)
    return image if image.size == size else image.resize(size, crop.interpolation)


class _Jitter:
    """Change brightness, contrast and saturation as torchvision's ColorJitter, a third faster."""

    def __init__(self, theirs: transforms.ColorJitter) -> None:
        assert theirs.hue is None
        self.ranges = theirs.brightness, theirs.contrast, theirs.saturation
        self.draw = theirs.get_params

    def __call__(self, image: Image.Image) -> Image.Image:
        order, *factors = self.draw(*self.ranges, None)
        for number in order.tolist():
            if factors[number] is not None:
                image = _ENHANCE[number](image).enhance(factors[number])
        return image


_ENHANCE = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)


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
