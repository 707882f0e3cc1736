"""Data sets that somebody else made: refused with the file and what is wrong, in no time."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rbdc.data import open_data
from rbdc.errors import DataError
from tests.data.pictures import make_folder, make_shards, shard, write_tar


def _shards(**members: bytes) -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        named = {name.replace("_", "."): content for name, content in members.items()}
        write_tar(make_shards(root) / "train-0000.tar", shard(0, 6) | named)
        return root

    return make


def _instead(name: str, make: Callable[[Path], object]) -> Callable[[Path], Path]:
    def spoil(root: Path) -> Path:
        path = next(make_shards(root).glob(name), root / name)
        path.unlink(missing_ok=True)
        make(path)
        return root

    return spoil


def _pipe_among_pictures(root: Path) -> Path:
    os.mkfifo(next((make_folder(root) / "train").iterdir()) / "pipe.png")
    return root


HOSTILE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a billion": (_shards(**{"001_cls": b"1000000000"}), r"001.cls holds no label"),
    "a billion in JSON": (_shards(**{"009_png": b"", "009_json": b'{"label": 1e9}'}), "no label"),
    "digits": (_shards(**{"001_cls": b"9" * 400}), r"001.cls holds no label"),
    "many digits": (_shards(**{"001_cls": b"9" * 100_000}), r"001.cls holds no label"),
    "deep": (_shards(**{"001_json": b'{"label":' * 100_000}), r"001.json holds no label"),
    "a list": (_shards(**{"001_json": b"[1]"}), r"001.json holds no label"),
    "not UTF-8": (_shards(**{"001_json": b'{"label": "\xff"}'}), r"001.json holds no label"),
    "binary classes": (
        _instead("classes.txt", lambda p: p.write_bytes(b"\xff")),
        "classes.txt can",
    ),
    "piped classes": (_instead("classes.txt", os.mkfifo), "classes.txt cannot be read: it is not"),
    "piped shard": (_instead("train-0000.tar", os.mkfifo), "train-0000.tar is not a readable"),
    "pipe among pictures": (_pipe_among_pictures, "pipe.png cannot be read: it is not a file"),
}


@pytest.mark.parametrize(("make", "expected"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_data_is_refused(
    make: Callable[[Path], Path], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=expected) as refused:
        open_data(str(make(tmp_path)))
    assert len(refused.value.problem) < 1000
