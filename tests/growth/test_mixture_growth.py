"""MixtureGrowth: members on the diagonal, mixtures of the right templates beside it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

import rbdc
from rbdc.coupling import layout_of
from rbdc.data import DataSet
from rbdc.errors import PlanError
from rbdc.growth import Setting, Trial, parse_protocol
from rbdc.growth.mixture_growth import (
    Mixture,
    MixtureGrowth,
    Templates,
    mixtures_of,
    new_blocks,
)
from rbdc.jobs.job import Context, execute
from rbdc.jobs.layout import MODEL, SAVED_FOR_GROWTH
from rbdc.jobs.method import Parent
from rbdc.jobs.store import Store
from rbdc.jobs.train import TrainJob
from rbdc.models import export, fold_parametrizations, load, spec_of
from rbdc.training import World, fit_to_data
from rbdc.training.checkpoint import read_state
from tests.support import QUICK, SMALL, TINY, images, logits, randomized, small_data, small_recipe

double = pytest.mark.usefixtures("double_precision")
RESNET, DEIT = "resnet18d", "deit_tiny_patch16_224"
MODELS = [RESNET, "resnet50d", DEIT, "deit_tiny_distilled_patch16_224"]


def member(name: str, count: int, seed: int) -> Parent:
    """A model of templates that has moved from where it started."""
    torch.manual_seed(seed)
    model = Templates(count=count).apply(randomized(rbdc.build(name, 0.5, **SMALL[name]), seed))
    for part in model.parameters():
        part.data += 0.1 * torch.randn_like(part)
    return Parent(model=fold_parametrizations(model), saved_for_growth=(model.state_dict(), {}))


def members(name: str, count: int = 2) -> list[Parent]:
    return [member(name, count, seed) for seed in (1, 2)]


def grow(parents: list[Parent], **options: Any) -> Any:
    wide = spec_of(parents[0].model).scaled(2)
    return MixtureGrowth(**options).grow(parents, wide, None).model  # type: ignore[arg-type]


def sets_of(parents: list[Parent]) -> Iterator[tuple[str, Mixture, Mixture]]:
    saved = [parent.saved_for_growth for parent in parents]
    first, second = (mixtures_of(state[0]) for state in saved if state)
    for name, mixed in first.items():
        yield name, mixed, second[name]


def blocks(tensor: Tensor, parts: int) -> list[list[Tensor]]:
    """The quarters of a wide matrix; of a packed one, of each matrix, packed again."""
    rows = [part.chunk(2, 0) for part in tensor.chunk(parts, 0)]
    halves = [torch.cat([row[i] for row in rows]) for i in (0, 1)]
    return [list(half.chunk(2, 1)) for half in halves]


@double
@pytest.mark.numeric
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_four_blocks(name: str, count: int) -> None:
    parents = members(name, count)
    state = grow(parents).state_dict()
    seen = 0
    for weight, zeroth, first in sets_of(parents):
        (m0, m2), (m3, m1) = blocks(state[weight], 3 if "qkv" in weight else 1)
        assert torch.equal(m0, parents[0].model.state_dict()[weight])
        assert torch.equal(m1, parents[1].model.state_dict()[weight])
        assert torch.equal(m2, zeroth.weight(zeroth.rows[1]))
        new = coefficients(m3, first)
        assert float(new.norm()) == pytest.approx(1, abs=1e-10)
        torch.testing.assert_close(first.weight(new), m3, rtol=0, atol=1e-10)
        seen += 1
    assert seen > 4


def coefficients(weight: Tensor, mixed: Mixture) -> Tensor:
    """By which the templates mix to this weight."""
    columns = torch.stack([template.flatten() for template in mixed.templates], dim=1)
    found: Tensor = torch.linalg.lstsq(columns, weight.flatten()[:, None]).solution[:, 0]
    return found


@double
@pytest.mark.numeric
@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_the_last_block_is_orthogonal_to_the_others_or_farthest_from_them(count: int) -> None:
    for _name, zeroth, first in sets_of(members(RESNET, count)):
        others = torch.stack([zeroth.coefficients, first.coefficients, zeroth.rows[1]])
        others = others / others.norm(dim=1, keepdim=True)
        new = coefficients(new_blocks(zeroth, first)[1], first)
        found = (others @ new).square().sum()
        if count >= 4:
            assert float(found) < 1e-12
        tried = torch.randn(500, count, generator=torch.Generator().manual_seed(0))
        tried /= tried.norm(dim=1, keepdim=True)
        assert (found <= (tried @ others.T).square().sum(dim=1) + 1e-10).all()


@pytest.mark.parametrize("name", MODELS)
def test_everything_else_is_coupled(name: str, tmp_path: Path) -> None:
    parents = members(name)
    first, second = (parent.model for parent in parents)
    model = grow(parents)
    state, coupled = model.state_dict(), rbdc.couple(first, second, into=rbdc.build(spec_of(model)))
    layout, mixed = layout_of(first, model), {name for name, _, _ in sets_of(parents)}
    for key, tensor in coupled.state_dict().items():
        assert torch.equal(state[key], tensor) == (key not in mixed)
        assert (key in mixed) == (len(layout[key].scaled) == 2)
    export(model, tmp_path / "model")
    loaded = timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True)
    assert torch.equal(logits(loaded, images(model)), logits(model, images(model)))


@double
@pytest.mark.numeric
@pytest.mark.parametrize("name", MODELS)
def test_the_sum_of_logits(name: str) -> None:
    parents = members(name)
    mean, sum_ = grow(parents), grow(parents, head="sum")
    x = images(mean)
    torch.testing.assert_close(logits(sum_, x), 2 * logits(mean, x), rtol=0, atol=1e-10)


@pytest.fixture(scope="module")
def data() -> DataSet:
    return small_data()


def setting(data: DataSet, name: str = RESNET, **settings: Any) -> Setting:
    recipe = small_recipe(**settings)
    spec = fit_to_data(rbdc.ModelSpec(name=name, arguments=TINY[name]), data, recipe)
    return Setting(model=spec, recipe=recipe, data=data, baseline_epochs=12.0)


def trainings(trial: Trial) -> list[TrainJob]:
    return [node.job for node in trial.nodes if isinstance(node.job, TrainJob)]


@pytest.mark.parametrize("name", [RESNET, DEIT])
@pytest.mark.parametrize("text", ["mixture-growth", "mixture-growth:ratio"])
@pytest.mark.parametrize("budget", [0.616, 1.0])
def test_it_spends_its_budget(text: str, name: str, budget: float, data: DataSet) -> None:
    given = setting(data, name)
    trial = parse_protocol(text).trial(given, budget, 0)
    baseline = given.training("target", 0, given.baseline_epochs)
    step = [replace_epochs(job, 0).flops for job in trainings(trial)]
    spent = trial.target.job.total_flops
    assert spent == pytest.approx(budget * baseline.total_flops, abs=sum(step))
    assert len(step) == 3


def replace_epochs(job: TrainJob, epochs: float) -> TrainJob:
    """Of no epochs at all, a training still has one step."""
    return replace(job, task=replace(job.task, epochs=epochs))


def test_the_published_schedule(data: DataSet) -> None:
    given = setting(data, lr=0.5, warmup_lr=0.1, min_lr=0.05)
    first, second, wide = (job.task for job in trainings(MixtureGrowth().trial(given, 0.616, 0)))
    assert first.epochs / wide.epochs == pytest.approx(90 / 14)
    assert second.epochs / first.epochs == pytest.approx(74 / 90)
    assert first.schedule_epochs is None and second.schedule_epochs == first.epochs
    assert first.seed != second.seed and first.recipe == second.recipe == given.recipe
    assert first.parametrization == second.parametrization == Templates(count=2)
    assert wide.parametrization is None
    assert wide.warmup_epochs == 0 and wide.recipe.learning_rate == pytest.approx(0.02)
    assert max(wide.recipe.min_lr, wide.recipe.warmup_lr) < wide.recipe.learning_rate


def test_by_the_ratio_of_the_setting(data: DataSet) -> None:
    given = replace(setting(data), ratio=0.5)
    protocol = parse_protocol("mixture-growth:ratio")
    first, second, wide = (job.task for job in trainings(protocol.trial(given, 0.616, 0)))
    assert first.epochs == second.epochs == pytest.approx(2 * wide.epochs)
    assert second.schedule_epochs is None and wide.recipe == given.recipe
    assert wide.warmup_epochs == given.recipe.warmup_epochs
    with pytest.raises(PlanError, match="mixture-growth got 'paper', expected ratio"):
        parse_protocol("mixture-growth:paper")


@pytest.mark.parametrize("name", [RESNET, DEIT])
@pytest.mark.parametrize("text", ["mixture-growth", "mixture-growth:ratio"])
def test_end_to_end(text: str, name: str, data: DataSet, tmp_path: Path) -> None:
    given = replace(setting(data, name, model_ema=True), baseline_epochs=2.0)
    trial = parse_protocol(text).trial(given, 0.616, 0)
    job_context = Context(store=Store(tmp_path), machine=QUICK, world=World())
    results = [
        execute(node.job, job_context, observe=lambda _progress: None, stopped=lambda: False)
        for node in trial.nodes
    ]
    assert [result["kind"] for result in results] == ["train", "train", "grow", "train"]
    spent = sum(result["training_flops"] for result in results)
    assert spent == trial.target.job.total_flops
    parents = []
    for job in trainings(trial)[:2]:
        folder = job_context.store.folder(job)
        parents.append(
            Parent(
                model=load(folder / MODEL), saved_for_growth=read_state(folder / SAVED_FOR_GROWTH)
            )
        )
        for mixed in mixtures_of(parents[-1].saved_for_growth[0]).values():  # type: ignore[index]
            assert not torch.equal(mixed.coefficients, mixed.rows[0])  # they have learnt
    for weight, zeroth, first in sets_of(parents):
        for mixed, parent in ((zeroth, parents[0]), (first, parents[1])):
            assert torch.equal(mixed.weight(), parent.model.state_dict()[weight])
        assert not torch.equal(zeroth.templates[0], first.templates[0])
    for node in (trial.nodes[0], trial.target):
        place = job_context.store.folder(node.job) / MODEL
        timm.create_model(f"local-dir:{place}", pretrained=True)
