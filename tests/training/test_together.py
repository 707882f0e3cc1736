"""Several trainings on one stream of batches: each with the bits of a training alone."""

import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rbdc.data import DataSet, TrainingBatches
from rbdc.errors import Interrupted, TrainingError
from rbdc.training import Session, Task, Trained, World, initial_weights, train_together
from rbdc.training.checkpoint import common_step
from rbdc.training.classification import Classification, training_state
from rbdc.training.fused import FusedStates
from rbdc.training.state import State
from tests.support import QUICK, folder_data, small_data, small_task
from tests.training.test_resume import DEIT, RESNET, RICH, after, assert_equal, run

SETTINGS: dict[str, Any] = {**RICH, "drop_path": 0.2}


def together(
    tasks: list[Task],
    data: DataSet,
    folder: Path,
    stopped: Callable[[], bool] = lambda: False,
    *,
    fused: bool = False,
    teacher: nn.Module | None = None,
) -> list[Trained | TrainingError]:
    """Train tasks in one loop; return their outcomes in the order of the tasks."""
    places = [folder / str(number) for number in range(len(tasks))]
    resume_at = common_step([place / "checkpoints" for place in places]) if fused else None
    with ExitStack() as stack:
        sessions = []
        for task, place in zip(tasks, places, strict=True):
            place.mkdir(parents=True, exist_ok=True)
            start = partial(initial_weights, task)
            problem = Classification(task, data, start, QUICK, World(), teacher=teacher)
            session = Session(problem, place, machine=QUICK, world=World(), resume_at=resume_at)
            sessions.append(stack.enter_context(session))
        found = dict(train_together(sessions, stopped, fused=fused))
        return [found[session] for session in sessions]


def siblings(data: DataSet, *seeds: int, **settings: Any) -> list[Task]:
    task = small_task(RESNET, data, **SETTINGS, **settings)
    return [replace(task, seed=seed) for seed in seeds]


def trained(outcome: Trained | TrainingError) -> Trained:
    assert isinstance(outcome, Trained)
    return outcome


def test_each_ends_as_if_it_were_alone(tmp_path: Path) -> None:
    data = small_data()
    tasks = siblings(data, 1, 2, 3)
    for number, outcome in enumerate(together(tasks, data, tmp_path / "group")):
        alone = run(tasks[number], data, tmp_path / f"alone{number}")
        assert_equal(trained(outcome), alone)


def test_one_pass_over_the_files_serves_all(tmp_path: Path) -> None:
    data = folder_data(tmp_path / "data")
    tasks = siblings(data, 1, 2, epochs=2, scale=(0.3, 1.0), aa="rand-m5-mstd0.5-inc1")
    outcomes = [trained(outcome) for outcome in together(tasks, data, tmp_path / "group")]
    assert_equal(outcomes[1], run(tasks[1], data, tmp_path / "alone"))
    assert outcomes[0].decoded == outcomes[0].images > 0
    assert outcomes[1].decoded == 0


class Counting(nn.Module):
    """A teacher that counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def forward(self, images: Tensor) -> Tensor:
        self.asked += 1
        return images.flatten(1)[:, 300:310]


@pytest.mark.parametrize("fused", [False, True])
def test_a_teacher_is_asked_once_for_all(fused: bool, tmp_path: Path) -> None:
    data, teacher = small_data(), Counting()
    tasks = siblings(data, 1, 2, epochs=1, distillation="soft", teacher="x", grad_accum_steps=2)
    group = together(tasks, data, tmp_path / "group", fused=fused, teacher=teacher)
    micro_batches = 2 * trained(group[0]).images // 8
    assert teacher.asked == micro_batches
    if not fused:
        alone = together(tasks[1:], data, tmp_path / "alone", teacher=teacher)
        assert_equal(trained(group[1]), trained(alone[0]))
        assert teacher.asked == 2 * micro_batches
    untaught = siblings(data, 1, epochs=1, grad_accum_steps=2)
    (other,) = together(untaught, data, tmp_path / "untaught")
    assert trained(other).history[-1]["loss"] != trained(group[0]).history[-1]["loss"]


def test_those_that_resume_at_other_steps_wait_for_each_other(tmp_path: Path) -> None:
    data = small_data()
    tasks = siblings(data, 1, 2, 3)
    group = tmp_path / "group"
    for number, steps in ((0, 4), (1, 7)):  # the third has not begun
        with pytest.raises(Interrupted):
            together([tasks[number]], data, tmp_path / "one", after(steps))
        group.mkdir(exist_ok=True)
        (tmp_path / "one" / "0").rename(group / str(number))
    with pytest.raises(Interrupted):
        together(tasks, data, group, after(5))
    newest = [max(p.name for p in (group / str(n) / "checkpoints").iterdir()) for n in range(3)]
    assert newest == ["step-000000005", "step-000000007", "step-000000005"]
    for number, outcome in enumerate(together(tasks, data, group)):
        alone = run(tasks[number], data, tmp_path / f"alone{number}")
        assert_equal(trained(outcome), alone)


def test_one_that_fails_leaves_the_group(tmp_path: Path) -> None:
    data = small_data()
    good, bad = siblings(data, 1, 2)
    bad = replace(bad, recipe=replace(bad.recipe, lr=1e30))
    failed, outcome = together([bad, good], data, tmp_path / "group")
    assert isinstance(failed, TrainingError)
    assert_equal(trained(outcome), run(good, data, tmp_path / "alone"))


def test_a_short_one_ends_before_a_long_one(tmp_path: Path) -> None:
    data = small_data()
    first, second = siblings(data, 1, 2)
    short = replace(first, epochs=1.4)
    outcomes = together([short, second], data, tmp_path / "group")
    assert trained(outcomes[0]).images < trained(outcomes[1]).images
    for number, task in enumerate((short, second)):
        assert_equal(trained(outcomes[number]), run(task, data, tmp_path / f"alone{number}"))


def test_time_is_divided_among_those_who_share_it(tmp_path: Path) -> None:
    data = small_data()
    torch.set_num_threads(1)
    outcomes = [trained(o) for o in together(siblings(data, 1, 2), data, tmp_path / "group")]
    low, high = sorted(outcome.spent.elapsed for outcome in outcomes)
    assert 0 < low <= high < 10 * low


@pytest.mark.numeric
@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("name", [RESNET, DEIT])
def test_fused_models_train_as_separate_ones_do(name: str) -> None:
    data = small_data()
    task = small_task(name, data, mixup=0.5, model_ema=True, clip_grad=1.0, grad_accum_steps=2)
    tasks = [replace(task, seed=seed) for seed in (1, 2, 3)]
    batches = TrainingBatches(
        data, task.recipe, task.image, seed=1, batch_size=8, micro_batches=(2, (0, 1))
    )

    def states() -> list[State]:
        return [
            training_state(
                task,
                initial_weights(task),
                batches.steps_per_epoch,
                device=torch.device("cpu"),
                machine=QUICK,
                world=World(),
            )
            for task in tasks
        ]

    separate, together = states(), states()
    fused = FusedStates(together)
    for micro in batches.from_step(0, 4):
        double = [replace(batch, images=batch.images.double()) for batch in micro]
        losses = [state.update(double) for state in separate]
        torch.testing.assert_close(fused.update(double), losses)
    for left, right in zip(separate, together, strict=True):
        (tensors, facts), (others, other_facts) = left.saved(), right.saved()
        assert facts == other_facts
        for key, tensor in tensors.items():
            torch.testing.assert_close(others[key], tensor, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", [RESNET, DEIT])
@pytest.mark.parametrize("damage", ["none", "one checkpoint lost", "killed at the end"])
def test_fused_models_resume_with_their_own_bits(name: str, damage: str, tmp_path: Path) -> None:
    data = small_data()
    task = small_task(name, data, **SETTINGS)
    tasks = [replace(task, seed=seed) for seed in (1, 2)]
    straight = together(tasks, data, tmp_path / "straight", fused=True)
    group = tmp_path / "stopped"
    stops = (4, 3) if damage != "killed at the end" else (4, 10**9)
    for steps in stops:
        with suppress(Interrupted):
            together(tasks, data, group, after(steps), fused=True)
    if damage == "one checkpoint lost":
        shutil.rmtree(max((group / "1" / "checkpoints").iterdir()))
    for left, right in zip(straight, together(tasks, data, group, fused=True), strict=True):
        assert_equal(trained(left), trained(right))


def test_a_fused_model_that_fails_leaves_the_bits_of_the_others(tmp_path: Path) -> None:
    data = small_data()
    good, other = siblings(data, 1, 2)
    bad = replace(other, recipe=replace(other.recipe, lr=1e30))
    _, straight = together([other, good], data, tmp_path / "straight", fused=True)
    failed, outcome = together([bad, good], data, tmp_path / "group", fused=True)
    assert isinstance(failed, TrainingError)
    assert_equal(trained(outcome), trained(straight))
