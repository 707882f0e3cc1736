"""No model folder reaches out, runs code, takes all memory or writes where it should not.

`tests/report/test_hostile_runs.py` does the same with run folders.
"""

import json
import socket
import zipfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import rbdc
from rbdc.errors import RbdcError
from rbdc.models import couple_folders, memory
from rbdc.models.hub import read_tokenizer
from rbdc.training import image_format
from rbdc.training.teacher import load_teacher
from rbdc.transfer.jobs import find_backbone
from tests import hostile_text
from tests.hostile import CLASSES, PLAIN, VIT, hostile_folders, refusal, watched
from tests.support import small_data, small_recipe, small_task


def _as_teacher(folder: Path, _output: Path) -> object:
    recipe, data = small_recipe(distillation="hard", teacher=str(folder)), small_data(8, 8)
    return load_teacher(recipe, image_format(small_task(VIT, data).model, recipe, data), CLASSES)


CALLS: dict[str, Callable[[Path, Path], object]] = {
    "load": lambda folder, _output: rbdc.load(folder),
    "couple": lambda folder, output: couple_folders(folder, folder, output),
    "transfer": lambda folder, _output: find_backbone(str(folder)),
    "from scratch": lambda folder, _output: find_backbone(f"scratch:{folder}"),
    "teacher": _as_teacher,
}
COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "couple": lambda folder: ["couple", str(folder), str(folder)],
    "transfer": lambda folder: ["transfer", "--backbone", str(folder), "--data", "none"],
    "train": lambda folder: ["train", "--distillation", "hard", "--teacher", str(folder)],
}


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


@pytest.mark.parametrize("call", CALLS)
def test_a_strangers_folder_does_no_harm(
    call: str, tmp_path: Path, listener: socket.socket
) -> None:
    for folder in hostile_folders(tmp_path, listener.getsockname()[1]):
        with watched(tmp_path / "output") as seen, pytest.raises(RbdcError) as refused:
            CALLS[call](folder, tmp_path / "output" / "wide")
        assert not seen and refused.value.problem, seen
    check_untouched(tmp_path, listener)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_refuses_a_strangers_folder_in_two_lines(
    command: str, tmp_path: Path, listener: socket.socket, capsys: Any
) -> None:
    output = tmp_path / "output"
    here = ["--device", "cpu", "--jobs", "1", "--dry-run"] if command != "couple" else []
    for folder in islice(hostile_folders(tmp_path, listener.getsockname()[1]), 0, None, 15):
        with watched(output) as seen:
            words = [*COMMANDS[command](folder), "--output", str(output / "x"), *here]
            assert refusal(words, capsys)
        assert not seen
    check_untouched(tmp_path, listener)


@pytest.mark.parametrize("name", hostile_text.REFUSED)
def test_a_strangers_language_model_does_no_harm(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    folder, other = (hostile_text.language_folder(tmp_path / n, i) for i, n in enumerate("ab"))
    hostile_text.REFUSED[name](folder)
    output = tmp_path / "output"
    monkeypatch.setattr(memory, "FOLDER", output / "structures")
    for parents in ((folder, other), (other, folder), (folder, folder)):
        with watched(output) as seen, pytest.raises(RbdcError) as refused:
            couple_folders(*parents, output / "wide")
        assert not seen and refused.value.problem, seen
    assert not (output / "wide").exists()


def test_what_transformers_would_fetch_is_not_copied_into_a_coupled_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    first, second = (hostile_text.language_folder(tmp_path / n, i) for i, n in enumerate("ab"))
    path, output = first / hostile_text.CONFIG, tmp_path / "output"
    path.write_text(json.dumps(json.loads(path.read_text()) | hostile_text.LEFT_OUT))
    monkeypatch.setattr(memory, "FOLDER", output / "structures")
    with watched(output) as seen:
        couple_folders(first, second, output / "wide")
    config = json.loads((output / "wide" / hostile_text.CONFIG).read_text())
    assert not seen and config.keys().isdisjoint(hostile_text.LEFT_OUT)
    assert config["hidden_size"] == 2 * hostile_text.LLAMA["hidden_size"]


def test_links_of_the_cache_of_hugging_face_are_followed(tmp_path: Path) -> None:
    snapshot, blob = tmp_path / "snapshots" / "1", tmp_path / "blobs" / "abc"
    for folder in (snapshot, blob.parent):
        folder.mkdir(parents=True)
    blob.write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/abc")
    assert read_tokenizer(snapshot) == {"tokenizer.json": "{}"}
    (tmp_path / "secret").write_text("{}")
    (snapshot / "vocab.json").symlink_to("../../secret")
    with pytest.raises(RbdcError, match=r"vocab.json is a link to .*secret"):
        read_tokenizer(snapshot)


@pytest.mark.filterwarnings("ignore:Sparse")  # torch's tensors of rows are in beta state
@pytest.mark.parametrize("kind", ["sparse", "rows", "compressed"])
def test_a_pickle_holds_dense_tensors_of_its_own_size(kind: str, tmp_path: Path) -> None:
    tensor = torch.eye(1000)
    state = {"x": tensor.to_sparse() if kind == "sparse" else tensor}
    state = {"x": tensor.to_sparse_csr()} if kind == "rows" else state
    torch.save(state, tmp_path / "weights.pth")
    if kind == "compressed":
        with zipfile.ZipFile(tmp_path / "weights.pth") as archive:
            content = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(tmp_path / "weights.pth", "w", zipfile.ZIP_DEFLATED) as archive:
            for name, member in content.items():
                archive.writestr(name, member)
    with pytest.raises(RbdcError, match=r"sparse or quantized|it is compressed"):
        rbdc.load(tmp_path / "weights.pth", model=VIT)


def test_a_harmless_folder_of_the_same_kind_is_loaded(
    tmp_path: Path, listener: socket.socket
) -> None:
    """Otherwise the others could have been refused for anything."""
    folder = next(hostile_folders(tmp_path, listener.getsockname()[1]))
    model = timm.create_model(VIT, **PLAIN, num_classes=CLASSES)
    timm.models.save_for_hf(
        model, folder, model_args={**PLAIN, "num_classes": CLASSES}, safe_serialization=True
    )
    for call in ("load", "transfer", "from scratch"):
        with watched(tmp_path / "output") as seen:
            CALLS[call](folder, tmp_path / "output")
        assert not seen


def check_untouched(root: Path, listener: socket.socket) -> None:
    assert {path.name for path in (root / "canary").iterdir()} == {
        *("config.json", "model", "model.safetensors", "x.pth")
    }
    with pytest.raises(BlockingIOError):  # nobody has connected
        listener.accept()
