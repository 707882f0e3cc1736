"""A small tree, from its leaves to its target: run, stopped, killed, gone on with."""

import json
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file

import rbdc
from rbdc.errors import DataError, Interrupted, RecipeError, RunError
from rbdc.experiments.train import Training, prepare
from rbdc.jobs.engine import Event, Watcher
from rbdc.jobs.job import Context, Job, execute
from rbdc.jobs.lock import holder, locked
from rbdc.jobs.train import TrainJob
from rbdc.models import image_side
from rbdc.runs.record import differences
from rbdc.settings import Machine, Request
from tests.support import (
    QUICK,
    TINY,
    TINY_TEXT,
    folder_data,
    forked,
    own_copy,
    small_recipe,
    started,
    until,
)

RESNET, DEIT = "resnet18d", "deit_tiny_patch16_224"
EAGER = Machine(**{**QUICK.to_json(), "checkpoint_minutes": 0.0})  # saves after every step


def small_tree(folder: Path, name: str = RESNET, **settings: Any) -> Training:
    """Two steps: four leaves for one epoch, two models for two, the target for four."""
    request: dict[str, Any] = {
        "model": name,
        "model_kwargs": {**TINY, **TINY_TEXT}.get(name),
        "data": str(folder),
        "in_memory": True,
        "steps": 2 if name == RESNET else 1,
        "epochs": 4.0,
        "transition": ("carry",),
    }
    of_request = {key: settings.pop(key) for key in [*settings] if hasattr(Request(), key)}
    return prepare(Request(**{**request, **of_request}), small_recipe(**settings))


def run(
    prepared: Training, output: Path, machine: Machine = QUICK, **options: Any
) -> dict[str, Any]:
    result: dict[str, Any] = started(
        prepared, output, machine=machine, watch=lambda _event: None, **{"jobs": 1, **options}
    )
    return result


def weights(output: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(output / "model" / "model.safetensors"))


def assert_same_model(left: Path, right: Path) -> None:
    ours, theirs = weights(left), weights(right)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.fixture(scope="module")
def straight(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own_copy(tmp_path_factory, "tree", lambda output: run(small_tree(folder), output))


def test_the_target_is_an_ordinary_timm_model(straight: Path) -> None:
    model = timm.create_model(f"local-dir:{straight / 'model'}", pretrained=True)
    assert model.num_classes == 10 and len(model.pretrained_cfg["label_names"]) == 10
    record = json.loads((straight / "model" / "rbdc.json").read_text())
    assert {"target", "coupling target", "2.3"} <= record["run"]["nodes"].keys()
    result = json.loads((straight / "result.json").read_text())
    nodes = result["nodes"]
    trained = [node for node in nodes.values() if node["kind"] == "train"]
    assert len(trained) == 7 and len(nodes) == 10
    assert result["training_flops"] == sum(node["training_flops"] for node in trained)
    coupling = nodes["coupling target"]
    assert (
        coupling["exact"] and coupling["norm_drift"] == 0 and 0 <= coupling["metrics"]["top1"] <= 1
    )


def test_what_was_planned_is_what_was_trained(folder: Path, straight: Path) -> None:
    plan = small_tree(folder).plan
    result = json.loads((straight / "result.json").read_text())
    assert result["training_flops"] == pytest.approx(plan.training_flops)  # the batch divides
    assert [stage.epochs for stage in plan.stages] == [1, 2, 4]


def test_siblings_differ_and_seeds_follow_from_the_place(folder: Path) -> None:
    tree = small_tree(folder).tree
    seeds = [node.job.task.seed for node in tree.nodes if isinstance(node.job, TrainJob)]
    assert len(set(seeds)) == len(seeds) == 7
    again = small_tree(folder).tree
    assert [node.job.key for node in tree.nodes] == [node.job.key for node in again.nodes]
    other = small_tree(folder, seed=1).tree
    assert not {node.job.key for node in tree.nodes} & {node.job.key for node in other.nodes}


def test_a_finished_run_is_found_finished(folder: Path, straight: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (straight / "jobs").rglob("*")}
    events: list[Event] = []
    started(small_tree(folder), straight, machine=QUICK, watch=events.append, jobs=1)
    assert {event.kind for event in events} == {"found"}
    assert {path: path.stat().st_mtime_ns for path in (straight / "jobs").rglob("*")} == before


DEEPER: dict[str, dict[str, Any]] = {RESNET: {"layers": [2, 1, 1, 1]}, DEIT: {"patch_size": 7}}
"""Enough blocks and patches to grow in depth and resolution."""


@pytest.mark.parametrize("name", [RESNET, DEIT])
@pytest.mark.parametrize(
    "transition, grow",
    [
        ("restart", ("width",)),
        ("carry", ("width",)),
        ("carry", ("width", "depth", "resolution")),
        ("restart", ("depth", "resolution")),
    ],
)
def test_stopped_across_transitions_it_ends_with_the_same_bits(
    name: str,
    transition: str,
    grow: tuple[str, ...],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings: dict[str, Any] = {
        "transition": (transition,),
        "grow": grow,
        "model_kwargs": {**TINY[name], **(DEEPER[name] if "depth" in grow else {})},
        **({"steps": 1} if "depth" in grow else {}),
        "model_ema": True,
        "model_ema_decay": 0.9,
        "mixup": 0.2,
        "epochs": 2.0,
        "rounding": "none",
        "drop_path": 0.1,
    }
    _stop_and_compare(lambda: small_tree(folder, name, **settings), tmp_path, monkeypatch)


def test_a_language_model_grows_in_depth_and_sequence_length_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")

    def prepared() -> Training:
        return text_tree(tmp_path, grow=("width", "depth", "resolution"))

    stages = prepared().plan.stages
    assert [stage.grown for stage in stages] == [(), ("width", "depth", "resolution")]
    assert [image_side(stage.model) for stage in stages] == [12, 16]
    _stop_and_compare(prepared, tmp_path, monkeypatch)


def text_tree(folder: Path, **settings: Any) -> Training:
    """Two small language models of a text of the folder, and the target."""
    text = folder / "text.txt"
    text.write_text("".join(map(chr, (97 + i * i % 23 for i in range(3000)))))
    of_text = {"data": str(text), "epochs": 0.5, "rounding": "none", "smoothing": 0.0}
    return small_tree(folder, "gpt2", **of_text, **settings)


def _stop_and_compare(
    prepared: Callable[[], Training], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run a tree in one session, and in many that a signal stops; they end with the same bits."""
    run(prepared(), tmp_path / "straight")
    steps = [0]
    update = rbdc.training.state.State.update

    def counted(self: Any, micro: Any) -> Any:
        steps[0] += 1
        if steps[0] % 4 == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(self, micro)

    monkeypatch.setattr(rbdc.training.state.State, "update", counted)
    sittings = 0
    while not (tmp_path / "stopped" / "result.json").exists():
        sittings += 1
        with suppress(Interrupted):
            run(prepared(), tmp_path / "stopped")
    assert sittings > 3
    assert_same_model(tmp_path / "straight", tmp_path / "stopped")
    results = [
        json.loads((tmp_path / x / "result.json").read_text()) for x in ("straight", "stopped")
    ]
    assert results[0]["metrics"] == results[1]["metrics"]


def _run_and_exit(prepared: Callable[[], Training], output: Path) -> None:
    run(prepared(), output, EAGER)


def test_killed_twenty_times_it_ends_with_the_same_bits(
    folder: Path, straight: Path, tmp_path: Path
) -> None:
    _kill_and_compare(lambda: small_tree(folder), straight, tmp_path, 20)


def test_a_language_model_killed_six_times_ends_with_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run(text_tree(tmp_path), tmp_path / "straight")
    _kill_and_compare(lambda: text_tree(tmp_path), tmp_path / "straight", tmp_path, 6)


def _kill_and_compare(
    prepared: Callable[[], Training], straight: Path, tmp_path: Path, times: int
) -> None:
    """Real processes, killed with -9 at random moments; what was finished is not touched again."""
    moments, kills, output = random.Random(0), 0, tmp_path / "run"
    finished: dict[Path, int] = {}
    while kills < times:
        process = forked(_run_and_exit, prepared, output)
        process.join(moments.uniform(0.05, 1.0))
        if process.is_alive():
            os.kill(process.pid or 0, signal.SIGKILL)
            process.join()
            kills += 1
        else:  # it came to its end: once more from the beginning
            assert process.exitcode == 0
            assert_same_model(straight, output)
            output, finished = tmp_path / f"run-{kills}", {}
        for result, written in finished.items():
            assert result.stat().st_mtime_ns == written
        finished = {path: path.stat().st_mtime_ns for path in output.glob("jobs/*/result.json")}
    run(prepared(), output)
    assert_same_model(straight, output)
    for result, written in finished.items():
        assert result.stat().st_mtime_ns == written
    left = [path for path in output.rglob("*") if path.name.endswith((".partial", ".old"))]
    assert not left and not list(output.rglob("checkpoints"))


def test_siblings_side_by_side_end_with_the_same_bits(
    folder: Path, straight: Path, tmp_path: Path
) -> None:
    run(small_tree(folder), tmp_path / "run", jobs=2)
    assert_same_model(straight, tmp_path / "run")


def test_standard_training_of_what_cannot_be_coupled(folder: Path, tmp_path: Path) -> None:
    """Odd widths: there are no halves to look at, and nothing else is wrong with it."""
    odd = {**TINY[RESNET], "channels": [3, 5, 5, 7]}
    settings: dict[str, Any] = {"model_kwargs": odd, "steps": 0, "epochs": 1.0}
    run(small_tree(folder, **settings), tmp_path / "run")
    (blocks,) = tmp_path.glob("run/jobs/*/blocks.jsonl")
    assert blocks.read_text() == ""


def test_two_runs_in_one_folder(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    first = forked(_run_and_exit, lambda: small_tree(folder), output)
    until((output / "run.json").exists)
    with pytest.raises(RunError, match=rf"in use by another run: process {first.pid} on .+ since"):
        run(small_tree(folder), output)
    os.kill(first.pid or 0, signal.SIGKILL)
    first.join()
    run(small_tree(folder), output)  # who was killed holds nothing


def test_another_request_on_an_old_folder_is_refused(folder: Path, straight: Path) -> None:
    before = (straight / "run.json").read_text()
    others: tuple[tuple[dict[str, Any], str], ...] = (
        ({"lr": 0.002}, "recipe.lr was 0.001, now 0.002"),
        ({"seed": 3}, "seed was 0, now 3"),
        ({"transition": ("restart",)}, "transition was"),
        ({"epochs": 5.0}, "plan"),
    )
    for settings, expected in others:
        with pytest.raises(RunError, match=expected):
            run(small_tree(folder, **settings), straight)
    assert (straight / "run.json").read_text() == before
    run(small_tree(folder), straight)


def test_the_data_may_move_and_room_is_needed_once(
    folder: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder, tmp_path / "elsewhere")
    monkeypatch.setattr("rbdc.runs.run.free_bytes", lambda _folder: 100_000)  # what is left
    run(small_tree(tmp_path / "elsewhere"), straight)


def test_a_killed_run_holds_nothing_though_its_workers_live(folder: Path, tmp_path: Path) -> None:
    """Workers that decode images are forked, and outlive a killed parent for seconds."""
    process = forked(_run_with_workers, folder, tmp_path / "run")
    while not list(tmp_path.glob("run/jobs/*/checkpoints/step-*")) and process.is_alive():
        time.sleep(0.01)
    assert holder(tmp_path / "run")
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert holder(tmp_path / "run") is None
    with locked(tmp_path / "run"):
        pass


def _run_with_workers(folder: Path, output: Path) -> None:
    machine = Machine(**{**EAGER.to_json(), "workers": 2})
    run(small_tree(folder, in_memory=False, scale=(0.5, 1.0)), output, machine)


def test_other_data_on_an_old_folder_is_refused(tmp_path: Path) -> None:
    folder_data(tmp_path / "data")
    settings: dict[str, Any] = {"steps": 1, "epochs": 2.0}
    run(small_tree(tmp_path / "data", **settings), tmp_path / "run")
    picture = next((tmp_path / "data" / "train").rglob("*.png"))
    next((tmp_path / "data" / "val").rglob("*.png")).rename(picture)
    with pytest.raises(RunError, match=r"data_set\.fingerprint was"):
        run(small_tree(tmp_path / "data", **settings), tmp_path / "run")


def test_a_folder_of_something_else_is_left_alone(folder: Path, tmp_path: Path) -> None:
    precious = tmp_path / "jobs" / "mine" / "checkpoints" / "precious.pt"
    precious.parent.mkdir(parents=True)
    others = (precious, tmp_path / "jobs/mine/result.json", tmp_path / "jobs/mine/.notes.old")
    for path in others:
        path.write_text("dear")
    with pytest.raises(RunError, match="no run of ours"):
        run(small_tree(folder), tmp_path)
    assert all(path.exists() for path in others) and not (tmp_path / "run.lock").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written"):
        run(small_tree(folder), tmp_path / "file" / "run")


def test_a_damaged_checkpoint_is_passed_over(folder: Path, straight: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    process = forked(_run_and_exit, lambda: small_tree(folder), output)
    until(lambda: len(list(output.glob("jobs/*/checkpoints/step-*"))) >= 2)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    newest = sorted(output.glob("jobs/*/checkpoints/step-*"))[-1]
    content = bytearray((newest / "state.safetensors").read_bytes())
    content[-1] ^= 1
    (newest / "state.safetensors").write_bytes(content)
    with pytest.warns(UserWarning, match=f"{newest.name} is damaged"):
        run(small_tree(folder), output)
    assert_same_model(straight, output)


def test_a_nan_stops_with_step_and_images_and_the_rest_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = small_tree(folder)
    victim = next(node for node in prepared.tree.nodes if node.name == "2.1")
    assert isinstance(victim.job, TrainJob)
    seed, update = victim.job.task.seed, rbdc.training.state.State.update

    def poisoned(self: Any, micro: Any) -> Any:
        if self.seed == seed and self.step == 3:
            images = micro[0].images.clone()  # its siblings train on the same batch
            images[2, 0, 3, 3] = float("nan")
            micro = [replace(micro[0], images=images), *micro[1:]]
        return update(self, micro)

    monkeypatch.setattr(rbdc.training.state.State, "update", poisoned)
    events: list[Event] = []
    with pytest.raises(
        rbdc.RbdcError, match=r"the loss is nan at step 3 \(epoch 0\), images image"
    ) as e:
        started(prepared, tmp_path / "run", machine=EAGER, watch=events.append, jobs=1)
    assert "last good checkpoint is kept" in str(e.value)
    states = {
        name: [ev.kind for ev in events if ev.key == node.job.key]
        for name, node in ((node.name, node) for node in prepared.tree.nodes)
    }
    assert states["2.1"][-1] == "failed" and not states["coupling 1.0"]
    assert states["1.1"][-1] == "finished" and not states["target"]
    kept = list((tmp_path / "run").glob("jobs/*/checkpoints/step-*"))
    assert sorted(path.name for path in kept) == ["step-000000002", "step-000000003"]
    monkeypatch.undo()
    run(small_tree(folder), tmp_path / "run")  # what is mended goes on


def test_no_room_is_said_before_training(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rbdc.runs.run.free_bytes", lambda _folder: 1000)
    with pytest.raises(RunError, match=r"needs up to .* GB and .* has 0.0 GB free"):
        run(small_tree(folder), tmp_path / "run")
    assert not (tmp_path / "run").exists()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "optimizer": ({"opt": "adamww"}, "no optimizer called 'adamww'"),
    "carried state": ({"opt": "adan"}, "which has no coupling rule"),
    "batch": ({"batch_size": 50}, "the batch size is 50, and there are 40"),
    "odd batch": ({"batch_size": 7, "mixup": 0.5}, "not a multiple of 2"),
    "classes": ({"model_kwargs": {**TINY[RESNET], "num_classes": 3}}, "3 classes"),
    "steps": ({"steps": 4}, "cannot be halved 4 times"),
    "size": ({"model_kwargs": {**TINY[RESNET], "img_size": 32}}, "images are"),
    "optimizer's state": ({"opt": "adafactorbv"}, "adafactorbv cannot be used here"),
    "transitions": ({"transition": ("carry",) * 3}, "3 transitions are given for 2"),
    "mean": ({"mean": (0.1, 0.2), "std": (1.0, 1.0)}, "mean has 2 values"),
    "no spending": ({"epochs": None}, "was given no budget"),
    "teacher": ({"distillation": "hard", "teacher": "resnet19"}, "neither a folder nor"),
    "teacher weights": ({"distillation": "hard", "teacher": "resnet18"}, "has no weights"),
}


@pytest.mark.parametrize(("settings", "expected"), BAD.values(), ids=BAD)
def test_what_cannot_work_is_said_before_anything_is_written(
    settings: dict[str, Any], expected: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(rbdc.RbdcError, match=expected) as error:
        run(small_tree(folder, **settings), tmp_path / "run")
    assert isinstance(error.value, RecipeError | DataError | RunError | rbdc.RbdcError)
    assert not (tmp_path / "run").exists()


def test_a_full_disk_ends_in_two_lines_and_the_run_goes_on(
    folder: Path, straight: Path, tmp_path: Path
) -> None:
    """Files may not grow beyond some size: as if the disk were full there."""
    for limit in (2_000, 20_000, 30_000, 45_000):
        process = forked(_run_on_a_small_disk, folder, tmp_path, limit)
        process.join()
        assert process.exitcode == 0
        said = (tmp_path / f"said-{limit}").read_text().splitlines()
        assert len(said) == 2, said
        assert not [p for p in (tmp_path / "run").rglob("*") if p.name.endswith(".partial")]
    run(small_tree(folder), tmp_path / "run")
    assert_same_model(straight, tmp_path / "run")


def _run_on_a_small_disk(folder: Path, place: Path, limit: int) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        run(small_tree(folder), place / "run", EAGER)
        said = "it went well"
    except rbdc.RbdcError as error:
        said = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (place / f"said-{limit}").write_text(said)


def test_differences_are_named_with_dots() -> None:
    assert list(differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": 4})) == [
        ("a.c", 2, 3),
        ("d", None, 4),
    ]


def test_another_engine_can_take_the_place_of_ours(
    folder: Path, straight: Path, tmp_path: Path
) -> None:
    """An engine knows jobs and how one is done, and nothing else: here, last come first served."""

    class Backwards:
        def run(self, jobs: Sequence[Job], context: Context, watch: Watcher) -> None:
            done: set[str] = set()
            while len(done) < len(jobs):
                for job in reversed(jobs):
                    if job.key not in done and all(p.key in done for p in job.parents):
                        execute(job, context, observe=lambda _p: None, stopped=lambda: False)
                        watch(Event(kind="finished", key=job.key))
                        done.add(job.key)

    started(
        small_tree(folder),
        tmp_path / "run",
        machine=QUICK,
        watch=lambda _e: None,
        jobs=1,
        engine=Backwards(),
    )
    assert_same_model(straight, tmp_path / "run")
