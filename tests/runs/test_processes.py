"""Several processes on one model: as torchrun starts them, with gloo on this machine."""

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.run import main as torchrun

from rbdc.errors import Interrupted
from rbdc.training import World, join_world
from rbdc.training.world import leave_world
from tests.runs.test_run import EAGER, assert_same_model, run, small_tree
from tests.support import TINY, forked, forked_command, made_once, started

DEIT = "deit_tiny_patch16_224"
SETTINGS: dict[str, Any] = {
    "mixup": 0.5,
    "cutmix": 0.5,
    "reprob": 0.3,
    "model_ema": True,
    "model_ema_decay": 0.9,
    "epochs": 2.0,
    "batch_size": 12,  # for two or three
}


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def _rank(rank: int, size: int, port: int, folder: Path, output: Path) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    world = join_world()
    try:
        prepared = small_tree(folder, DEIT, **SETTINGS)
        started(prepared, output, machine=EAGER, watch=lambda _event: None, jobs=1, world=world)
    except Interrupted:
        os._exit(75)
    finally:
        leave_world()


def start(folder: Path, output: Path, size: int = 2) -> list[Any]:
    port = free_port()
    return [forked(_rank, rank, size, port, folder, output) for rank in range(size)]


def finish(ranks: list[Any]) -> list[int]:
    for process in ranks:
        process.join(120)
    return [process.exitcode for process in ranks]


def three(folder: Path, output: Path) -> list[Any]:
    return start(folder, output, size=3)


@pytest.fixture(scope="module")
def together(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(output: Path) -> None:
        assert finish(start(folder, output)) == [0, 0]

    return made_once(tmp_path_factory, "two-processes", make)


def test_two_processes_train_the_model_of_one(folder: Path, together: Path, tmp_path: Path) -> None:
    run(small_tree(folder, DEIT, **SETTINGS), tmp_path / "one")
    one, two = (
        load_file(place / "model" / "model.safetensors") for place in (tmp_path / "one", together)
    )
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=2e-3, atol=2e-5)
    moved = load_file(
        next((tmp_path / "one" / "jobs").glob("coupling*")) / "start" / "state.safetensors"
    )
    assert any(not torch.equal(moved[f"model/{name}"], tensor) for name, tensor in one.items())


def test_killed_and_started_again_they_end_with_the_same_bits(
    folder: Path, together: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    for wanted in (1, 2):
        ranks = start(folder, output)
        while len(list(output.glob("jobs/*/result.json"))) < wanted and ranks[0].is_alive():
            time.sleep(0.01)
        for process in ranks:
            os.kill(process.pid, signal.SIGKILL)
        finish(ranks)
    assert finish(start(folder, output)) == [0, 0]
    assert_same_model(together, output)


def test_three_end_with_the_same_bits_as_well(folder: Path, tmp_path: Path) -> None:
    """Of three numbers, the order in which they are added matters."""
    assert finish(three(folder, tmp_path / "straight")) == [0, 0, 0]
    ranks = three(folder, tmp_path / "killed")
    while not list(tmp_path.glob("killed/jobs/*/checkpoints/step-*")) and ranks[0].is_alive():
        time.sleep(0.01)
    for process in ranks:
        os.kill(process.pid, signal.SIGKILL)
    finish(ranks)
    assert finish(three(folder, tmp_path / "killed")) == [0, 0, 0]
    assert_same_model(tmp_path / "straight", tmp_path / "killed")


def test_a_signal_to_one_stops_all_at_the_same_step(
    folder: Path, together: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    ranks = start(folder, output)
    while not list(output.glob("jobs/*/checkpoints/step-*")) and ranks[0].is_alive():
        time.sleep(0.01)
    os.kill(ranks[1].pid, signal.SIGTERM)
    assert finish(ranks) == [75, 75]
    assert finish(start(folder, output)) == [0, 0]
    assert_same_model(together, output)


def test_torchrun(folder: Path, tmp_path: Path) -> None:
    arguments = " ".join(f"{key}={value}" for key, value in TINY[DEIT].items())
    command = (
        f"--nproc_per_node=2 --master_addr=127.0.0.1 "
        f"--master_port={free_port()} -m rbdc.cli train --model {DEIT} --model-kwargs {arguments} "
        f"--data {folder} --in-memory --scale null --aa null --color-jitter 0 --aug-repeats 0 "
        f"--epochs 2 --steps 1 --batch-size 8 --no-tensorboard --output {tmp_path / 'run'}"
    )
    said = tmp_path / "said.txt"
    process = forked_command(command.split(), said, main=torchrun)
    process.join()
    assert process.exitcode == 0, said.read_text()
    assert said.read_text().count("RBDC:      top-1") == 1  # only one of them talks
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_a_world_of_one_needs_nobody() -> None:
    world = World()
    assert world.is_main and world.sum([1.0, 2.0]) == [1.0, 2.0]
    assert world.broadcast(lambda: 3) == 3
    assert world.anyone(True) and not world.anyone(False)
