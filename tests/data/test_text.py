"""Token data: batches depend on (seed, step) alone, and what does not fit is refused."""

import hashlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rbdc.data import TextBatches, TextData, TextEvaluation, open_text
from rbdc.data.text_sources import embedded_text
from rbdc.data.tokenizer import find_tokenizer
from rbdc.errors import DataError

pytest.importorskip("tokenizers")
TEXT = embedded_text()[:5000]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "plays.txt").write_text(TEXT)
    return tmp_path / "plays.txt"


def opened(path: Path | str, length: int = 32, **options: Any) -> TextData:
    return open_text(str(path), length=length, **options)


def test_the_embedded_text_is_shakespeare() -> None:
    text = embedded_text()
    assert text.startswith("First Citizen:\nBefore we proceed any further")
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest == "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


@pytest.mark.parametrize("tokenizer", ["characters", "bpe:300"])
def test_tokens_are_the_text(tokenizer: str, file: Path) -> None:
    data = opened(file, tokenizer=tokenizer)
    assert data.tokenizer is not None and data.vocab_size == data.tokenizer.vocab_size
    train, test = (data.tokenizer.decode(s.values.tolist()) for s in (data.train, data.test))
    assert train + test == TEXT and 0.85 < len(train) / len(TEXT) < 0.95
    assert data.bytes_per_token == len(test.encode()) / len(data.test.values)
    again = opened(file, tokenizer=tokenizer)
    assert again.fingerprint == data.fingerprint
    assert opened(file, length=33, tokenizer=tokenizer).fingerprint != data.fingerprint


def test_batches_are_a_function_of_seed_and_step(file: Path) -> None:
    data = opened(file)

    def tokens(seed: int, start: int, ranks: int = 1, rank: int = 0) -> list[torch.Tensor]:
        batches = TextBatches(
            data, seed=seed, batch_size=8, micro_batches=(ranks, range(rank, rank + 1))
        )
        return [micro[0].images for micro in batches.from_step(start, 40)]

    every = tokens(1, 0)
    for step, batch in enumerate(tokens(1, 17)):  # resumed in the second epoch
        assert torch.equal(batch, every[17 + step])
    assert not torch.equal(tokens(2, 0)[0], every[0])
    halves = [tokens(1, 0, 2, rank)[20] for rank in (0, 1)]
    rows = [sorted(map(tuple, part.tolist())) for part in (torch.cat(halves), every[20])]
    assert rows[0] == rows[1]


def test_every_token_is_seen_once_per_epoch_and_targets_follow(file: Path) -> None:
    data = opened(file)
    batches = TextBatches(data, seed=1, batch_size=2)
    seen = []
    for (batch,) in batches.from_step(0, batches.steps_per_epoch):
        assert torch.equal(batch.images[:, 1:], batch.targets[:, :-1])
        seen += batch.indices.tolist()
    assert len({*seen}) == len(seen) >= len(data.train) - 1
    shifts = {data.train.shift(1, epoch) for epoch in range(20)}
    assert len(shifts) > 3 or (len(data.train.values) - 1) % 32 < 3
    parts = [TextEvaluation(data, batch_size=4, part=(2, rank)) for rank in (0, 1)]
    tested = [i for part in parts for batch in part for i in batch.indices.tolist()]
    assert sorted(tested) == list(range(len(data.test)))
    assert len(parts[0].batches) == len(parts[1].batches) + parts[1].idle


def test_token_files_are_mapped_and_not_sent(tmp_path: Path) -> None:
    numbers = np.arange(400, dtype=np.uint16) % 50
    numbers.tofile(tmp_path / "train.bin")
    numbers[:100].tofile(tmp_path / "val.bin")
    data = opened(tmp_path, vocab_size=50)
    assert isinstance(data.train.values, np.memmap) and len(data.test.values) == 100
    whole = opened(tmp_path / "train.bin", vocab_size=50)
    sent = pickle.dumps(whole.test)
    assert len(sent) < 500 and np.array_equal(pickle.loads(sent).values, numbers[360:])
    numbers.astype(np.uint32).tofile(tmp_path / "all.uint32.bin")
    wide = opened(tmp_path / "all.uint32.bin", vocab_size=50)
    assert np.array_equal(wide.train.values, numbers[:360])


def test_tables_of_texts_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    tables = {
        "train": datasets.Dataset.from_dict({"text": [TEXT[:3000], TEXT[3000:4000]]}),
        "validation": datasets.Dataset.from_dict({"text": [TEXT[4000:]]}),
    }
    datasets.DatasetDict(tables).save_to_disk(tmp_path / "table")
    data = opened(tmp_path / "table")
    assert len(data.train.values) == 4001 and len(data.test.values) == 1000


def test_text_is_held_out_for_tuning(file: Path) -> None:
    data = opened(file)
    held = data.held_out(0.2)
    both = np.concatenate([held.train.values, held.test.values])
    assert np.array_equal(both, data.train.values) and held.fingerprint != data.fingerprint


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"length": 600}, "fewer than one sequence of 600"),
        ({"vocab_size": 5}, "and the model's embedding 5"),
        ({"tokenizer": "bpe:12"}, "no number of tokens from 257"),
        ({"tokenizer": "/nowhere"}, "no tokenizer is called '/nowhere'"),
    ],
)
def test_text_that_does_not_fit_is_refused(options: dict[str, Any], cause: str, file: Path) -> None:
    with pytest.raises(DataError, match=cause):
        opened(file, **options)


def test_tokens_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    numbers = np.arange(400, dtype=np.uint16) % 50
    numbers.tofile(tmp_path / "x.bin")
    with pytest.raises(DataError, match="how many tokens"):
        opened(tmp_path / "x.bin")
    with pytest.raises(DataError, match="token 40 is 40, and the vocabulary has 40"):
        opened(tmp_path / "x.bin", vocab_size=40)
    with pytest.raises(DataError, match="made of a text"):
        opened(tmp_path / "x.bin", tokenizer="characters", vocab_size=50)
    (tmp_path / "y.bin").write_bytes(b"123")
    with pytest.raises(DataError, match="no numbers of 2 bytes"):
        opened(tmp_path / "y.bin", vocab_size=50)
    with pytest.raises(DataError, match="no text is called"):
        opened(tmp_path / "nothing")


def test_a_large_file_is_checked_batch_by_batch(file: Path) -> None:
    data = opened(file)
    broken = data.train.values.copy()
    broken[7] = 60_000
    object.__setattr__(data.train, "values", broken)
    batches = TextBatches(data, seed=1, batch_size=len(data.train))
    with pytest.raises(DataError, match="token 7 is 60000"):
        list(batches.from_step(0, 1))


def test_unknown_characters_are_named() -> None:
    with pytest.raises(DataError, match="'z' at 2"):
        find_tokenizer("characters", "abc").encode("abz")


def test_shorter_sequences_are_parts_of_the_longer_ones(file: Path) -> None:
    data = opened(file)
    whole, part = (TextBatches(data, seed=1, batch_size=4, length=length) for length in (None, 12))
    assert whole.steps_per_epoch == part.steps_per_epoch
    places = set()
    for epoch in range(6):
        start = epoch * whole.steps_per_epoch
        pairs = zip(
            whole.from_step(start, start + 3), part.from_step(start, start + 3), strict=True
        )
        for (long,), (short,) in pairs:
            assert torch.equal(long.indices, short.indices) and short.images.shape == (4, 12)
            assert torch.equal(short.images[:, 1:], short.targets[:, :-1])
            place = data.train.window(1, epoch, 12)
            assert torch.equal(short.images, long.images[:, place : place + 12])
            places.add(place)
    assert len(places) > 2  # another part in every epoch
    assert {len(batch.images[0]) for batch in TextEvaluation(data.tested_at(12), batch_size=4)} == {
        12
    }
