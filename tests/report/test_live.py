"""A run as it goes, told to a terminal and to a file."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from rbdc.experiments.train import Training, prepare
from rbdc.jobs.engine import Event
from rbdc.report.live import LiveRun
from rbdc.report.units import readable_duration
from rbdc.settings import Request
from rbdc.training import Progress
from tests.support import TINY, folder_data, small_recipe

SCORES = {"top1": 0.25, "top5": 0.75, "loss": 2.0}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Training:
    folder = tmp_path_factory.mktemp("data")
    folder_data(folder)
    request = Request(
        model="resnet18d",
        model_kwargs=TINY["resnet18d"],
        data=str(folder),
        in_memory=True,
        epochs=4.0,
        with_baseline=True,
    )
    return prepare(request, small_recipe())


def progress(step: int, scores: dict[str, float] | None = None) -> Progress:
    return Progress(
        step=step,
        steps=20,
        epoch=step // 5,
        epochs=4.0,
        batch_size=8,
        loss=1.5,
        lr=0.001,
        images_per_second=40.0,
        scores=scores,
    )


def tell(prepared: Training, console: Console) -> LiveRun:
    first, second, coupling, target = prepared.tree.nodes
    standard = prepared.nodes[-1]
    couple = {"kind": "grow", "metrics": {"top1": 0.5}, "proof_error": 1e-7, "norm_drift": 0.0}
    trained = {"kind": "train", "metrics": {"top1": 0.625}, "seconds": 65.0}
    with LiveRun(prepared.nodes, console) as live:
        for event in (
            Event(kind="found", key=first.job.key, result=trained),
            Event(kind="started", key=second.job.key),
            Event(kind="progress", key=second.job.key, progress=progress(5)),
            Event(kind="progress", key=second.job.key, progress=progress(10, SCORES)),
            Event(kind="finished", key=second.job.key, result=trained),
            Event(kind="started", key=coupling.job.key),
            Event(kind="finished", key=coupling.job.key, result=couple),
            Event(kind="started", key=target.job.key),
            Event(kind="failed", key=target.job.key, error="the loss is nan\nTry again."),
            Event(kind="started", key=standard.job.key),
        ):
            live(event)
        if console.is_terminal:
            live.progress.refresh()
    return live


def test_a_file_gets_plain_lines(prepared: Training) -> None:
    output = StringIO()
    tell(prepared, Console(file=output, width=140))
    lines = output.getvalue().splitlines()
    assert lines[0] == "1.0 (width 0.5): already trained, top-1 62.50%"
    assert lines[1].startswith(
        "Train 1.1 (width 0.5): epoch 3/4  loss 1.500  40 images/s  lr 1.00e-03  top-1 25.00%  left"
    )
    assert lines[2] == "1.1 (width 0.5): top-1 62.50% after 1:05"
    assert lines[3].startswith(
        "coupling target (width 1): top-1 50.00% before any step (proof 1e-07"
    )
    assert lines[4] == "target (width 1): failed: the loss is nan"
    assert "\x1b" not in output.getvalue()


def test_a_terminal_gets_bars(prepared: Training) -> None:
    output = StringIO()
    live = tell(prepared, Console(file=output, width=120, force_terminal=True))
    text = output.getvalue()
    assert "tree" in text and "━" in text and "left" in text
    shares = [live.done[node.job.key] for node in prepared.tree.nodes[:2]]
    assert shares == [1.0, 1.0]


def test_the_time_left_is_what_is_expected_of_each_level(prepared: Training) -> None:
    output = StringIO()
    trainings = [node for node in prepared.nodes if node.job.trains]
    with LiveRun(prepared.nodes, Console(file=output, width=140)) as live:
        live(Event(kind="note", key="", note="2 models train in one process"))
        for node, seconds in zip(trainings, (10, 10, 40, 60), strict=True):
            live(Event(kind="expected", key=node.job.key, seconds=seconds))
        first = trainings[0].job.key
        live(Event(kind="started", key=first))
        live(Event(kind="progress", key=first, progress=progress(1, SCORES)))
    lines = output.getvalue().splitlines()
    assert lines[0] == "2 models train in one process"
    assert lines[1].endswith("left 2:00")  # not what the FLOPs of its first step suggest


def test_who_waits_for_images_is_told_what_to_do_once(prepared: Training) -> None:
    output = StringIO()
    key = prepared.tree.nodes[0].job.key
    slow = replace(progress(20), waited=0.75, workers=2, images_per_second=1240.0)
    with LiveRun(prepared.nodes, Console(file=output, width=140)) as live:
        live(Event(kind="started", key=key))
        for p in (replace(slow, waited=0.1), replace(slow, step=5), slow, slow):
            live(Event(kind="progress", key=key, progress=p))
    assert output.getvalue() == (
        "1.0 (width 0.5): loader-bound: 1,240 of 4,960 images/s; 6 more workers (--workers 8), or "
        "--in-memory\n"
    )


@pytest.mark.parametrize("epochs", [3.075, 0.005])
def test_no_epoch_is_beyond_the_whole(epochs: float, prepared: Training) -> None:
    output, key = StringIO(), prepared.tree.nodes[0].job.key
    last = replace(progress(20, SCORES), epochs=epochs, epoch=int(epochs))
    with LiveRun(prepared.nodes, Console(file=output, width=140)) as live:
        live(Event(kind="started", key=key))
        live(Event(kind="progress", key=key, progress=last))
    assert f"epoch {epochs}/{epochs} " in output.getvalue()


def test_durations() -> None:
    assert [readable_duration(s) for s in (5, 65, 3600, 90061)] == [
        "0:05",
        "1:05",
        "1:00:00",
        "25:01:01",
    ]
