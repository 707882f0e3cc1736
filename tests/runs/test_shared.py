"""Siblings share a pass over the data: in one process, side by side, fused, and after a kill."""

import os
import signal
import threading
import time
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from rbdc.data.exchange import PATIENCE, Membership, find_folder
from rbdc.errors import Interrupted, RunError
from rbdc.experiments.train import Training
from rbdc.jobs.train import TrainJob
from rbdc.training import World, initial_weights
from rbdc.training.classification import Classification
from tests.runs.test_run import EAGER, assert_same_model, run, small_tree
from tests.support import QUICK, forked, until

# In one worker: the same run in another one would decode some of this one's batches.
pytestmark = pytest.mark.xdist_group("shared passes")

FILES: dict[str, Any] = {"in_memory": False, "scale": (0.5, 1.0), "color_jitter": 0.2}


def tree(folder: Path, **settings: Any) -> Training:
    return small_tree(folder, **FILES, **settings)


def decoded(result: dict[str, Any], level: int) -> int:
    nodes = result["nodes"].items()
    return sum(node["decoded"] for name, node in nodes if name.startswith(f"{level}."))


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("alone") / "run"
    result = run(tree(folder), output)
    prepared = tree(folder)
    images = prepared.plan.images // 8 * 8  # of whole batches
    assert result["images_decoded"] == prepared.plan.decoded_passes * images
    assert result["images"] == prepared.plan.data_passes * images
    assert decoded(result, 2) == images
    return output


def test_processes_side_by_side_decode_each_image_once(
    folder: Path, alone: Path, tmp_path: Path
) -> None:
    one = decoded(run(tree(folder), alone), 2)
    found = []
    for turn in range(3):  # on a busy machine one may end before the other has begun
        found.append(decoded(run(tree(folder), tmp_path / str(turn), jobs=2), 2))
        assert_same_model(alone, tmp_path / str(turn))
        if one <= found[-1] < 2 * one:  # the first batches, before both were there
            return
    raise AssertionError(found)


def test_separate_batches_are_one_option_away(folder: Path, tmp_path: Path) -> None:
    result = run(tree(folder, batches="separate"), tmp_path / "run")
    assert result["images_decoded"] == result["images"]


def _kill_workers(output: Path, wanted: int) -> None:
    """Kill all training processes, which this process's server has forked, with SIGKILL."""
    until(lambda: len(list(output.glob("jobs/*/checkpoints/step-*"))) >= wanted)
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    for worker in Path(f"/proc/{server}/task/{server}/children").read_text().split():
        os.kill(int(worker), signal.SIGKILL)


def test_killed_siblings_end_with_the_same_bits(folder: Path, alone: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    for wanted in (1, 3):
        killer = threading.Thread(target=_kill_workers, args=(output, wanted))
        killer.start()
        with pytest.raises(RunError, match="a training process died"):
            run(tree(folder), output, machine=EAGER, jobs=2)
        killer.join()
    run(tree(folder), output, machine=EAGER, jobs=1)  # and in one process
    assert_same_model(alone, output)


def _until_stopped(folder: Path, output: Path) -> None:
    try:
        run(tree(folder), output)
    except Interrupted:
        os._exit(75)


def test_a_run_that_waits_for_another_process_answers_a_stop_signal(
    folder: Path, alone: Path, tmp_path: Path
) -> None:
    leaf = tree(folder).tree.nodes[0].job
    assert isinstance(leaf, TrainJob)
    start = partial(initial_weights, leaf.task)
    stream = Classification(leaf.task, leaf.data, start, QUICK, World()).training
    place = find_folder(stream.content())
    assert place is not None
    behind = Membership(place, position=-1000, window=0)  # and it never moves
    try:
        process = forked(_until_stopped, folder, tmp_path / "run")
        until(lambda: len(list(place.iterdir())) == 2)
        time.sleep(0.5)
        began = time.monotonic()
        process.terminate()
        process.join(60)
        assert time.monotonic() - began < 5 < PATIENCE[0]
        assert process.exitcode == 75
        saved = {path.name for path in tmp_path.glob("run/jobs/*/checkpoints/*")}
        assert saved == {"step-000000001"}
    finally:
        behind.leave()
    run(tree(folder), tmp_path / "run")
    assert_same_model(alone, tmp_path / "run")


def _fused(folder: Path, output: Path) -> None:
    run(tree(folder, fuse="on"), output, machine=EAGER)


def test_fused_siblings_are_other_jobs_and_resume_with_their_own_bits(
    folder: Path, alone: Path, tmp_path: Path
) -> None:
    prepared = tree(folder, fuse="on")
    assert prepared.setting.fused == {"2": 4, "1": 2}
    keys = {node.job.key for node in prepared.tree.nodes}
    assert not keys & {node.job.key for node in tree(folder).tree.nodes}
    result = run(prepared, tmp_path / "straight", machine=QUICK)
    assert decoded(result, 2) == decoded(run(tree(folder), alone), 2)
    output = tmp_path / "killed"
    for wanted in (3, 5, 9):
        process = forked(_fused, folder, output)
        while len(list(output.glob("jobs/*/checkpoints/step-*"))) < wanted and process.is_alive():
            time.sleep(0.01)
        process.kill()  # with SIGKILL, if it has not ended
        process.join()
    _fused(folder, output)
    assert_same_model(tmp_path / "straight", output)
