"""Seeds derived from a key such as (seed, "order", epoch), so that no generator state is saved."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np
import torch


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed for a key such as (seed, "order", epoch).

    Different keys give different seeds. The result is the same on every machine and in every
    version of Python.
    """
    digest = blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """Return a new torch generator seeded for a key. The global generator is not changed."""
    return torch.Generator().manual_seed(derive_seed(*parts))


def seed_torch(device: torch.device, *parts: int | str) -> None:
    """Seed torch's global generators for a key: the CPU's, and all others if one is trained on.

    Without a GPU, torch.manual_seed takes a fiftieth of a narrow model's step.
    """
    seed = derive_seed(*parts)
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def set_seeds(seed: int, *, numpy: bool = True) -> None:
    """Seed the Python, torch CPU and (optionally) numpy generators, which augmentations draw from.

    Seeding numpy takes longer than seeding both others. Of the per-image transforms, only
    RandAugment and similar policies draw from numpy.
    """
    random.seed(seed)
    if numpy:
        np.random.seed(seed % 2**32)  # noqa: NPY002 - timm draws from numpy's global generator
    torch.default_generator.manual_seed(seed)


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Restore the global Python, numpy and torch CPU generators when the context ends."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])
