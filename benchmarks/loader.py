"""CPU time of the data loader: per image, of reduced JPEGs, and of processes that share batches.

    python benchmarks/loader.py images --data FOLDER   # FOLDER/train/CLASS/*.jpg, such as CIFAR-10
    python benchmarks/loader.py share --data FOLDER
    python benchmarks/loader.py jpegs --data FOLDER    # enlarged to the size of ImageNet's, or more

All figures are ratios of CPU time, medians of `--turns` turns in which both take turns, so that
other work on the machine matters little.
- images: ours over timm's transforms on the same decoded images, both with our seeding.
- jpegs: decoding, crop and resize with `decode: reduced`, and by torchvision, over `decode: full`;
  and the mean difference of pixels (of 255) and the PSNR of crops that were reduced.
- share: `--processes` that read the same batches, over the same without sharing; what one process
  alone pays; and the images decoded, over one pass.
"""

import argparse
import io
import math
import multiprocessing
import os
import random
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from PIL import Image
from timm.data import create_transform
from torchvision.io import decode_jpeg
from torchvision.transforms import functional

from rbdc.data import DataSet, ImageFormat, TrainingBatches, open_data
from rbdc.data.augment import TrainingTransform
from rbdc.data.randomness import derive_seed, set_seeds
from rbdc.data.samples import Order, Samples
from rbdc.data.sources import read_rgb, to_rgb
from rbdc.settings import Augmentation

BATCH, STEPS = 256, 8
RECIPES = {
    "resized crop, flip": Augmentation(color_jitter=0.0),
    "and colour jitter": Augmentation(),
    "and RandAugment": Augmentation(aa="rand-m9-mstd0.5-inc1"),
}


def image_format(side: int) -> ImageFormat:
    return ImageFormat(
        channels=3,
        height=side,
        width=side,
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
        crop_pct=1.0,
        interpolation="bicubic",
    )


def seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def ratios(works: Sequence[Callable[[], object]], turns: int) -> list[float]:
    """Return the CPU time of each work over that of the last one."""
    times = [[seconds(work) for work in works] for _ in range(turns)]
    return [statistics.median(row[i] / row[-1] for row in times) for i in range(len(works) - 1)]


def images(data: DataSet, turns: int, side: int) -> None:
    order = Order(images=len(data.train), seed=0, batch_size=BATCH, repeats=0)
    tokens = order.tokens(0, torch.arange(BATCH))
    for name, settings in RECIPES.items():
        made_for = image_format(side)
        transform = TrainingTransform(settings, made_for)
        samples = Samples(data.train, transform, 3, False, 0, bool(settings.aa))
        theirs = create_transform(
            (3, side, side),
            is_training=True,
            color_jitter=settings.color_jitter or None,
            auto_augment=settings.aa,
            interpolation=settings.train_interpolation,
            mean=made_for.mean,
            use_prefetcher=True,
        )

        def timm(theirs: Callable[[Image.Image], torch.Tensor] = theirs) -> torch.Tensor:
            made = []
            for epoch, position, index in tokens:
                image = read_rgb(data.train, index)
                set_seeds(derive_seed(0, "sample", epoch, position))
                made.append(torch.as_tensor(theirs(image)))
            return torch.stack(made)

        assert torch.equal(samples.read(tokens)[0], timm())
        (ratio,) = ratios([partial(samples.read, tokens), timm], turns)
        print(f"{name:20} {ratio:.2f} of the CPU time with timm's transforms, bitwise equal")


def jpegs(data: DataSet, turns: int, side: int) -> None:
    crop = Augmentation(color_jitter=0.0, hflip=0.0, train_interpolation="bicubic")
    reduced, full = (
        TrainingTransform(replace(crop, decode=decode), image_format(side))
        for decode in ("reduced", "full")
    )
    chosen = random.Random(0).sample(range(len(data.train)), min(40, len(data.train)))
    for short in (375, 500, 768, 1024):
        files = [_enlarged(read_rgb(data.train, index), short) for index in chosen]

        def ours(transform: TrainingTransform, files: list[bytes] = files) -> list[Image.Image]:
            return [_read(transform, seed, file)[0] for seed, file in enumerate(files)]

        def torchvision(files: list[bytes] = files) -> None:
            for seed, file in enumerate(files):
                set_seeds(seed)
                image = decode_jpeg(torch.frombuffer(bytearray(file), dtype=torch.uint8))
                left, top, right, lower = full.draw(Image.open(io.BytesIO(file))).box
                place = top, left, lower - top, right - left
                functional.resized_crop(image, *place, [side, side], antialias=True)

        found = ratios([lambda: ours(reduced), torchvision, lambda: ours(full)], turns)
        differences, factors = [], []
        for seed, file in enumerate(files):
            (one, factor), (other, _) = (_read(each, seed, file) for each in (reduced, full))
            factors.append(factor)
            if factor > 1:
                differences.append(np.asarray(one).astype(float) - np.asarray(other))
        psnr = [10 * math.log10(255**2 / max(1e-9, float((d**2).mean()))) for d in differences]
        print(
            f"short side {short} to {side} px: reduced {found[0]:.2f}, torchvision {found[1]:.2f} "
            f"of full; {len(differences)} of {len(files)} reduced"
            + (
                f", mean difference {np.mean([np.abs(d).mean() for d in differences]):.2f}, "
                f"PSNR {statistics.median(psnr):.1f} dB"
                if differences
                else ""
            )
        )


def _enlarged(image: Image.Image, short: int) -> bytes:
    scale, file = short / min(image.size), io.BytesIO()
    size = round(image.width * scale), round(image.height * scale)
    image.resize(size, Image.Resampling.LANCZOS).save(file, "jpeg", quality=90)
    return file.getvalue()


def _read(transform: TrainingTransform, seed: int, file: bytes) -> tuple[Image.Image, int]:
    set_seeds(seed)
    image = Image.open(io.BytesIO(file))
    crop = transform.draw(image)
    return transform.apply(to_rgb(image), crop), crop.factor


def share(data: DataSet, turns: int, side: int, processes: int, workers: int) -> None:
    for count in (1, processes):
        rows = []
        for turn in range(turns):
            seed = 1000 * os.getpid() + turn
            both = [_group(data, side, count, workers, seed, share) for share in (True, False)]
            rows.append([a / b for a, b in zip(*both, strict=True)])
        wall, cpu, decoded = (statistics.median(column) for column in zip(*rows, strict=True))
        print(
            f"{count} process{'es' * (count > 1)}, {workers} workers each: {cpu:.3f} of the CPU "
            f"time, {wall:.2f} of the time, {decoded:.3f} of the images decoded without sharing"
        )


def _group(
    data: DataSet, side: int, processes: int, workers: int, seed: int, share: bool
) -> tuple[float, float, float]:
    """Return seconds, CPU seconds and images decoded of processes on one stream of batches."""
    context = multiprocessing.get_context("fork")
    decoded = context.Value("q", 0)

    def read() -> None:
        made = TrainingBatches(
            data,
            RECIPES["resized crop, flip"],
            image_format(side),
            seed=seed,
            batch_size=BATCH,
            workers=workers,
            share=share,
        )
        for micro in made.from_step(0, STEPS * 4):
            with decoded.get_lock():
                decoded.value += micro[0].decoded

    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    members = [context.Process(target=read) for _ in range(processes)]
    for member in members:
        member.start()
    for member in members:
        member.join()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - began, cpu, decoded.value


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["images", "jpegs", "share"])
    parser.add_argument("--data", required=True)
    parser.add_argument("--side", type=int, default=0, help="input size; by default 32, jpegs 224")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(1)
    data = open_data(given.data)
    side = given.side or (224 if given.what == "jpegs" else 32)
    if given.what == "images":
        images(data, given.turns, side)
    elif given.what == "jpegs":
        jpegs(data, given.turns, side)
    else:
        share(data, given.turns, side, given.processes, given.workers)


if __name__ == "__main__":
    main()
