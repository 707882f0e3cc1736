"""A job's key is its content; a plan's jobs have their places."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import rbdc
from rbdc.data import DataSet
from rbdc.errors import RecipeError
from rbdc.experiments.train import prepare
from rbdc.growth import Setting, Trial
from rbdc.growth.rbdc import Coupling, Rbdc
from rbdc.jobs import measure, ways
from rbdc.jobs.engine import groups_of
from rbdc.jobs.grow import GrowJob
from rbdc.jobs.train import TrainJob
from rbdc.jobs.ways import measure_ways
from rbdc.settings import Machine, Request
from rbdc.training import Task, fit_to_data
from rbdc.training.teacher import Teacher
from tests.support import QUICK, TINY, small_data, small_recipe


@pytest.fixture(scope="module")
def data() -> DataSet:
    return small_data()


def setting_of(data: DataSet, **options: Any) -> Setting:
    recipe = small_recipe()
    spec = rbdc.ModelSpec(name="resnet18d", arguments=TINY["resnet18d"])
    model = fit_to_data(spec, data, recipe)
    return Setting(model=model, recipe=recipe, data=data, baseline_epochs=10.0, **options)


def tree_of(data: DataSet, steps: int = 2, **options: Any) -> Trial:
    protocol = Rbdc(steps=steps, planning={"epochs": 8.0, "rounding": "whole"})
    return protocol.trial(setting_of(data, **options), None, 0)


def trainings(tree: Trial) -> dict[str, TrainJob]:
    return {node.name: node.job for node in tree.nodes if isinstance(node.job, TrainJob)}


def test_the_jobs_of_a_plan(data: DataSet) -> None:
    tree = tree_of(data)
    assert [node.name for node in tree.nodes] == [
        *("2.0", "2.1", "2.2", "2.3"),
        *("coupling 1.0", "coupling 1.1", "1.0", "1.1"),
        *("coupling target", "target"),
    ]
    jobs = trainings(tree)
    assert [jobs[name].task.epochs for name in ("2.0", "1.0", "target")] == [2, 4, 8]
    assert [jobs[name].model.width for name in ("2.0", "1.0", "target")] == [0.25, 0.5, 1]
    coupling = jobs["1.1"].initial
    assert coupling and coupling.parents == (jobs["2.2"], jobs["2.3"])
    positions = {node.job.key: number for number, node in enumerate(tree.nodes)}
    for node in tree.nodes:
        assert all(positions[parent.key] < positions[node.job.key] for parent in node.job.parents)


def test_standard_training_costs_what_the_tree_costs() -> None:
    request = Request(
        model="resnet18d", model_kwargs=TINY["resnet18d"], epochs=8.0, steps=2, with_baseline=True
    )
    training = prepare(request, small_recipe())
    job = training.nodes[-1].job
    assert training.nodes[-1].name == "standard"
    assert isinstance(job, TrainJob) and job.initial is None
    target = training.plan.target
    assert job.task.epochs * target.training_flops / target.epochs == pytest.approx(
        training.plan.training_flops
    )


def test_a_worker_is_sent_the_flops_that_were_counted(
    data: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To count them again would take a worker as long as hundreds of steps of a narrow model."""
    job = trainings(tree_of(data))["1.0"]
    counted = job.flops
    monkeypatch.delattr("rbdc.jobs.train.forward_flops")
    assert pickle.loads(pickle.dumps(job)).flops == counted


def test_restart_and_carry(data: DataSet) -> None:
    restart, carry = (trainings(tree_of(data, transition=(name,))) for name in ("restart", "carry"))
    assert all(job.task.anneal and not job.saved_for_growth for job in restart.values())
    assert {job.task.warmup_epochs for job in restart.values()} == {1.0}
    assert {name for name, job in carry.items() if job.task.anneal} == {"target"}
    assert {name for name, job in carry.items() if not job.saved_for_growth} == {"target"}
    short = trainings(tree_of(data, transition=("carry",), carry_warmup_epochs=0.25))
    assert short["2.0"].task.warmup_epochs == 1.0 and short["1.0"].task.warmup_epochs == 0.25


def test_a_transition_a_level_from_the_leaves_up(data: DataSet) -> None:
    jobs = trainings(tree_of(data, transition=("carry", "restart")))
    assert not jobs["2.0"].task.anneal and jobs["2.0"].saved_for_growth == "optimizer"
    assert jobs["1.0"].task.anneal and not jobs["1.0"].saved_for_growth
    first, last = jobs["1.0"].initial, jobs["target"].initial
    assert first and last and first.method == Coupling(transition="carry")
    assert last.method == Coupling(transition="restart")
    with pytest.raises(RecipeError, match="3 transitions are given for 2 between the stages"):
        tree_of(data, transition=("carry",) * 3)


def test_narrow_models_may_have_a_rate_of_their_own(data: DataSet) -> None:
    jobs = trainings(tree_of(data, narrow_lr=1.5))
    rates = [jobs[name].task.recipe.learning_rate for name in ("target", "1.0", "1.1", "2.3")]
    assert rates == pytest.approx([1e-3, 1.5e-3, 1.5e-3, 2.25e-3])
    assert jobs["target"].task.recipe == small_recipe()


def test_no_steps_is_standard_training(data: DataSet) -> None:
    tree = tree_of(data, steps=0)
    assert [node.name for node in tree.nodes] == ["target"]


def test_a_key_changes_with_all_that_decides_the_result(data: DataSet) -> None:
    job = trainings(tree_of(data, transition=("restart",)))["1.0"]
    assert job.initial is not None
    others = [
        replace(job, task=replace(job.task, seed=job.task.seed + 1)),
        replace(job, task=replace(job.task, data_seed=job.task.data_seed + 1)),
        replace(job, task=replace(job.task, epochs=5)),
        replace(job, task=replace(job.task, anneal=False)),
        replace(job, task=replace(job.task, warmup_epochs=0.5)),
        replace(job, task=replace(job.task, model=job.model.scaled(0.5))),
        replace(job, task=replace(job.task, recipe=small_recipe(lr=2e-3))),
        replace(job, data=replace(data, fingerprint="other")),
        replace(job, data=replace(data, class_names=tuple(reversed(data.class_names)))),
        replace(job, teacher=Teacher(model=torch.nn.Identity(), sha256="other", forward_flops=1)),
        replace(job, initial=None),
        replace(job, initial=replace(job.initial, parents=job.initial.parents[::-1])),
    ]
    keys = {other.key for other in others}
    assert len(keys) == len(others) and job.key not in keys
    assert replace(job).key == job.key
    assert isinstance(job.initial, GrowJob) and job.initial.key != job.key


@pytest.mark.parametrize(
    ("alone", "half", "fused", "expected"),
    [
        (10.0, 9.0, 15.0, (2, 1)),  # two processes, models in turn
        (10.0, 5.0, 10.0, (1, 1)),  # one process with all cores
        (10.0, 5.5, 10.0, (1, 1)),
        (10.0, 9.0, 30.0, (1, 4)),  # all as one model
        (10.0, 5.0, 10.5, (1, 1)),  # fused, but hardly faster
    ],
)
def test_siblings_are_trained_in_the_fastest_way(
    alone: float,
    half: float,
    fused: float,
    expected: tuple[int, int],
    data: DataSet,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[tuple[int, int]] = []

    def speed(_task: Task, machine: Machine, models: int) -> float:
        measured.append((machine.threads, models))
        return {(2, 1): alone, (1, 1): half, (2, 4): fused, (1, 2): half}[machine.threads, models]

    monkeypatch.setattr(ways, "_speed", speed)
    task = trainings(tree_of(data))["2.0"].task
    for _ in range(2):  # the second time it is remembered
        first = measure_ways(task, QUICK, siblings=4, threads=2, folder=tmp_path)[0]
        assert (first.processes, first.fused) == expected
    assert sorted(measured) == [(1, 1), (1, 2), (2, 1), (2, 4)]


def test_the_measurement_is_real(data: DataSet, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    task = trainings(tree_of(data))["2.0"].task
    found = measure_ways(task, QUICK, siblings=2, threads=1, folder=tmp_path)
    assert {(way.processes, way.fused) for way in found} == {(1, 1), (1, 2)}
    assert all(way.images_per_second > 0 for way in found)
    assert torch.get_num_threads() == threads


def test_a_model_that_cannot_be_fused_is_trained_apart(
    data: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no batching rule")

    monkeypatch.setattr(ways.FusedStates, "update", fail)
    task = trainings(tree_of(data))["2.0"].task
    (only,) = measure_ways(task, QUICK, siblings=2, threads=1, folder=tmp_path)
    assert only.fused == 1


def test_a_job_s_speed_on_one_device_and_several(data: DataSet) -> None:
    job = trainings(tree_of(data))["1.0"]
    scaling = job.measure_scaling(QUICK)
    assert scaling.images_per_second[0] > 0 and scaling.max_images_per_device is None
    weights = rbdc.build(job.model).state_dict().values()
    assert scaling.gradient_bytes == (sum(w.numel() * w.element_size() for w in weights),)
    assert scaling.batch_size == job.task.recipe.batch_size


def test_as_many_images_as_there_is_memory_for(
    data: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def on_noise(_task: Task, batch_size: int, *_others: object) -> measure.Measurement:
        tried.append(batch_size)
        if batch_size > 5:
            raise torch.OutOfMemoryError("no room")
        return measure.Measurement(
            images_per_second=100.0, batch_size=batch_size, memory_bytes=None
        )

    monkeypatch.setattr(measure, "_on_noise", on_noise)
    task = trainings(tree_of(data))["2.0"].task
    size = task.recipe.batch_size
    found = measure.measure_training(task, QUICK)
    assert (found.images_per_second, found.batch_size) == (100.0, tried[-1])
    assert tried == [size // 2**n for n in range(len(tried))] and 2 < tried[-1] <= 5


def test_groups_share_a_stream_and_keep_every_process_busy(data: DataSet) -> None:
    jobs = trainings(tree_of(data))
    leaves = [jobs[f"2.{index}"] for index in range(4)]
    assert groups_of(leaves) == [leaves]
    assert groups_of(leaves, workers=2) == [leaves[:2], leaves[2:]]
    assert groups_of(leaves, workers=8) == [[leaf] for leaf in leaves]
    other = replace(leaves[0], task=replace(leaves[0].task, data_seed=7))
    assert groups_of([*leaves, other], workers=2) == [leaves, [other]]
    fused = [replace(leaf, fused_with=(1, 2, 3, 4)) for leaf in leaves]
    assert groups_of(fused, workers=2) == [fused]
    longer = [replace(leaf, task=replace(leaf.task, epochs=9.0)) for leaf in fused]
    assert groups_of([*fused, *longer]) == [fused, longer]  # models of one length are fused
    many = [replace(leaves[0], task=replace(leaves[0].task, seed=seed)) for seed in range(20)]
    assert [len(group) for group in groups_of(many)] == [8, 8, 4]  # all are in memory at once
