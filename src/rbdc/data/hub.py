"""Hugging Face `datasets` as an image source (extra `rbdc[hub]`)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from rbdc.data.files import TEST, TRAIN
from rbdc.data.images import DataSet, ImageSource, check_splits, listed_fingerprint
from rbdc.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class TableImages(ImageSource):
    """The rows of a table, which are complete, though an image may still not decode."""

    table: Any
    column: str
    labels: tuple[int, ...]
    where: str

    def read(self, index: int) -> Image.Image:
        image: Image.Image | None = self.table[index][self.column]
        if image is None:
            raise OSError("the row has no image")
        return image

    def name(self, index: int) -> str:
        return f"{self.where} row {index}"


def is_saved_table(folder: Path) -> bool:
    """Return whether `datasets` wrote this folder with `save_to_disk`."""
    return (folder / "dataset_dict.json").exists()


def hub_data(name: str, *, download: bool = False) -> DataSet:
    """Open a data set of the hub by name, or a folder that `save_to_disk` wrote."""
    try:
        import datasets
    except ImportError:
        raise DataError(
            "the package `datasets` is not installed", "Install the extra: pip install 'rbdc[hub]'."
        ) from None
    datasets.disable_progress_bars()
    saved = is_saved_table(Path(name))
    try:
        with _network(download):
            tables = (datasets.load_from_disk if saved else datasets.load_dataset)(name)
    except Exception as error:  # `datasets` raises many types of errors
        raise DataError(
            f"{name} cannot be opened by `datasets`: {error}",
            "Check the name; allow the download with --data-download.",
        ) from None
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
    prints = [f"{images.table._fingerprint} {len(images)}" for images in (train, test)]
    short = Path(name).name if saved else f"hf:{name}"
    check_splits(name, train, test, len(classes))
    found = listed_fingerprint(classes, prints)
    return DataSet(name=short, train=train, test=test, class_names=classes, fingerprint=found)


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
    return TableImages(
        table=table,
        column=_column(name, table, "Image"),
        labels=tuple(table[_column(name, table, "ClassLabel")]),
        where=f"{name} {split}",
    )


def _column(name: str, table: Any, kind: str) -> str:
    for column, feature in table.features.items():
        if type(feature).__name__ == kind:
            return str(column)
    raise DataError(f"{name} has no column of type {kind}", f"It has {table.features}.")
