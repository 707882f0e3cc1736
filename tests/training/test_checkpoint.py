"""Checkpoints: whole or not at all; damage is seen; nothing in them is executed."""

import hashlib
import json
import os
import pickle
import resource
from pathlib import Path

import pytest
import torch

from rbdc.errors import CheckpointError, RunError
from rbdc.training.checkpoint import (
    FACTS,
    TENSORS,
    latest_checkpoint,
    read_state,
    save_checkpoint,
    write_state,
)
from tests.support import forked

STATE = {"model/a": torch.arange(6.0).reshape(2, 3), "model/b": torch.tensor(3)}


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_is_read(tmp_path: Path) -> None:
    last = STATE["model/a"].view(1, 2, 3, 1).to(memory_format=torch.channels_last)
    write_state(tmp_path / "x", {**STATE, "last": last}, {"number": 0.1, "list": [1, None]})
    tensors, facts = read_state(tmp_path / "x")
    assert tensors.keys() == {*STATE, "last"} and torch.equal(tensors["last"], last)
    assert torch.equal(tensors["model/a"], STATE["model/a"])
    assert facts["number"] == 0.1 and facts["list"] == [1, None]
    write_state(tmp_path / "x", STATE, {"number": 2})  # replaced
    assert read_state(tmp_path / "x")[1]["number"] == 2
    assert steps(tmp_path) == ["x"]


def test_so_many_are_kept(tmp_path: Path) -> None:
    for step in (1, 5, 12):
        save_checkpoint(tmp_path, step, STATE, {}, keep=2)
    assert steps(tmp_path) == ["step-000000005", "step-000000012"]
    found = latest_checkpoint(tmp_path)
    assert found and found[1]["step"] == 12
    assert latest_checkpoint(tmp_path / "none") is None


def test_a_new_one_is_not_lost_among_damaged_later_ones(tmp_path: Path) -> None:
    for step in (100, 200):
        save_checkpoint(tmp_path, step, STATE, {}, keep=2)
    for step in (100, 200):
        flip_bit(tmp_path / f"step-{step:09d}" / TENSORS)
    save_checkpoint(tmp_path, 50, STATE, {}, keep=1)  # a training that began anew
    found = latest_checkpoint(tmp_path)
    assert found and found[1]["step"] == 50


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


DAMAGE = {
    "tensors flipped": (TENSORS, flip_bit),
    "tensors cut": (TENSORS, cut),
    "facts flipped": (FACTS, flip_bit),
    "facts cut": (FACTS, cut),
    "tensors gone": (TENSORS, Path.unlink),
    "facts gone": (FACTS, Path.unlink),
    "empty": (FACTS, lambda path: path.write_bytes(b"")),
}


@pytest.mark.parametrize(("file", "harm"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_one_is_passed_over_with_a_warning(file: str, harm, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    for step in (1, 2):
        save_checkpoint(tmp_path, step, STATE, {}, keep=2)
    harm(tmp_path / "step-000000002" / file)
    with pytest.raises(CheckpointError, match="step-000000002 is damaged"):
        read_state(tmp_path / "step-000000002")
    with pytest.warns(UserWarning, match="step-000000002 is damaged"):
        found = latest_checkpoint(tmp_path)
    assert found and found[1]["step"] == 1


def test_a_pickle_in_place_of_tensors_is_not_executed(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self):  # type: ignore[no-untyped-def]
            return (os.mkdir, (str(tmp_path / "canary"),))

    save_checkpoint(tmp_path / "c", 1, STATE, {}, keep=2)
    folder = tmp_path / "c" / "step-000000001"
    (folder / TENSORS).write_bytes(pickle.dumps(Evil()))
    # even with checksums that fit
    facts = json.loads((folder / FACTS).read_text())
    facts["tensors_sha256"] = hashlib.sha256((folder / TENSORS).read_bytes()).hexdigest()
    (folder / FACTS).write_text(json.dumps(facts))
    (folder / "sha256").write_text(hashlib.sha256((folder / FACTS).read_bytes()).hexdigest())
    with pytest.warns(UserWarning, match="damaged"):
        assert latest_checkpoint(tmp_path / "c") is None
    assert not (tmp_path / "canary").exists()


def _save_on_a_full_disk(folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    with pytest.raises(RunError) as error:
        save_checkpoint(folder, 2, {"a": torch.ones(5000)}, {}, keep=1)
    assert "step-000000002 could not be written" in str(error.value)
    assert "resumes from the last checkpoint" in str(error.value)


def test_a_full_disk_keeps_what_was_there(tmp_path: Path) -> None:
    """A file may not grow beyond 4 kB: as if the disk were full, in a process of its own."""
    save_checkpoint(tmp_path, 1, STATE, {}, keep=2)
    process = forked(_save_on_a_full_disk, tmp_path)
    process.join()
    assert process.exitcode == 0
    assert steps(tmp_path) == ["step-000000001"]
    found = latest_checkpoint(tmp_path)
    assert found and found[1]["step"] == 1
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 4096


def test_an_unwritable_place_is_an_error_of_two_lines(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError) as error:
        write_state(tmp_path / "file" / "x", STATE, {})
    assert len(str(error.value).splitlines()) == 2
