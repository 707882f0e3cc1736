"""Token data: a long stream of tokens, cut into sequences, whose batches depend on (seed, step).

A sequence takes the place that an image has elsewhere. In every epoch the stream is cut at another
offset, drawn from the seed, and the sequences come in another order.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rbdc.data.batches import Batch, check_batch_size, micro_batch_positions
from rbdc.data.images import DataSet
from rbdc.data.randomness import generator
from rbdc.data.samples import Order
from rbdc.data.tokenizer import Ids, Tokenizer
from rbdc.errors import DataError

HASHED_WHOLE = 2**28  # bytes of tokens that are hashed in full; of more, evenly spaced blocks
BLOCK, BLOCKS = 2**16, 2**10


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFormat:
    """The inputs of a language model."""

    sequence_length: int
    vocab_size: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one input."""
        return (self.sequence_length,)


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """A stream of tokens, in memory or memory-mapped, cut into sequences of one length."""

    values: Ids
    length: int
    """Tokens per sequence; the targets are one token later."""
    where: str
    """The file or the split, for messages."""

    def __len__(self) -> int:
        return max(0, (len(self.values) - 1) // self.length)

    def __reduce__(self) -> Any:
        """Send another process the path of a mapped file, not its content."""
        values, root = self.values, self.values
        if not isinstance(values, np.memmap):
            return _tokens, (values, None, 0, 0, self.length, self.where)
        while isinstance(root.base, np.memmap):
            root = root.base
        first, begin = (a.__array_interface__["data"][0] for a in (root, values))
        start = (begin - first) // values.dtype.itemsize
        place = str(values.filename), start, start + len(values)
        return _tokens, (values.dtype, *place, self.length, self.where)

    def name(self, index: int) -> str:
        """Return which tokens a sequence has, for messages."""
        return f"{self.where} tokens {index * self.length:,} to {(index + 1) * self.length:,}"

    def sequences(self, indices: Tensor, shift: int = 0, length: int | None = None) -> Tensor:
        """Return sequences with the token that follows each: (sequences, length + 1).

        With a smaller `length`, that many tokens of each.
        """
        starts = indices.numpy()[:, None] * self.length + shift
        found = self.values[starts + np.arange((length or self.length) + 1)]
        return torch.from_numpy(found.astype(np.int64))

    def shift(self, seed: int, epoch: int) -> int:
        """Return where the first sequence of an epoch begins."""
        slack = len(self.values) - 1 - len(self) * self.length
        return int(torch.randint(slack + 1, (), generator=generator(seed, "shift", epoch)))

    def window(self, seed: int, epoch: int, length: int) -> int:
        """Return where a shorter sequence begins in each of the sequences of an epoch."""
        return int(
            torch.randint(self.length - length + 1, (), generator=generator(seed, "window", epoch))
        )


def _tokens(
    values: Any, path: str | None, start: int, stop: int, length: int, where: str
) -> Tokens:
    """Return the tokens that `Tokens.__reduce__` described."""
    if path is not None:
        values = np.memmap(path, dtype=values, mode="r")[start:stop]
    return Tokens(values=values, length=length, where=where)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextData(DataSet):
    """Tokens to train on and to test on."""

    train: Tokens  # type: ignore[assignment]
    test: Tokens  # type: ignore[assignment]
    vocab_size: int
    """Number of different tokens."""
    tokenizer: Tokenizer | None = None
    """None if the data has tokens and nobody said of which tokenizer."""
    bytes_per_token: float | None = None
    """Bytes of text per token of the test split, if the text is known."""

    @property
    def in_memory(self) -> bool:
        """Return that nothing is decoded, by any process."""
        return True

    def describe(self) -> str:
        """Return what the data has, for people."""
        by = f" by {self.tokenizer.name}" if self.tokenizer else ""
        return (
            f"{self.name}: {len(self.train.values):,} training and {len(self.test.values):,} test "
            f"tokens{by}, {self.vocab_size:,} different ones, in sequences of {self.train.length}; "
            f"a resumed run compares {self.compared}"
        )

    def held_out(self, share: float) -> "TextData":
        """Return the training tokens in two parts: the last ones are tested on."""
        count = len(self.train.values)
        cut = min(count - self.train.length - 1, round((1 - share) * count))
        parts = self.train.values[:cut], self.train.values[cut:]
        train, test = (replace(self.train, values=values) for values in parts)
        found = f"{self.fingerprint}, {count - cut} held out"
        return replace(self, train=train, test=test, fingerprint=found)

    def tested_at(self, length: int) -> "TextData":
        """Return the same data with its test tokens in sequences of this length."""
        return replace(self, test=replace(self.test, length=length))

    def to_json(self) -> dict[str, Any]:
        """Return what a run's record says of the data."""
        return {
            **DataSet.to_json(self),
            "train_tokens": len(self.train.values),
            "test_tokens": len(self.test.values),
            "sequence_length": self.train.length,
            "vocab_size": self.vocab_size,
            "tokenizer": self.tokenizer.name if self.tokenizer else None,
        }


def text_data(
    name: str,
    train: Ids,
    test: Ids,
    *,
    length: int,
    vocab_size: int,
    tokenizer: Tokenizer | None,
    test_bytes: int | None = None,
) -> TextData:
    """Return token data; refuse splits that are shorter than one sequence."""
    splits = []
    for purpose, values in (("training", train), ("test", test)):
        split = Tokens(values=values, length=length, where=f"{name} ({purpose}),")
        if not len(split):
            raise DataError(
                f"{name} has {len(values):,} {purpose} tokens, fewer than one sequence of {length} "
                "with the token that follows it",
                "Use more text, or shorter sequences: --model-kwargs sequence_length=N.",
            )
        _check_vocabulary(split, vocab_size)
        splits.append(split)
    prints = [tokenizer.fingerprint if tokenizer else "", *map(_fingerprint, splits)]
    whole = all(split.values.nbytes <= HASHED_WHOLE for split in splits)
    return TextData(
        name=name,
        train=splits[0],
        test=splits[1],
        class_names=(),
        fingerprint=sha256(" ".join([*prints, str(length)]).encode()).hexdigest(),
        compared="every token" if whole else f"{BLOCKS:,} blocks of tokens",
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        bytes_per_token=test_bytes / len(test) if test_bytes else None,
    )


def _blocks(values: Ids) -> Iterator[tuple[int, Ids]]:
    """Yield blocks of the stream with their positions: all of them, or evenly spaced ones."""
    starts = range(0, len(values), BLOCK)
    if values.nbytes > HASHED_WHOLE:
        starts = range(0, len(values), max(BLOCK, len(values) // BLOCKS))
    for start in starts:
        yield start, values[start : start + BLOCK]


def _fingerprint(split: Tokens) -> str:
    digest = sha256(f"{len(split.values)} {split.values.dtype}".encode())
    for _, block in _blocks(split.values):
        digest.update(np.ascontiguousarray(block).tobytes())
    return digest.hexdigest()


def _check_vocabulary(split: Tokens, vocab_size: int) -> None:
    for start, block in _blocks(split.values):
        if int(block.max()) >= vocab_size:
            at = int(np.argmax(block >= vocab_size))
            raise outside(split.where, start + at, int(block[at]), vocab_size)


def outside(where: str, at: int, token: int, vocab_size: int) -> DataError:
    """Return the error of a token that the model has no embedding for."""
    return DataError(
        f"{where} token {at:,} is {token}, and the vocabulary has {vocab_size:,} tokens",
        "Give the vocabulary that the data was made with: --model-kwargs vocab_size=N. Numbers of "
        "four bytes belong into a file that ends in .uint32.bin.",
    )


class TextBatches:
    """The batches of one training: a function of the seed and the step.

    A model of shorter sequences reads a part of each, another one in every epoch.
    """

    def __init__(
        self,
        data: TextData,
        *,
        seed: int,
        batch_size: int,
        length: int | None = None,
        micro_batches: tuple[int, range] = (1, range(1)),
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> None:
        self.data, self.seed, self.device = data, seed, device
        self.length = length or data.train.length
        count, mine = micro_batches
        check_batch_size(len(data.train), batch_size, count, mixes=False)
        self.positions = [micro_batch_positions(batch_size, count, index) for index in mine]
        self.order = Order(images=len(data.train), seed=seed, batch_size=batch_size, repeats=0)
        self.steps_per_epoch = self.order.steps_per_epoch

    def from_step(
        self,
        start: int,
        stop: int,
        stopped: Callable[[], bool] = lambda: False,  # noqa: ARG002
    ) -> Iterator[list[Batch]]:
        """Yield this process's micro-batches of each step from `start` to `stop` (exclusive)."""
        for step in range(start, stop):
            order = self.order.step(step)
            epoch, tokens = step // self.steps_per_epoch, self.data.train
            shift = tokens.shift(self.seed, epoch) + tokens.window(self.seed, epoch, self.length)
            yield [self._batch(order[positions], shift) for positions in self.positions]

    def _batch(self, indices: Tensor, shift: int) -> Batch:
        return make_batch(
            self.data.train, indices, self.data.vocab_size, self.device, shift, self.length
        )


class TextEvaluation:
    """The test sequences in order, each once; rank r of n has every n-th from r."""

    def __init__(
        self,
        data: TextData,
        *,
        batch_size: int,
        part: tuple[int, int] = (1, 0),
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> None:
        self.data, self.device = data, device
        parts, mine = part
        indices = torch.arange(mine, len(data.test), parts)
        self.batches = [b for b in indices.split(batch_size) if len(b)]
        most = -(-len(data.test) // parts)
        self.idle = -(-most // batch_size) - len(self.batches)
        """Batches that other processes have in addition."""

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            yield make_batch(self.data.test, batch, self.data.vocab_size, self.device)


def make_batch(
    tokens: Tokens,
    indices: Tensor,
    vocab_size: int,
    device: torch.device,
    shift: int = 0,
    length: int | None = None,
) -> Batch:
    """Return sequences and, as targets, the tokens that follow."""
    found = tokens.sequences(indices, shift, length)
    if int(found.max()) >= vocab_size:  # of large files only a part is checked before
        row, column = divmod(int(torch.argmax((found >= vocab_size).int())), found.shape[1])
        at = int(indices[row]) * tokens.length + shift + column
        raise outside(tokens.where, at, int(found[row, column]), vocab_size)
    found = found.to(device, non_blocking=True)
    return Batch(images=found[:, :-1], targets=found[:, 1:], indices=indices)
