"""Time a tree whose siblings share a pass over the data against one whose siblings do not.

    python benchmarks/shared_pass.py CIFAR [--turns 3] [--train 2000] [--test 400]

CIFAR is a folder of JPEG files (train/CLASS, test/CLASS); a part of it is trained on, with one data
worker, which is the limit. Both trees have the same models, epochs and updates: two steps, ratio 2.
Prints the medians of the ratios (shared / separate) of seconds and of images decoded. The images
decoded should be (1 + 1/2 + 1/4) / (1 + 2/2 + 4/4) = 0.58.
"""

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import rbdc

SETTINGS: dict[str, Any] = {
    "model": "resnet18d",
    "model_kwargs": {"channels": [8, 16, 32, 64], "stem_width": 8, "layers": [1, 1, 1, 1]},
    "img_size": 24,
    "steps": 2,
    "grow": ["width"],
    "ratio": 2,
    "with_baseline": False,
    "scale": (0.6, 1.0),
    "aa": "rand-m9-mstd0.5-inc1",
    "batch_size": 400,
    "crop_padding": 0,
    "eval_epochs": 100,
    "fuse": "off",
}


def part_of(source: Path, target: Path, images: dict[str, int]) -> None:
    """Link some images of each split, the same number for each class."""
    draw = random.Random(0)
    for split, number in images.items():
        classes = sorted(path for path in (source / split).iterdir() if path.is_dir())
        for folder in classes:
            (target / split / folder.name).mkdir(parents=True)
            for path in draw.sample(sorted(folder.iterdir()), number // len(classes)):
                (target / split / folder.name / path.name).symlink_to(path)


def turn(data: Path, batches: str, epochs: int) -> tuple[float, int]:
    """Train a tree; return its seconds and the images that were decoded."""
    machine = rbdc.Machine(device="cpu", workers=1, threads=1, tensorboard=False)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        result = rbdc.train(
            Path(folder) / "run",
            machine=machine,
            jobs=1,
            data=str(data),
            batches=batches,
            epochs=epochs,
            budget=None,
            **SETTINGS,
        )
        return time.perf_counter() - began, result["images_decoded"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cifar", type=Path)
    for name, default in {"turns": 3, "train": 2000, "test": 400, "epochs": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        part_of(options.cifar, data, {"train": options.train, "test": options.test})
        ratios = []
        for number in range(options.turns):
            order = ("shared", "separate") if number % 2 else ("separate", "shared")
            found = {batches: turn(data, batches, options.epochs) for batches in order}
            pairs = zip(found["shared"], found["separate"], strict=True)
            ratios.append([mine / theirs for mine, theirs in pairs])
            print(f"turn {number + 1}: time {ratios[-1][0]:.2f}, decoded {ratios[-1][1]:.2f}")
        times, decoded = zip(*ratios, strict=True)
        print(
            f"shared / separate: time {statistics.median(times):.2f} ({min(times):.2f} to "
            f"{max(times):.2f} in {len(times)} turns), images decoded "
            f"{statistics.median(decoded):.2f}"
        )


if __name__ == "__main__":
    main()
