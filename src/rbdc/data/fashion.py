"""The embedded data: real images that come with the package (see embedded/LICENSE)."""

from dataclasses import dataclass
from importlib.resources import as_file, files

import numpy as np
import torch
from torch import Tensor

CLASS_NAMES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSet:
    """Images in memory, uint8 (images, channels, height, width), and their classes."""

    images: Tensor
    labels: Tensor
    class_names: tuple[str, ...]


def embedded(split: str) -> ImageSet:
    """10,000 "train" or 2,000 "test" images of Fashion-MNIST, 28 x 28, ten balanced classes."""
    with (
        as_file(files("rbdc.data") / "embedded" / "fashion-mnist-12k.npz") as path,
        np.load(path, allow_pickle=False) as arrays,
    ):
        return ImageSet(
            images=torch.from_numpy(arrays[f"{split}_images"]).unsqueeze(1),
            labels=torch.from_numpy(arrays[f"{split}_labels"]).long(),
            class_names=CLASS_NAMES,
        )
