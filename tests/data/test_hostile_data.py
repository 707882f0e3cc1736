"""Data sets that somebody else made: refused with the file and what is wrong, in no time."""

import os
import socket
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rbdc.data import open_data, open_text
from rbdc.errors import DataError
from tests.data.pictures import make_folder, make_shards, make_table, shard, write_tar
from tests.hostile import watched
from tests.hostile_text import TOKENIZERS, table_rows


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


def _member_of_ten_terabytes(root: Path) -> Path:
    header = tarfile.TarInfo("z.png")
    header.size = 10**13
    path = make_shards(root) / "train-0000.tar"
    content = path.read_bytes().rstrip(b"\0")
    content += b"\0" * (-len(content) % 512)
    path.write_bytes(content + header.tobuf(tarfile.GNU_FORMAT) + b"x" * 512)
    return root


def _table(name: str, port: int = 9) -> Callable[[Path], Path]:
    def make(root: Path) -> Path:
        row = table_rows(root, port)[name]
        return make_table(root / "table", row=row)

    return make


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
    "ten terabytes": (_member_of_ten_terabytes, "z.png is cut off"),
    "address in a table": (_table("address"), "1 image cannot be decoded: .* train row 2"),
    "archive in a table": (_table("archive"), "1 image cannot be decoded: .* train row 2"),
    "hub in a table": (_table("hub"), "1 image cannot be decoded: .* train row 2"),
    "pipe in a table": (_table("pipe"), "1 image cannot be decoded: .* train row 2"),
    "pipe among pictures": (_pipe_among_pictures, "pipe.png cannot be read: it is not a file"),
}


@pytest.mark.parametrize(("make", "expected"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_data_is_refused(
    make: Callable[[Path], Path], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=expected) as refused:
        open_data(str(make(tmp_path)))
    assert len(refused.value.problem) < 1000


@pytest.mark.parametrize("row", ["address", "hub", "archive", "pipe", "no image", "program"])
def test_a_row_of_a_table_is_no_address_no_pipe_and_no_program(row: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        root = _table(row, server.getsockname()[1])(tmp_path)
        with watched(tmp_path / "output") as seen, pytest.raises(DataError, match="train row 2"):
            open_data(str(root), in_memory=True)
        assert not seen
        with pytest.raises(BlockingIOError):  # nobody has connected
            server.accept()


def test_a_table_may_name_files_and_turned_pictures(tmp_path: Path) -> None:
    picture = Image.new("RGB", (16, 8))
    picture.getexif()[0x0112] = 6  # turned by a quarter
    picture.save(tmp_path / "turned.jpg", exif=picture.getexif())
    row = {"bytes": None, "path": str(tmp_path / "turned.jpg")}
    data = open_data(str(make_table(tmp_path / "table", row=row)))
    assert data.train.read(2).size == (8, 16)


def test_a_folder_that_names_addresses_is_not_opened_as_one_of_the_hub(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    files = "http://127.0.0.1:9/x.csv"
    (tmp_path / "README.md").write_text(
        f"---\nconfigs:\n- config_name: default\n  data_files: '{files}'\n---\n"
    )
    with watched(tmp_path / "output") as seen, pytest.raises(DataError, match="may name addresses"):
        open_data(f"hf:{tmp_path}")
    assert not seen


@pytest.mark.parametrize("column", [[1, 2], [{"bytes": b"x", "path": None}] * 2])
def test_a_column_of_texts_holds_text(column: list[Any], tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"text": column})
    if isinstance(column[0], dict):
        table = table.cast_column("text", datasets.Image())
    datasets.DatasetDict(train=table).save_to_disk(tmp_path / "table")
    with watched(tmp_path / "output") as seen, pytest.raises(DataError, match="no split `train`"):
        open_text(str(tmp_path / "table"), length=8)
    assert not seen


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_strangers_tokenizer_is_refused_or_gives_tokens(name: str, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    folder, content = TOKENIZERS[name]
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "tokenizer.json").write_text(content)
    (tmp_path / "text.txt").write_text("ab cd é " * 1000)
    try:
        data = open_text(str(tmp_path / "text.txt"), length=8, tokenizer=str(tmp_path / folder))
    except DataError as refused:
        assert len(refused.problem) < 1000 + len(str(tmp_path))
    else:
        assert int(max(data.train.values)) < data.vocab_size
