"""Firefly: candidates that change nothing, learn, are chosen by their scores, and are folded in."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

import rbdc
from rbdc.data import Batch
from rbdc.errors import ModelError, PlanError
from rbdc.growth import Setting, parse_protocol
from rbdc.growth.firefly import Enlarged, Firefly, best, norms_of, search
from rbdc.growth.units import Units, units_of
from rbdc.jobs.grow import GrowJob
from rbdc.jobs.job import Context, execute
from rbdc.jobs.method import GrowthContext, Parent
from rbdc.jobs.store import Store
from rbdc.jobs.train import TrainJob
from rbdc.models import ModelSpec, build_meta
from rbdc.plan import forward_flops, training_flops
from rbdc.training import World, fit_to_data
from tests.growth.context import CONTEXT, SEED, wide_spec
from tests.support import QUICK, SMALL, TINY, images, logits, parents, small_data, small_recipe

RESNET, BOTTLENECK, DEIT = "resnet18d", "resnet50d", "deit_tiny_patch16_224"
TELLING = [RESNET, BOTTLENECK, DEIT]
CPU = torch.device("cpu")
double = pytest.mark.usefixtures("double_precision")
of_all = pytest.mark.parametrize("name", SMALL)
of_some = pytest.mark.parametrize("name", TELLING)


def enlarged(name: str, parent: Any = None, **options: Any) -> Enlarged:
    return Enlarged(Firefly(**options), parent or parents(name)[0], wide_spec(name), CONTEXT)


def context(name: str, count: int = 6, dtype: torch.dtype = torch.float32) -> GrowthContext:
    """Batches of noise, with labels that can be learnt by heart."""
    draws = torch.Generator().manual_seed(9)
    model: Any = build_meta(wide_spec(name))
    size = model.pretrained_cfg["input_size"]
    batches = [
        Batch(
            images=torch.randn(8, *size, generator=draws).to(dtype),
            targets=torch.randint(5, (8,), generator=draws),
            indices=torch.arange(8),
        )
        for _ in range(count)
    ]
    return GrowthContext(
        seed=SEED,
        device=CPU,
        batches=lambda: iter(batches),
        loss=lambda model, batch: cross_entropy(model(batch.images) / 10, batch.targets),
    )


def mean_loss(model: Enlarged, at: GrowthContext) -> float:
    with torch.no_grad():
        return float(torch.stack([at.loss(model, batch) for batch in at.batches()]).mean())


def some(model: Enlarged, seed: int = 5) -> dict[str, Tensor]:
    """Candidates chosen at random, as many as are wanted."""
    draws = torch.Generator().manual_seed(seed)
    return {
        name: best(torch.randn(len(each.gates), generator=draws), each.splits)
        for name, each in model.candidates.items()
    }


def assert_same_function(first: Any, second: Any, x: Tensor, tolerance: float = 1e-10) -> None:
    a, b = logits(first, x), logits(second, x)
    assert (a - b).abs().max() <= tolerance * max(1.0, float(b.abs().max()))


@double
@pytest.mark.numeric
@of_all
def test_candidates_of_no_size_change_nothing(name: str) -> None:
    parent = parents(name)[0]
    x = images(parent)
    assert_same_function(enlarged(name, parent, radius=0.0, noise=0.0), parent, x)
    assert_same_function(enlarged(name, parent), parent, x, 0.05)  # and small ones, little
    moved = logits(enlarged(name, parent), x) - logits(parent, x)
    assert moved.abs().max() > 1e-5, "they are there"


@double
@pytest.mark.numeric
@of_some
def test_copies_of_a_stream_differ_a_little(name: str) -> None:
    model = enlarged(name, noise=0.03)
    state = model.enlarged()
    between = {inner.group for inner in model.units.inner}
    writers = [key for key in model.apart if taken(model.units, key[:-7]) not in between]
    assert writers and len(model.apart) > 2
    for key in writers:  # and read an image, or a stream, of which every unit is there twice
        first, second = state[key].chunk(2)
        if taken(model.units, key[:-7]):
            first, second = (torch.add(*half.chunk(2, 1)) for half in (first, second))
        parent = model.parent[key]
        torch.testing.assert_close((first + second) / 2, parent)
        apart = (first - parent).flatten(1).norm(dim=1) / parent.flatten(1).norm(dim=1)
        torch.testing.assert_close(apart, torch.full_like(apart, 0.03))


@double
@pytest.mark.numeric
@of_all
@pytest.mark.parametrize("surplus", [1.0, 1.5, 2.0])
def test_what_is_not_chosen_is_removed_exactly(name: str, surplus: float) -> None:
    model = enlarged(name, surplus=surplus, radius=0.5, noise=0.1)
    state = model.restricted(some(model))
    wide = rbdc.build(wide_spec(name))
    wide.load_state_dict(state)  # exactly the wanted width
    x = images(wide)
    assert_same_function(wide, model, x)  # its gates are what was chosen
    for each in model.candidates.values():
        each.gates.data.fill_(1.0)
    assert (logits(wide, x) - logits(model, x)).abs().max() > (1e-3 if surplus > 1 else -1)


@pytest.mark.numeric
@of_some
def test_the_search_lowers_the_loss_within_its_radius_and_moves_nothing_else(name: str) -> None:
    model, at = enlarged(name), context(name)
    before, loss = model.enlarged(), mean_loss(model, at)
    frozen = {key: tensor.clone() for key, tensor in constants(model)}
    starts = {id(ball): ball.vectors.detach().clone() for ball in model.balls}
    search(model, at, 0.3)
    assert mean_loss(model, at) < loss - 1e-3
    shares = torch.cat([norms_of(ball.vectors, ball.unit) / ball.radii for ball in model.balls])
    assert float(shares.detach().max()) == pytest.approx(1, abs=1e-5), (
        "and some would have gone farther"
    )
    for each in model.candidates.values():
        assert bool((each.gates == 1).all())
        for ball in (each.fresh_in, each.fresh_out):
            assert not torch.equal(ball.vectors, starts[id(ball)])
    splits = [each.split for each in model.candidates.values()]
    learnt = [not torch.equal(ball.vectors, starts[id(ball)]) for ball in splits]
    assert sum(learnt) > len(learnt) / 2  # behind a ReLU, not those that no image tells apart
    assert all(torch.equal(tensor, frozen[key]) for key, tensor in constants(model))
    candidates_alone = {f"{i.first}.weight" for i in model.units.inner} | {
        f"{i.second}.weight" for i in model.units.inner
    }
    for key, tensor in model.enlarged().items():
        assert torch.equal(tensor, before[key]) == (key not in candidates_alone), key


def constants(model: Enlarged) -> list[tuple[str, Tensor]]:
    return [*model.parent.items(), *((f"apart {key}", t) for key, t in model.apart.items())]


@of_some
def test_the_second_half_of_the_search_says_what_a_gate_does_to_the_loss(name: str) -> None:
    """At a rate of 0 nothing learns, and slopes can be taken by differences."""
    model = enlarged(name, parents(name)[0].double(), radius=0.5)
    at = context(name, 4, torch.float64)
    scores, _losses = search(model, at, 0.0)
    told = 0
    late = replace(at, batches=lambda: iter([*at.batches()][2:]))
    for group in [inner.group for inner in model.units.inner][:4]:
        gates = model.candidates[group].gates.detach()
        for number in (0, len(gates) - 1):  # a split, a new unit
            losses = []
            for gate in (1 + 1e-6, 1 - 1e-6, 1.0):  # near enough for ReLUs to stay as they are
                gates[number] = gate
                losses.append(mean_loss(model, late))
            slope = (losses[0] - losses[1]) / 2e-6
            assert float(scores[group][number]) == pytest.approx(-slope, rel=1e-4, abs=1e-8)
            told += abs(slope) > 1e-5
    assert told > 4, "not much is left out of eight"


def test_the_best_are_kept() -> None:
    scores = torch.tensor([0.3, -5.0, 0.1, 0.2])
    assert best(scores, 2).tolist() == [True, False, False, True]
    scores[1] = 1.0
    assert best(scores, 2).tolist() == [True, True, False, False]
    assert best(torch.zeros(4), 2).tolist() == [True, True, False, False], "ties are settled"


@of_some
@pytest.mark.parametrize("kind", ["split", "new"])
@pytest.mark.parametrize("score", [1e9, -1e9])
def test_scores_decide(name: str, kind: str, score: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise a candidate's score, and it is in the wide model; lower it, and it is not."""
    found: list[Enlarged] = []

    def biased(model: Enlarged, *others: Any) -> Any:
        found.append(model)
        scores, losses = search(model, *others)
        scores[inner.group][0 if kind == "split" else -1] = score
        return scores, losses

    units = units_of(wide_spec(name).scaled(0.5))
    between = {inner.group for inner in units.inner}
    readers = [i for i in units.inner if taken(units, i.first) not in between]  # of a stream
    inner, weight = readers[-1], f"{readers[-1].first}.weight"
    monkeypatch.setattr("rbdc.growth.firefly.search", biased)
    wide = Firefly().grow([Parent(model=parents(name)[0])], wide_spec(name), context(name)).model
    candidates = found[0].candidates[inner.group]
    candidates.gates.data.fill_(1.0)
    candidate = found[0].enlarged()[weight][candidates.splits if kind == "split" else -1]
    kept = any(torch.equal(row, candidate) for row in wide.state_dict()[weight])
    assert kept == (score > 0)


def taken(units: Units, layer: str) -> str:
    return units.axes[f"{layer}.weight"][1] or ""


@of_all
def test_the_wide_model_has_learnt_and_can_be_made_again(name: str) -> None:
    parent = parents(name)[0]
    before = {key: tensor.clone() for key, tensor in parent.state_dict().items()}
    at, wide = context(name), wide_spec(name)
    grown, again, other = (
        Firefly().grow([Parent(model=parent)], wide, replace(at, seed=seed)) for seed in (1, 1, 2)
    )
    for key, tensor in parent.state_dict().items():
        assert torch.equal(tensor, before[key]), f"{key} of the parent was changed"
    assert rbdc.spec_of(grown.model) == wide
    state = grown.model.state_dict()
    shapes = {key: tensor.shape for key, tensor in build_meta(wide).state_dict().items()}
    assert {key: tensor.shape for key, tensor in state.items()} == shapes
    assert all(torch.equal(state[k], tensor) for k, tensor in again.model.state_dict().items())
    assert any(not torch.equal(state[k], t) for k, t in other.model.state_dict().items())
    assert grown.record == again.record and 0 <= grown.record["kept_splits"] <= 1
    losses = [
        torch.stack([at.loss(model.eval(), batch) for batch in at.batches()]).mean()
        for model in (parent, grown.model)
    ]
    assert losses[1] < losses[0], "and it begins better than its parent ended"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("resnet18d norm_layer=groupnorm1", r"conv1\.1, a GroupNorm1, and Firefly takes plain"),
        ("resnetblur18", "filters for a fixed number of channels"),
        ("seresnet50", r"layer1\.0, a Bottleneck, and Firefly takes plain"),
    ],
)
def test_what_it_cannot_widen_is_said_before_training(name: str, reason: str) -> None:
    name, *options = name.split()
    wide = ModelSpec(name=name, arguments=dict(option.split("=") for option in options))
    with pytest.raises(ModelError, match=reason):
        Firefly().check_model(wide)
    with pytest.raises(PlanError, match="surplus"):
        Firefly(surplus=0.5)


@pytest.mark.parametrize("name", ["resnet50d", "deit_small_patch16_224"])
def test_it_pays_for_what_it_looks_at(name: str) -> None:
    wide = ModelSpec(name=name, arguments={})
    model: Any = build_meta(wide).eval()
    image = torch.empty(1, 3, *model.pretrained_cfg["input_size"][1:], device="meta")
    at = replace(CONTEXT, device=torch.device("meta"))
    candidates = Enlarged(Firefly(), build_meta(wide.scaled(0.5)), wide, at)
    counts = []
    for network in (candidates, model):
        with FlopCounterMode(display=False) as flops:
            network(image)
        counts.append(flops.get_total_flops())
    assert counts[0] / counts[1] <= Firefly().cost <= 1.3 * counts[0] / counts[1]


def setting(name: str, baseline_epochs: float) -> Setting:
    data, recipe = small_data(), small_recipe()
    model = fit_to_data(ModelSpec(name=name, arguments=TINY[name]), data, recipe)
    return Setting(model=model, recipe=recipe, data=data, baseline_epochs=baseline_epochs)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("epochs", [60.0, 100.0, 237.0])
def test_the_budget_is_spent_to_a_step(name: str, epochs: float) -> None:
    """One of each training, and one of the search."""
    at, protocol = setting(name, epochs), parse_protocol("firefly")
    protocol.check(at)
    trial = protocol.trial(at, 0.7, 0)
    parent, grow, target = (node.job for node in trial.nodes)
    assert isinstance(grow, GrowJob)
    assert isinstance(parent, TrainJob) and isinstance(target, TrainJob)
    steps = [
        training_flops(forward_flops(job.model, counter=at.counter), 1, at.recipe.batch_size)
        for job in (parent, target)
    ]
    budget = 0.7 * training_flops(at.forward_flops(), epochs, len(at.data.train))
    spent = target.total_flops
    assert abs(spent - budget) <= sum(steps) + grow.method.cost * steps[1]
    seen = grow.images / (target.task.epochs * len(at.data.train))
    assert seen == pytest.approx(0.01, abs=0.5 * 8 / (target.task.epochs * 40) + 1e-9)


@pytest.mark.parametrize("name", TINY)
def test_from_a_parent_to_a_judged_model(name: str, tmp_path: Path) -> None:
    at = setting(name, 2.0)
    trial = parse_protocol("firefly").trial(at, 0.8, 0)
    job_context = Context(store=Store(tmp_path), machine=QUICK, world=World())
    results = [
        execute(node.job, job_context, observe=lambda _progress: None, stopped=lambda: False)
        for node in trial.nodes
    ]
    grow = trial.nodes[1].job
    assert isinstance(grow, GrowJob) and results[1]["images"] == grow.images == 8
    losses = [result["metrics"]["loss"] for result in results]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    spent = trial.target.job.total_flops
    assert sum(result["training_flops"] for result in results) == pytest.approx(spent)
    assert 0 <= results[2]["metrics"]["top1"] <= 1
