"""Make the embedded data set: 12,000 images of Fashion-MNIST, class-balanced.

    python scripts/build_embedded_data.py /usr/share/datasets/fashion-mnist
    python scripts/build_embedded_data.py ~/data/FashionMNIST/raw      # torchvision's download

The folder holds Fashion-MNIST's four idx files, plain or gzipped (Debian: dataset-fashion-mnist).
Taken are the first 1,000 training and the first 200 test images of each class, in their order, so
the result does not depend on who builds it: its SHA-256 over pixels and labels is printed.
"""

import argparse
import hashlib
from pathlib import Path

import numpy as np

from rbdc.data.small import read_idx

TARGET = Path(__file__).parents[1] / "src/rbdc/data/embedded/fashion-mnist-12k.npz"
PER_CLASS = {"train": 1000, "test": 200}
FILES = {"train": "train", "test": "t10k"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    arrays: dict[str, np.ndarray] = {}
    for split, prefix in FILES.items():
        labels = read_idx(folder, f"{prefix}-labels-idx1-ubyte", axes=1).numpy()
        images = read_idx(folder, f"{prefix}-images-idx3-ubyte", axes=3).numpy()
        chosen = np.sort(
            np.concatenate([np.flatnonzero(labels == c)[: PER_CLASS[split]] for c in range(10)])
        )
        arrays[f"{split}_images"], arrays[f"{split}_labels"] = images[chosen], labels[chosen]
    TARGET.parent.mkdir(exist_ok=True)
    np.savez_compressed(TARGET, **arrays)  # type: ignore[arg-type]
    digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays.values()))
    print(f"{TARGET.name}: {TARGET.stat().st_size / 1e6:.2f} MB, sha256 {digest.hexdigest()}")


if __name__ == "__main__":
    main()
