"""Turn text into tokens: by characters, by a small BPE, or by a tokenizer.json of the user's.

A tokenizer is its `tokenizer.json`, the format of the library `tokenizers`, so that an exported
model has it beside its weights and transformers loads both.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from rbdc.disk import read_bytes
from rbdc.errors import DataError, RbdcError

Ids = np.ndarray[Any, np.dtype[Any]]
FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
CHARACTERS, BPE = "characters", "bpe:"
_FEWEST, _MOST = 257, 65_536  # tokens of a BPE that is made here: all bytes and more


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer, defined by the text of its tokenizer.json."""

    name: str
    text: str = field(repr=False)
    by_table: bool = False
    """Whether each character is a token, and nothing else is."""

    @property
    def files(self) -> dict[str, str]:
        """Return the files that transformers' AutoTokenizer reads, by name."""
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }
        return {FILE: self.text, CONFIG: json.dumps(config)}

    @property
    def fingerprint(self) -> str:
        """Return a digest of everything that decides tokens."""
        return sha256(self.text.encode()).hexdigest()

    @cached_property
    def _library(self) -> Any:
        return _tokenizers().Tokenizer.from_str(self.text)

    @cached_property
    def vocab_size(self) -> int:
        """Return the number of tokens."""
        return int(self._library.get_vocab_size())

    def encode(self, text: str) -> Ids:
        """Return the tokens of a text."""
        if self.by_table:  # a thousand times as fast
            return _looked_up(text, json.loads(self.text)["model"]["vocab"])
        with _errors_of(self.name):
            ids = self._library.encode(text, add_special_tokens=False).ids
        if ids and max(ids) >= self.vocab_size:
            raise DataError(
                f"the tokenizer {self.name} has {self.vocab_size:,} tokens, and one of them has "
                f"number {max(ids):,}",
                "Use a tokenizer.json whose tokens are numbered without gaps.",
            )
        return np.asarray(ids, dtype=token_type(self.vocab_size))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        return str(self._library.decode(list(ids), skip_special_tokens=False))


def token_type(vocab_size: int) -> type[Any]:
    """Return the smallest type of numbers for a vocabulary."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise DataError(
            "the package `tokenizers` is not installed",
            "Install the extra: pip install 'rbdc[language]'.",
        ) from None
    return tokenizers


def _code_points(text: str) -> Ids:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)


def _looked_up(text: str, vocabulary: dict[str, int]) -> Ids:
    points, known = _code_points(text), np.array(sorted(map(ord, vocabulary)), dtype=np.uint32)
    at = np.minimum(np.searchsorted(known, points), len(known) - 1)
    if (wrong := np.flatnonzero(known[at] != points)).size:
        raise DataError(
            f"the character {text[wrong[0]]!r} at {wrong[0]} is not in the vocabulary",
            "Use --tokenizer bpe:N, which knows every byte, or train on a text that has it.",
        )
    numbers = np.array([vocabulary[chr(point)] for point in known], dtype=token_type(len(known)))
    result: Ids = numbers[at]
    return result


def find_tokenizer(name: str, text: str | None) -> Tokenizer:
    """Return the tokenizer of this name: characters, bpe:N (made of `text`), or a path."""
    if name == CHARACTERS or name.startswith(BPE):
        if text is None:
            raise DataError(
                f"--tokenizer {name} is made of a text, and the data has tokens",
                "Give the tokenizer.json that the tokens were made with, or none.",
            )
        return _characters(text) if name == CHARACTERS else _bpe(name, text)
    path = Path(name)
    path = path / FILE if path.is_dir() else path
    try:
        content = read_bytes(path).decode()
    except (OSError, ValueError) as error:
        raise DataError(
            f"no tokenizer is called {name!r}, and no tokenizer.json can be read there: {error}",
            "Use characters, bpe:N (such as bpe:512), or the path of a tokenizer.json.",
        ) from None
    found = Tokenizer(name=path.parent.name or name, text=content)
    with _errors_of(str(path)):
        assert found.vocab_size > 0, "it has no tokens"
    return found


@contextmanager
def _errors_of(name: str) -> Iterator[None]:
    """Turn what the library raises for a damaged tokenizer, its panics too, into a DataError."""
    try:
        yield
    except (RbdcError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of Rust is no Exception
        raise DataError(
            f"the tokenizer {name} cannot be used: {error}",
            "Use characters, bpe:N (such as bpe:512), or an undamaged tokenizer.json.",
        ) from None


def _characters(text: str) -> Tokenizer:
    library = _tokenizers()
    points = np.unique(_code_points(text)).tolist()
    if not 0 < len(points) <= _MOST:
        raise DataError(f"the text has {len(points):,} different characters", "Use bpe:N.")
    vocabulary = {chr(point): number for number, point in enumerate(points)}
    made = library.Tokenizer(library.models.WordLevel(vocabulary, unk_token=chr(points[0])))
    every = library.Regex(r"[\s\S]")
    made.pre_tokenizer = library.pre_tokenizers.Split(every, behavior="isolated")
    made.decoder = library.decoders.Fuse()
    return Tokenizer(name=CHARACTERS, text=made.to_str(), by_table=True)


def _bpe(name: str, text: str) -> Tokenizer:
    library, size = _tokenizers(), name.removeprefix(BPE)
    if not size.isdecimal() or not _FEWEST <= int(size) <= _MOST:
        raise DataError(
            f"--tokenizer {name} has no number of tokens from {_FEWEST} to {_MOST:,}",
            "For example bpe:512.",
        )
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=int(size),
        show_progress=False,
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
    )
    made.train_from_iterator([text], trainer)
    return Tokenizer(name=name, text=made.to_str())
