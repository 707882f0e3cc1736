"""Randomness as a function of where it is used: never of what ran before."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np
import torch


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from a place, such as (seed, "order", epoch). Different places, different
    seeds, on every machine and in every version of Python."""
    digest = blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """A generator of its own for a place; the global one is not touched."""
    return torch.Generator().manual_seed(derive_seed(*parts))


def set_seeds(seed: int, *, numpy: bool = True) -> None:
    """Seed the three generators that augmentations draw from (CUDA's are left alone). numpy's takes
    longer than both others; of what happens to one image only RandAugment and its kin use it."""
    random.seed(seed)
    if numpy:
        np.random.seed(seed % 2**32)  # noqa: NPY002 - timm draws from numpy's global generator
    torch.default_generator.manual_seed(seed)


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Whatever is seeded and drawn inside, the generators go on outside as if nothing was."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])
