"""Protocols end to end: from a setting, a budget and a seed to a judged model."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rbdc.growth import Setting, parse_protocol
from rbdc.jobs.engine import InProcess
from rbdc.jobs.grow import GrowJob
from rbdc.jobs.job import Context
from rbdc.jobs.layout import JOBS, MODEL, START
from rbdc.jobs.store import Store
from rbdc.jobs.train import TrainJob
from rbdc.models import ModelSpec, load
from rbdc.plan import forward_flops, training_flops
from rbdc.training import World, fit_to_data
from rbdc.training.checkpoint import read_state
from tests.support import QUICK, TINY, small_data, small_recipe

BUDGET = 0.8
NAMES = list(TINY)
names = pytest.mark.parametrize("name", NAMES)


def setting(name: str) -> Setting:
    data, recipe = small_data(), small_recipe()
    model = fit_to_data(ModelSpec(name=name, arguments=TINY[name]), data, recipe)
    return Setting(model=model, recipe=recipe, data=data, baseline_epochs=2.0)


def run(protocol: str, name: str, output: Path) -> tuple[Store, list[Any]]:
    """The store, and the results of the trial's jobs; its FLOPs are checked beside."""
    parsed, of_all = parse_protocol(protocol), setting(name)
    parsed.check(of_all)
    trial = parsed.trial(of_all, BUDGET, 0)
    store = Store(output / JOBS)
    images = len(of_all.data.train)
    budget = BUDGET * training_flops(of_all.forward_flops(), 2, images)
    a_step_each = sum(
        training_flops(forward_flops(node.job.model, counter=of_all.counter), 1, 8)
        for node in trial.nodes
        if isinstance(node.job, TrainJob)
    )
    spent = trial.target.job.total_flops
    assert abs(spent - budget) <= a_step_each < budget / 2
    context = Context(store=store, machine=QUICK, world=World())
    InProcess(threads=dict.fromkeys((node.job.key for node in trial.nodes), 1)).run(
        [node.job for node in trial.nodes], context, lambda _event: None
    )
    results = [store.result(node.job) for node in trial.nodes]
    assert sum(result["training_flops"] for result in results if result) == pytest.approx(spent)
    return store, [(node.job, result) for node, result in zip(trial.nodes, results, strict=True)]


@names
@pytest.mark.parametrize("protocol", ["net2net", "hypercloning", "random:0.5"])
def test_a_parent_is_trained_widened_and_trained_on(
    protocol: str, name: str, tmp_path: Path
) -> None:
    store, [(parent, narrow), (grow, start), (target, wide)] = run(protocol, name, tmp_path / "run")
    assert isinstance(parent, TrainJob) and isinstance(grow, GrowJob)
    assert target.initial == grow and parent.model == target.model.scaled(0.5)
    assert 0 <= wide["metrics"]["top1"] <= 1
    if protocol.startswith("random"):
        return
    assert start["proof_error"] < 1e-5 and start["norm_drift"] < 1e-5
    assert start["metrics"]["loss"] == pytest.approx(narrow["metrics"]["loss"], rel=0.01), (
        "before any step, but noise"
    )
    tensors, _facts = read_state(store.folder(grow) / START)
    trained = load(store.folder(target) / MODEL).state_dict()
    assert {f"model/{key}" for key in trained} == tensors.keys()


@names
def test_two_models_are_trained_and_judged_together(name: str, tmp_path: Path) -> None:
    store, [*members, (target, both)] = run("ensemble", name, tmp_path / "run")
    assert isinstance(target, GrowJob) and target.parents == tuple(job for job, _result in members)
    assert members[0][1]["training_flops"] == members[1][1]["training_flops"]
    losses = [result["metrics"]["loss"] for _job, result in members]
    # cross-entropy is convex in the logits
    assert both["metrics"]["loss"] <= sum(losses) / 2 + 1e-6 and losses[0] != losses[1]
    tensors, _facts = read_state(store.folder(target) / START)
    for number, (job, _result) in enumerate(members):
        for key, tensor in load(store.folder(job) / MODEL).state_dict().items():
            assert torch.equal(tensors[f"model/models.{number}.{key}"], tensor)
