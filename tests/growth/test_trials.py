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


def setting(name: str, arguments: dict[str, Any] | None = None) -> Setting:
    data, recipe = small_data(), small_recipe()
    spec = ModelSpec(name=name, arguments=arguments or TINY[name])
    model = fit_to_data(spec, data, recipe)
    return Setting(model=model, recipe=recipe, data=data, baseline_epochs=2.0)


def run(
    protocol: str, name: str, output: Path, arguments: dict[str, Any] | None = None
) -> tuple[Store, list[Any]]:
    """The store, and the results of the trial's jobs; its FLOPs are checked beside."""
    parsed, of_all = parse_protocol(protocol), setting(name, arguments)
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


DEEP = {
    "resnet18d": TINY["resnet18d"] | {"layers": [2, 2, 1, 1]},
    "deit_tiny_patch16_224": TINY["deit_tiny_patch16_224"] | {"patch_size": 7, "depth": 4},
}
"""Models with blocks that can be copied, and patches for smaller images."""


@names
@pytest.mark.parametrize(
    "protocol, trained",
    [
        ("rbdc:1:width+depth", 3),
        ("rbdc:1:width+depth+resolution", 3),
        ("progressive:1", 2),
        ("resolution:1", 2),
    ],
)
def test_stages_grow_in_depth_and_resolution(
    protocol: str, trained: int, name: str, tmp_path: Path
) -> None:
    _, results = run(protocol, name, tmp_path, DEEP[name])
    assert sum(isinstance(job, TrainJob) for job, _ in results) == trained
    (grown,) = (result for job, result in results if isinstance(job, GrowJob))
    if "resolution" not in protocol.split(":")[0]:
        assert grown["proof_error"] <= 1e-5
    sizes = [(job.task.image.height, job.model) for job, _ in results if isinstance(job, TrainJob)]
    assert sizes[-1][0] == 28 and (sizes[0][0] < 28) == ("resolution" in protocol or trained == 2)


def test_progressive_growth_has_the_shares_of_the_tree() -> None:
    of_all = setting("resnet18d", DEEP["resnet18d"])
    tree, alone = (
        parse_protocol(text).trial(of_all, BUDGET, 0).plan
        for text in ("rbdc:1:width+depth+resolution", "progressive:1:depth+resolution")
    )
    assert tree and alone
    assert [s.share for s in alone.stages] == pytest.approx([s.share for s in tree.stages])
    assert [s.models for s in alone.stages] == [1, 1]


def test_stacked_blocks_carry_their_moments(tmp_path: Path) -> None:
    name = "deit_tiny_patch16_224"
    store, results = run("stack:1", name, tmp_path, DEEP[name])
    (job,) = (job for job, _ in results if isinstance(job, GrowJob))
    tensors, _ = read_state(store.folder(job) / START)
    for kind in ("model/{}", "optimizer/{}/exp_avg"):
        first, third = (tensors[kind.format(f"blocks.{i}.mlp.fc1.weight")] for i in (0, 2))
        assert torch.equal(first, third)


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
