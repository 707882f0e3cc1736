"""Hugging Face `datasets` as an image source (extra `rbdc[hub]`).

A row of a table may hold an image, or name a path or an address of one in a format of its choice.
`datasets` would fetch it, wait for a pipe, and start Ghostscript. So images are decoded here.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from rbdc.data.files import FORMATS, TEST, TRAIN
from rbdc.data.images import DataSet, ImageSource, check_splits, listed_fingerprint
from rbdc.disk import read_bytes
from rbdc.errors import DataError, not_installed

_ROWS = 1000  # of a table that are looked at together


@dataclass(frozen=True, kw_only=True, slots=True)
class TableImages(ImageSource):
    """The rows of a table, which are complete, though an image may still not decode."""

    table: Any
    """The table without decoding: an image is a row with `bytes` or a `path`."""
    column: str
    labels: tuple[int, ...]
    where: str
    fingerprint: str
    """That of the table as it was opened."""

    def read(self, index: int) -> Image.Image:
        row = self.table[index][self.column]
        if row is None or not (row["bytes"] or row["path"]):
            raise OSError("the row has no image")
        content = row["bytes"] or read_bytes(Path(row["path"]))  # a file; no address, no pipe
        image = Image.open(BytesIO(content), formats=FORMATS)
        return ImageOps.exif_transpose(image)  # as `datasets` does

    def name(self, index: int) -> str:
        return f"{self.where} row {index}"

    def suspects(self) -> list[int]:
        """Return the rows that have no bytes, and no path of a file."""
        found, start = [], 0
        for batch in self.table.with_format("arrow").iter(_ROWS):
            for rows in batch[self.column].chunks:
                empty, paths = rows.field("bytes").is_null(), rows.field("path")
                at = zip(empty.to_pylist(), paths.to_pylist(), strict=True)
                found += [start + i for i, (none, path) in enumerate(at)
                          if none and not (path and Path(path).is_file())]  # fmt: skip
                start += len(rows)
        return found


def is_saved_table(folder: Path) -> bool:
    """Return whether `datasets` wrote this folder with `save_to_disk`."""
    return (folder / "dataset_dict.json").exists()


def open_tables(name: str, *, download: bool = False) -> Any:
    """Open the tables of a data set of the hub, or of a folder that `save_to_disk` wrote."""
    try:
        import datasets
    except ImportError:
        raise not_installed("datasets", "hub", DataError) from None
    datasets.disable_progress_bars()
    saved = is_saved_table(Path(name))
    if Path(name).exists() and not saved and not download:
        raise DataError(
            f"{name} is a folder on this machine, and what it holds may name addresses",
            "Give the folder without hf:, or allow `datasets` to fetch with --data-download.",
        )
    try:
        with _network(download):
            return (datasets.load_from_disk if saved else datasets.load_dataset)(name)
    except Exception as error:  # `datasets` raises many types of errors
        raise DataError(
            f"{name} cannot be opened by `datasets`: {error}",
            "Check the name; allow the download with --data-download.",
        ) from None


def hub_data(name: str, *, download: bool = False) -> DataSet:
    """Open a data set of images of the hub by name, or a folder that `save_to_disk` wrote."""
    tables, saved = open_tables(name, download=download), is_saved_table(Path(name))
    train, test = (
        _images(name, tables, purpose, names)
        for purpose, names in (("training", TRAIN), ("test", TEST))
    )
    classes, others = (
        tuple(images.table.features[_column(name, images.table, "ClassLabel")].names)
        for images in (train, test)
    )
    if classes != others:
        raise DataError(
            f"{name} has different classes for training and testing",
            "Both splits must have the same classes in the same order.",
        )
    prints = [f"{images.fingerprint} {len(images)}" for images in (train, test)]
    short = Path(name).name if saved else f"hf:{name}"
    check_splits(name, train, test, len(classes))
    found = listed_fingerprint(classes, prints)
    return DataSet(
        name=short,
        train=train,
        test=test,
        class_names=classes,
        fingerprint=found,
        compared="the fingerprint that `datasets` has of its table",
    )


@contextmanager
def _network(allowed: bool) -> Iterator[None]:
    """Forbid downloads inside the context, unless allowed.

    `DownloadConfig.local_files_only` is not enough: `datasets` does not read it.
    """
    import datasets
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    if not allowed:
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def _images(name: str, tables: Any, purpose: str, names: Sequence[str]) -> TableImages:
    split = next((split for split in names if split in tables), None)
    if split is None:
        raise DataError(
            f"{name} has no {purpose} split among {', '.join(tables)}", "Name splits train, test."
        )
    table = tables[split].with_format(None)  # a saved table may be set to return tensors
    column = _column(name, table, "Image")
    return TableImages(
        table=table.cast_column(column, type(table.features[column])(decode=False)),
        column=column,
        labels=tuple(table[_column(name, table, "ClassLabel")]),
        where=f"{name} {split}",
        fingerprint=table._fingerprint,
    )


def _column(name: str, table: Any, kind: str) -> str:
    for column, feature in table.features.items():
        if type(feature).__name__ == kind:
            return str(column)
    raise DataError(f"{name} has no column of type {kind}", f"It has {table.features}."[:1000])
