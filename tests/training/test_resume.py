"""Stopped anywhere and gone on with: the same bits as never having stopped."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rbdc.data import DataSet
from rbdc.errors import Interrupted, TrainingError
from rbdc.growth.mixture_growth import Templates
from rbdc.training import Task, Trained, World, initial_weights
from rbdc.training.machine import _cpu_survives
from rbdc.training.state import State
from tests.support import LANGUAGE, QUICK, data_for, folder_data, small_data, small_task, train

RICH: dict[str, Any] = {
    "model_ema": True,
    "model_ema_decay": 0.9,
    "mixup": 0.5,
    "cutmix": 0.5,
    "reprob": 0.3,
}
RESNET, DEIT = "resnet18d", "deit_tiny_patch16_224"


def stop_after(*counts: int) -> Iterator[Callable[[], bool]]:
    """Sittings that stop after so many steps each; the last does not."""
    yield from map(after, counts)
    yield lambda: False


def after(steps: int) -> Callable[[], bool]:
    """Stop after so many steps: the loop asks after each, and other threads ask whenever."""
    left = iter(range(steps - 1, -1, -1))
    return lambda: threading.current_thread() is threading.main_thread() and next(left) == 0


def run(task: Task, data: DataSet, folder: Path, *stops: int, workers: int = 0) -> Trained:
    folder.mkdir()
    machine = QUICK if not workers else type(QUICK)(**{**QUICK.to_json(), "workers": workers})
    for stopped in stop_after(*stops):
        torch.rand(3)  # the state of the global generator must not matter
        try:
            return train(
                task,
                data,
                folder,
                start=lambda: initial_weights(task),
                machine=machine,
                world=World(),
                blocks=2,
                stopped=stopped,
            )
        except Interrupted:
            continue
    raise AssertionError("never finished")


def everything(trained: Trained) -> tuple[dict[str, torch.Tensor], Any]:
    tensors, facts = trained.state.saved()
    timeless = [
        {key: value for key, value in row.items() if key not in ("seconds", "images_per_second")}
        for row in trained.history
    ]
    return tensors, (facts, timeless, trained.best)


def assert_equal(left: Trained, right: Trained) -> None:
    (tensors, facts), (others, other_facts) = everything(left), everything(right)
    assert tensors.keys() == others.keys()
    assert any(name.startswith("optimizer/") for name in tensors)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, others[name]), name
    assert json.dumps(facts) == json.dumps(other_facts)


@pytest.fixture(scope="module")
def data() -> DataSet:
    return small_data()


STOPS = {
    "first step": (1,),
    "mid-epoch": (3,),
    "last step of an epoch": (5,),
    "first step of the next": (6,),
    "twice in a row": (2, 1),
    "again and again": (1, 1, 4, 5),
}


@pytest.mark.parametrize("stops", STOPS.values(), ids=STOPS)
@pytest.mark.parametrize("name", [RESNET, DEIT, LANGUAGE])
def test_in_memory(name: str, stops: tuple[int, ...], tmp_path: Path) -> None:
    data = data_for(name)
    averaged = {k: v for k, v in RICH.items() if k.startswith("model")} | {"smoothing": 0.0}
    task = small_task(name, data, **({"drop_path": 0.2, **RICH} if data.class_names else averaged))
    straight = run(task, data, tmp_path / "straight")
    assert_equal(straight, run(task, data, tmp_path / "stopped", *stops))
    best, other = (
        (tmp_path / which / "best" / "model.safetensors").read_bytes()
        for which in ("straight", "stopped")
    )
    assert best == other
    blocks = [(tmp_path / which / "blocks.jsonl").read_text() for which in ("straight", "stopped")]
    assert blocks[0] == blocks[1]
    assert [json.loads(line)["step"] for line in blocks[0].splitlines()] == [0, 5, 10, 15]


@pytest.mark.parametrize("stops", [(1,), (3, 4), (5,)], ids=["first", "twice", "epoch"])
@pytest.mark.parametrize("name", [RESNET, DEIT])
def test_weights_of_templates(
    name: str, stops: tuple[int, ...], data: DataSet, tmp_path: Path
) -> None:
    task = replace(
        small_task(name, data, drop_path=0.2, **RICH),
        parametrization=Templates(count=2),
        schedule_epochs=4.0,
    )
    straight = run(task, data, tmp_path / "straight")
    assert any("0.coefficients" in key for key in straight.state.saved()[0])
    assert_equal(straight, run(task, data, tmp_path / "stopped", *stops))
    folders = [tmp_path / which / "best" for which in ("straight", "stopped")]
    best, other = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert best == other
    timm.create_model(f"local-dir:{folders[0]}", pretrained=True)  # an ordinary model


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stops", [(1,), (7,), (5, 1)], ids=["first", "mid", "twice"])
def test_from_files(workers: int, stops: tuple[int, ...], tmp_path: Path) -> None:
    data = folder_data(tmp_path / "data")
    settings: dict[str, Any] = {
        **RICH,
        "scale": (0.3, 1.0),
        "aa": "rand-m5-mstd0.5-inc1",
        "aug_repeats": 2,
    }
    task = small_task(RESNET, data, epochs=2, **settings)
    straight = run(task, data, tmp_path / "straight")
    assert_equal(straight, run(task, data, tmp_path / "stopped", *stops, workers=workers))


@pytest.mark.parametrize("opt", ["sgd", "momentum", "lamb", "nadamw", "lion"])
def test_other_optimizers(opt: str, data: DataSet, tmp_path: Path) -> None:
    task = small_task(RESNET, data, epochs=1, opt=opt, clip_grad=1.0, grad_accum_steps=2)
    straight = run(task, data, tmp_path / "straight")
    assert_equal(straight, run(task, data, tmp_path / "stopped", 3))


def test_float16_with_its_scale(data: DataSet, tmp_path: Path) -> None:
    """What a GPU without bfloat16 does; a CPU can, too, if it has the instructions."""
    if not _cpu_survives("float16"):
        pytest.skip("this CPU crashes with float16")
    task = small_task(DEIT, data, epochs=2, amp=True, amp_dtype="float16", clip_grad=1.0)
    straight = run(task, data, tmp_path / "straight")
    assert straight.state.scaler.is_enabled()
    assert straight.state.scaler.get_scale() < 65536.0  # the first steps overflow and are left out
    assert_equal(straight, run(task, data, tmp_path / "stopped", 3, 4))


def test_part_of_an_epoch_and_rare_evaluation(data: DataSet, tmp_path: Path) -> None:
    task = small_task(RESNET, data, epochs=4.4, eval_epochs=3)
    straight = run(task, data, tmp_path / "straight")
    assert [row["step"] for row in straight.history] == [15, 22]
    assert_equal(straight, run(task, data, tmp_path / "stopped", 14, 2))


def test_weights_that_are_not_finite_are_never_saved(
    data: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient may be infinite although the loss of its step is not."""
    update = State.update

    def explode(self: State, micro: Any) -> torch.Tensor:
        loss = update(self, micro)
        if self.step == 4:
            next(self.model.parameters()).data[0] = float("inf")
        return loss

    task = small_task(RESNET, data)
    monkeypatch.setattr(State, "update", explode)
    with pytest.raises(TrainingError, match="weights are not finite after step 3"):
        run(task, data, tmp_path / "run", 3, 1)
    kept = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert kept == ["step-000000003"]
    last = small_task(RESNET, data, epochs=0.8)  # at the very end
    with pytest.raises(TrainingError, match="not finite"):
        run(last, data, tmp_path / "last")


def test_no_memory_is_said_in_two_lines(
    data: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_self: State, _micro: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")

    monkeypatch.setattr(State, "update", full)
    with pytest.raises(TrainingError, match="no memory for resnet18d with 4 images at a time"):
        run(small_task(RESNET, data, grad_accum_steps=2), data, tmp_path / "run")


def test_a_killed_training_loses_no_line_of_its_log(data: DataSet, tmp_path: Path) -> None:
    """Whatever a checkpoint covers is in the log, although nothing was closed."""
    task = small_task(RESNET, data)
    machine = type(QUICK)(**{**QUICK.to_json(), "checkpoint_minutes": 0.0})
    (tmp_path / "run").mkdir()
    lines: list[int] = []

    def look() -> bool:
        lines.append(len((tmp_path / "run" / "log.jsonl").read_text().splitlines()))
        return False

    train(
        task,
        data,
        tmp_path / "run",
        start=lambda: initial_weights(task),
        machine=machine,
        world=World(),
        stopped=look,
    )
    assert len(lines) == 15 and all(found >= number for number, found in enumerate(lines))


def test_logs_have_every_step_once(data: DataSet, tmp_path: Path) -> None:
    task = small_task(RESNET, data)
    trained = run(task, data, tmp_path / "run", 4, 7)
    lines = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert [line.split('"step": ')[1].split(",")[0] for line in lines] == [
        str(step) for step in range(1, 16)
    ]
    table = (tmp_path / "run" / "summary.csv").read_text().splitlines()
    assert len(table) == 1 + len(trained.history) == 4


def test_tensorboard_has_every_step_once_on_both_axes(data: DataSet, tmp_path: Path) -> None:
    """What was logged after the last checkpoint is taken back, by steps and by GFLOPs."""
    task = small_task(RESNET, data)
    given = QUICK.to_json() | {"tensorboard": True, "checkpoint_share": 1e9}
    done: list[int] = []

    def sit(folder: Path, dies_after: int = 0) -> None:
        def stopped() -> bool:
            done.append(0)
            if len(done) == dies_after:
                raise MemoryError  # saves nothing
            return False

        folder.mkdir(exist_ok=True)
        train(
            task,
            data,
            folder,
            start=lambda: initial_weights(task),
            machine=type(QUICK)(**given),
            world=World(),
            flops=(100e9, 1.5e9),
            stopped=stopped,
        )

    straight, disturbed = tmp_path / "straight", tmp_path / "disturbed"
    with pytest.raises(MemoryError):
        sit(disturbed, 8)  # the last checkpoint is that of step 5
    for folder in (straight, disturbed):
        sit(folder)
    for axis, places in (("step", range(1, 16)), ("gflops", range(112, 281, 12))):
        wanted, found = (_scalars(run / "tensorboard" / axis) for run in (straight, disturbed))
        assert found == wanted
        assert {"eval/top1", "eval/loss", "train/loss"} <= set(wanted)
        assert ("train/lr" in wanted) == (axis == "step")  # of no use against FLOPs
        assert [place for place, _ in wanted["train/loss"]] == list(places)


def _scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows, without what depends on the clock."""
    board = EventAccumulator(str(folder))
    board.Reload()
    return {
        name: [(event.step, event.value) for event in board.Scalars(name)]
        for name in board.Tags()["scalars"]
        if name != "train/images_per_second"
    }
