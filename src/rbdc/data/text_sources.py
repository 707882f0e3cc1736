"""Open token data by name or path: text, files of token numbers, tables of `datasets`."""

import bz2
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from rbdc.data.hub import open_tables
from rbdc.data.text import TextData, text_data
from rbdc.data.tokenizer import CHARACTERS, Ids, Tokenizer, find_tokenizer
from rbdc.disk import read_bytes
from rbdc.errors import DataError

EMBEDDED = files("rbdc.data") / "embedded" / "shakespeare.txt.bz2"
TEST_SHARE = 0.1  # of a text without a test split: its end
_TEXTS = (".txt", ".md")
_TESTS = ("val", "valid", "validation", "test", "eval")


def embedded_text() -> str:
    """Return the text that comes with the package."""
    return bz2.decompress(EMBEDDED.read_bytes()).decode()


def open_text(
    name: str,
    *,
    length: int,
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    download: bool = False,
) -> TextData:
    """Open token data, in sequences of `length` tokens.

    `name` is `embedded`; a text file or a folder of text files, whose names say what is tested on
    (val, valid, test), or else the last tenth of the text; a file or folder of token numbers
    (train.bin and val.bin, two bytes each, or four where the name ends in .uint32.bin); hf:NAME or
    a folder saved by `datasets`, with a column `text`. Text is tokenized by `tokenizer`: characters
    (default), bpe:N, or the path of a tokenizer.json. `vocab_size` is the model's, if it is given.
    """
    if name == "embedded":
        return _of_text("embedded", *_split(embedded_text()), length, tokenizer, vocab_size)
    if name.startswith("hf:"):
        table = _table_texts(name.removeprefix("hf:"), download)
        return _of_text(name, *table, length, tokenizer, vocab_size)
    path = Path(name).expanduser()
    if (path / "dataset_dict.json").exists():
        return _of_text(path.name, *_table_texts(str(path), False), length, tokenizer, vocab_size)
    found = [path] if path.is_file() else sorted(p for p in path.glob("*") if p.is_file())
    bins = [p for p in found if p.suffix == ".bin"]
    if bins:
        return _of_tokens(path.name, bins, length, tokenizer, vocab_size)
    texts = [p for p in found if p.suffix in _TEXTS or path.is_file()]
    if not texts:
        raise DataError(
            f"no text is called {name!r}, and no text or token file is there",
            "Give embedded, a .txt file or a folder of them, train.bin and val.bin, or hf:NAME.",
        )
    return _of_text(path.name, *_read_texts(texts), length, tokenizer, vocab_size)


def _is_test(path: Path) -> bool:
    return any(path.name.split(".")[0].endswith(word) for word in _TESTS)


def _split(text: str) -> tuple[str, str]:
    cut = round((1 - TEST_SHARE) * len(text))
    return text[:cut], text[cut:]


def _read_texts(paths: list[Path]) -> tuple[str, str]:
    try:
        read = {path: read_bytes(path).decode() for path in paths}
    except (OSError, ValueError) as error:
        raise DataError(f"a text cannot be read as UTF-8: {error}", "Use UTF-8 text.") from None
    tests = [path for path in paths if _is_test(path)]
    if not tests or len(tests) == len(paths):
        return _split("\n".join(read.values()))
    train = "\n".join(text for path, text in read.items() if path not in tests)
    return train, "\n".join(read[path] for path in tests)


def _of_text(
    name: str, train: str, test: str, length: int, tokenizer: str | None, vocab_size: int | None
) -> TextData:
    made = find_tokenizer(tokenizer or CHARACTERS, train + test)
    _check_size(made, vocab_size)
    return text_data(
        name,
        made.encode(train),
        made.encode(test),
        length=length,
        vocab_size=vocab_size or made.vocab_size,
        tokenizer=made,
        test_bytes=len(test.encode()),
    )


def _check_size(tokenizer: Tokenizer, vocab_size: int | None) -> None:
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise DataError(
            f"the tokenizer {tokenizer.name} has {tokenizer.vocab_size:,} tokens and the model's "
            f"embedding {vocab_size:,}",
            "Leave vocab_size out: the tokenizer sets it.",
        )


def _of_tokens(
    name: str, paths: list[Path], length: int, tokenizer: str | None, vocab_size: int | None
) -> TextData:
    made = find_tokenizer(tokenizer, None) if tokenizer else None
    if made is not None:
        _check_size(made, vocab_size)
    size = vocab_size or (made.vocab_size if made else None)
    if size is None:
        raise DataError(
            f"{name} has numbers of tokens, and nothing says how many tokens there are",
            "Give --model-kwargs vocab_size=N, or --tokenizer PATH.",
        )
    tests = [path for path in paths if _is_test(path)]
    if tests and len(tests) < len(paths):
        train = _mapped([path for path in paths if path not in tests])
        test = _mapped(tests)
    else:
        every = _mapped(paths)
        cut = round((1 - TEST_SHARE) * len(every))
        train, test = every[:cut], every[cut:]
    return text_data(name, train, test, length=length, vocab_size=size, tokenizer=made)


def _mapped(paths: list[Path]) -> Ids:
    """Return the numbers in a file, memory-mapped; several files are read and joined."""
    parts = []
    for path in paths:
        kind = np.dtype(np.uint32 if path.name.endswith(".uint32.bin") else np.uint16)
        size = path.stat().st_size
        if not size or size % kind.itemsize:
            raise DataError(
                f"{path} has {size:,} bytes, which are no numbers of {kind.itemsize} bytes",
                "Write numpy's uint16, or uint32 into a file that ends in .uint32.bin.",
            )
        parts.append(np.memmap(path, dtype=kind, mode="r"))
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _table_texts(name: str, download: bool) -> tuple[str, str]:
    """Return the training and the test text of a table's column `text`."""
    tables = open_tables(name, download=download)
    found = {split: "\n".join(text or "" for text in table.with_format(None)["text"])
             for split, table in tables.items() if _has_text(table)}  # fmt: skip
    if "train" not in found:
        raise DataError(
            f"{name} has no split `train` with a column `text`", "Use a data set of texts."
        )
    tests = [text for split, text in found.items() if split in _TESTS]
    return (found["train"], tests[0]) if tests else _split(found["train"])


def _has_text(table: Any) -> bool:
    """Return whether a column `text` holds text: an image there could name an address."""
    kind = table.features.get("text")
    return getattr(kind, "dtype", None) in ("string", "large_string")
