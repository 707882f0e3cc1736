"""Hugging Face `datasets` as an image source (the extra `rbdc[hub]`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from rbdc.data.files import TEST, TRAIN
from rbdc.data.images import DataSet, check_splits, listed_fingerprint
from rbdc.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class TableImages:
    """An ImageSource of the rows of a table."""

    table: Any
    column: str
    labels: tuple[int, ...]
    split: str

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> Image.Image:
        image: Image.Image = self.table[index][self.column]
        return image

    def name(self, index: int) -> str:
        return f"row {index} of {self.split}"

    def suspects(self) -> list[int]:
        return []  # a table that opens has whole rows; an image in it may still not decode

    def without(self, indices: Sequence[int]) -> "TableImages":
        out = set(indices)
        kept = [i for i in range(len(self)) if i not in out]
        return TableImages(
            table=self.table.select(kept),
            column=self.column,
            labels=tuple(self.labels[i] for i in kept),
            split=self.split,
        )


def is_saved_table(folder: Path) -> bool:
    """Whether `datasets` wrote this folder (`save_to_disk`)."""
    return (folder / "dataset_dict.json").exists()


def hub_data(name: str, *, download: bool = False) -> DataSet:
    """A data set of the hub by its name, or one on disk that `save_to_disk` wrote."""
    try:
        import datasets
    except ImportError:
        raise DataError(
            "the package `datasets` is not installed", "Install the extra: pip install 'rbdc[hub]'."
        ) from None
    datasets.disable_progress_bars()
    try:
        if is_saved_table(Path(name)):
            tables = datasets.load_from_disk(name)
        else:
            mode = datasets.DownloadConfig(local_files_only=not download)
            tables = datasets.load_dataset(name, download_config=mode)
    except Exception as error:  # a hub fails in many ways
        raise DataError(
            f"{name} cannot be opened by `datasets`: {error}",
            "Check the name; allow the download with --data-download.",
        ) from None
    splits = {
        purpose: next((split for split in names if split in tables), None)
        for purpose, names in (("training", TRAIN), ("test", TEST))
    }
    for purpose, split in splits.items():
        if split is None:
            raise DataError(
                f"{name} has no {purpose} split among {', '.join(tables)}",
                "Name splits train, test.",
            )
    train, test = (_images(name, tables[split], str(split)) for split in splits.values())
    check_splits(name, train, test)
    classes = tuple(train.table.features[_column(name, train.table, "ClassLabel")].names)
    prints = [
        f"{images.split} {images.table._fingerprint} {len(images)}" for images in (train, test)
    ]
    return DataSet(
        name=Path(name).name,
        train=train,
        test=test,
        class_names=classes,
        fingerprint=listed_fingerprint(classes, prints),
    )


def _images(name: str, table: Any, split: str) -> TableImages:
    return TableImages(
        table=table,
        column=_column(name, table, "Image"),
        labels=tuple(table[_column(name, table, "ClassLabel")]),
        split=split,
    )


def _column(name: str, table: Any, kind: str) -> str:
    for column, feature in table.features.items():
        if type(feature).__name__ == kind:
            return str(column)
    raise DataError(f"{name} has no column of type {kind}", f"It has {table.features}.")
