"""GradMax: new units that change nothing, and get the largest gradients there are."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.flop_counter import FlopCounterMode

import rbdc
from rbdc.data import Batch
from rbdc.errors import ModelError
from rbdc.growth import Setting, parse_protocol
from rbdc.growth.gradmax import GradMax, directions, matrices_of
from rbdc.growth.units import Inner, Units, units_of
from rbdc.jobs.grow import GrowJob
from rbdc.jobs.job import Context, execute
from rbdc.jobs.method import GrowthContext, Parent
from rbdc.jobs.store import Store
from rbdc.models import ModelSpec
from rbdc.plan import forward_flops, training_flops
from rbdc.training import World, fit_to_data
from tests.support import (
    QUICK,
    SMALL,
    TINY,
    images,
    logits,
    randomized,
    small_data,
    small_recipe,
)

DEITS = ["deit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"]
RESNETS = ["resnet18", "resnet18d", "resnet50d"]  # pairs of every kernel and stride
numeric = pytest.mark.numeric
double = pytest.mark.usefixtures("double_precision")
of_all = pytest.mark.parametrize("name", SMALL)
of_some = pytest.mark.parametrize("name", [*DEITS, *RESNETS])


def spec(name: str, **others: Any) -> ModelSpec:
    return ModelSpec(name=name, arguments={**SMALL[name], **others})


def context(model: nn.Module, batches: int = 2, size: int = 8) -> GrowthContext:
    """Batches of noise, with labels."""
    x = images(model, batches * size).split(size)
    labels = torch.arange(size) % 5
    seen = [Batch(images=part, targets=labels, indices=labels) for part in x]
    return GrowthContext(
        seed=3,
        device=torch.device("cpu"),
        batches=lambda: iter(seen),
        loss=lambda net, batch: cross_entropy(net(batch.images) / 10, batch.targets),
    )


def grown(wide: ModelSpec, parent: nn.Module | None = None, **options: Any) -> tuple[Any, Any]:
    """The wide model, and its parent: one with telling weights and norm statistics."""
    parent = parent or randomized(rbdc.build(wide.scaled(0.5)), 1)
    method = GradMax(**options)
    method.check_model(wide)
    before = {key: tensor.clone() for key, tensor in parent.state_dict().items()}
    result = method.grow([Parent(model=parent)], wide, context(parent))
    assert all(torch.equal(tensor, before[key]) for key, tensor in parent.state_dict().items())
    assert result.record["proof_error"] < 1e-5
    return result.model, parent


def new_in(tensor: Tensor, pair: Inner) -> Tensor:
    """The incoming weights of a pair's new units, of the first layer's; of heads, the values'."""
    parts = 3 if pair.first.endswith("qkv") else 1
    rows: Tensor = tensor.unflatten(0, (parts, 2, -1))[-1, 1]
    return rows


def new_out(tensor: Tensor) -> Tensor:
    """The outgoing weights of new units, of the second layer's: a row for each unit. A view."""
    columns: Tensor = tensor.transpose(0, 1).unflatten(0, (2, -1))[1]
    return columns


def gradients(model: nn.Module, at: GrowthContext, units: Units) -> dict[str, Tensor]:
    """Of the new units' incoming weights, by autograd, norms frozen; a row for each unit."""
    model.eval().zero_grad()
    for batch in at.batches():
        at.loss(model, batch).backward()
    result = {}
    for pair in units.inner:
        gradient: Any = model.get_submodule(pair.first).weight.grad
        result[pair.group] = new_in(gradient, pair)
    return result


def assert_same_function(wide: nn.Module, narrow: nn.Module) -> None:
    x = images(narrow, 4)
    expected = logits(narrow, x)
    # not exact in float64 either: SPARK, the bias of new norms, is seen
    assert (logits(wide, x) - expected).abs().max() < 1e-6 * expected.abs().max()


@double
@numeric
@of_all
@pytest.mark.parametrize("norm_weight", [1.0, 0.1])
def test_the_wide_model_computes_what_its_parent_did(name: str, norm_weight: float) -> None:
    assert_same_function(*grown(spec(name), norm_weight=norm_weight))


@double
@numeric
@pytest.mark.parametrize("name", [*DEITS, "deit3_large_patch16_224"])
@pytest.mark.parametrize("size", [1e-3, 1.0])
def test_so_it_does_whatever_the_mean_and_size_of_a_stream(name: str, size: float) -> None:
    parent: Any = randomized(rbdc.build(spec(name).scaled(0.5)), 1)
    units = units_of(spec(name).scaled(0.5))
    with torch.no_grad():
        for key, tensor in parent.state_dict().items():
            inside = (
                not units.mixed.isdisjoint(units.axes[key]) and units.layout[key].input_axis is None
            )
            if inside and "norm" not in key and "ls" not in key:
                tensor.add_(5.0)  # biases, tokens, positions
        for layer in (parent.patch_embed.proj, parent.pos_embed, parent.cls_token):
            for tensor in layer.parameters() if isinstance(layer, nn.Module) else [layer]:
                tensor.mul_(size)  # a layer norm's eps is seen where streams are small
    assert_same_function(*grown(spec(name), parent))


@double
@numeric
@of_all
def test_new_units_have_zero_incoming_weights_and_scaled_outgoing_ones(name: str) -> None:
    model, _parent = grown(spec(name), scale=0.25)
    units = units_of(spec(name).scaled(0.5))
    for pair in units.inner:
        first, second = (model.get_submodule(path) for path in (pair.first, pair.second))
        for tensor in first.parameters():
            assert not new_in(tensor, pair).any(), pair
        old, new = second.weight.transpose(0, 1).flatten(1).norm(dim=1).chunk(2)
        assert torch.allclose(new, 0.25 * old.mean().expand_as(new), rtol=1e-10), pair
    for key, tensor in model.state_dict().items():
        axis = units.layout[key].input_axis
        if axis is not None and units.axes[key][axis]:
            fresh = tensor.chunk(2, axis)[1].transpose(0, axis).flatten(1)
            assert fresh.any(dim=1).all(), f"{key} does not read a new unit"


@double
@numeric
@of_some
def test_gradients_are_what_the_matrices_say(name: str) -> None:
    model, parent = grown(spec(name), norm_weight=0.1)  # the identity at any weight
    units, at = units_of(spec(name).scaled(0.5)), context(parent)
    found, expecting = gradients(model, at, units), matrices_of(parent.eval(), units.inner, at)
    for pair in units.inner:
        # GELU's slope at 0; and a stream of layer norms is sqrt 2 as large as the parent's
        slope = {"qkv": 2**-0.5, "fc1": 2**-0.5 / 2}.get(pair.first.rpartition(".")[2], 1.0)
        matrices = expecting[pair.group]
        weights = new_out(model.get_submodule(pair.second).weight)
        old = weights[:, : weights.shape[1] // 2].flatten(1).unflatten(0, (len(matrices), -1))
        expected = slope * (old @ matrices.mT).flatten(0, 1)
        gradient = found[pair.group]
        inputs = gradient.shape[1] // (2 if units.axes[f"{pair.first}.weight"][1] else 1)
        assert expected.norm() > 0
        error = (gradient[:, :inputs].flatten(1) - expected).norm() / expected.norm()
        assert error < 1e-6, f"{pair}: {error}"


@pytest.mark.parametrize(
    ("name", "others"),
    [("deit_tiny_patch16_224", {"mlp_ratio": 0.5}), *((name, {}) for name in RESNETS)],
)
def test_no_random_outgoing_weights_give_larger_gradients(
    name: str, others: dict[str, Any]
) -> None:
    """A narrow MLP: with more units than outputs, any full turn of directions is as good."""
    model, parent = grown(spec(name, **others))
    units, at = units_of(spec(name, **others).scaled(0.5)), context(parent)
    best = gradients(model, at, units)
    best_norms = {group: float(gradient.norm()) for group, gradient in best.items()}
    torch.manual_seed(0)
    for _ in range(3):
        with torch.no_grad():
            for pair in units.inner:
                new = new_out(model.get_submodule(pair.second).weight)
                old_half = new[:, : new.shape[1] // 2]  # the other half is zero
                norms = old_half.flatten(1).norm(dim=1, keepdim=True)
                drawn = normalize(torch.randn(old_half.flatten(1).shape)) * norms
                old_half.copy_(drawn.view(old_half.shape))
        for group, gradient in gradients(model, at, units).items():
            assert float(gradient.norm()) < 0.9 * best_norms[group], group


@double
@numeric
def test_directions_turn_by_turn() -> None:
    draw = torch.Generator().manual_seed(0)
    matrix = torch.randn(4, 12, generator=draw)
    chosen = directions(matrix, 10, draw)
    assert torch.allclose(chosen.norm(dim=1), torch.ones(10), rtol=1e-10)
    strengths = torch.linalg.svdvals(matrix)
    assert torch.allclose((chosen[:4] @ matrix.T).norm(dim=1), strengths, rtol=1e-10)
    assert torch.allclose((chosen[4:8] @ matrix.T).norm(), strengths.norm(), rtol=1e-10)
    alike = (chosen @ chosen.T).fill_diagonal_(0).abs()
    assert alike.max() < 0.99, "two units are equal and would stay so"
    nothing = directions(torch.zeros(4, 12), 10, draw)
    assert torch.allclose(nothing @ nothing.T, torch.eye(10), atol=1e-10)


@of_some
def test_all_new_units_move_at_the_first_step(name: str) -> None:
    """In training as it will be, batch norms with the batch's statistics."""
    model, parent = grown(spec(name))
    units, batch = units_of(spec(name).scaled(0.5)), next(context(parent).batches())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    context(parent).loss(model.train(), batch).backward()
    optimizer.step()
    for pair in units.inner:
        rows = new_in(model.get_submodule(pair.first).weight, pair).flatten(1)
        assert rows.any(dim=1).all(), pair
    for key, tensor in model.state_dict().items():
        written = units.written(key)
        if written and written not in {pair.group for pair in units.inner}:
            assert tensor.chunk(2)[1].flatten(1).any(dim=1).all(), f"{key}: a stream is dead"


@double
@numeric
def test_batches_are_summed_and_the_seed_decides() -> None:
    parent = randomized(rbdc.build(spec("resnet18d").scaled(0.5)), 1).eval()
    units = units_of(spec("resnet18d").scaled(0.5))
    at = context(parent)
    both = matrices_of(parent, units.inner, at)
    parts = [
        matrices_of(parent, units.inner, replace(at, batches=partial(iter, [batch])))
        for batch in at.batches()
    ]
    for group, matrix in both.items():
        assert torch.allclose(matrix, parts[0][group] + parts[1][group], rtol=1e-10)
    one, other = (grown(spec("resnet18d"))[0].state_dict() for _ in range(2))
    assert all(torch.equal(tensor, other[key]) for key, tensor in one.items())


@pytest.mark.parametrize(
    ("name", "others", "part"),
    [
        ("resnetaa50d", {}, r"layer2\.0\.aa is AvgPool2d"),
        ("resnet50d", {"norm_layer": "groupnorm", "stem_width": 64}, r"conv1\.1.*GroupNorm"),
        ("vit_base_patch16_clip_224", {}, "norm_pre is LayerNorm"),
        ("seresnet50", {}, r"layer1\.0, a Bottleneck"),
        ("convnext_atto", {}, "has blocks, a ConvNeXt, and GradMax takes plain"),
        ("resnext26ts", {}, "GradMax takes plain"),
    ],
)
def test_what_it_would_change_is_refused(name: str, others: dict[str, Any], part: str) -> None:
    wide = ModelSpec(name=name, arguments=others)
    with pytest.raises(ModelError, match=part):
        GradMax().check_model(wide)


@pytest.mark.parametrize(
    ("name", "others"),
    [("resnet18d", {}), ("resnet50d", {}), ("deit_tiny_patch16_224", {"num_heads": 4, "depth": 2})],
)
def test_looking_at_an_image_costs_no_more_than_is_paid(name: str, others: dict[str, Any]) -> None:
    """At the widths that models have: small ones are mostly stem."""
    wide = ModelSpec(name=name, arguments={"num_classes": 5, "img_size": 32, **others})
    parent = rbdc.build(wide.scaled(0.5)).eval()
    with FlopCounterMode(display=False) as counter:
        matrices_of(parent, units_of(wide.scaled(0.5)).inner, context(parent, 1, 2))
    paid = GradMax.cost * training_flops(forward_flops(wide), 1, 2)
    assert 0.1 * paid < counter.get_total_flops() <= paid


@pytest.mark.parametrize("name", TINY)
def test_as_a_protocol_it_spends_the_budget(name: str, tmp_path: Path) -> None:
    data, recipe, budget = small_data(), small_recipe(), 0.8
    model = fit_to_data(ModelSpec(name=name, arguments=TINY[name]), data, recipe)
    setting = Setting(model=model, recipe=recipe, data=data, baseline_epochs=2.0)
    protocol = parse_protocol("gradmax:1.5")
    protocol.check(setting)
    trial = protocol.trial(setting, budget, 0)
    job_context = Context(store=Store(tmp_path), machine=QUICK, world=World())
    results = [
        execute(node.job, job_context, observe=lambda _p: None, stopped=lambda: False)
        for node in trial.nodes
    ]
    narrow, start, _wide = results
    step = training_flops(setting.forward_flops(), 1, 8)
    spent = trial.target.job.total_flops
    expected = budget * training_flops(setting.forward_flops(), 2, len(data.train))
    assert spent == pytest.approx(sum(result["training_flops"] for result in results))
    assert abs(spent - expected) <= 3 * step
    assert isinstance(trial.nodes[1].job, GrowJob) and trial.nodes[1].job.images == 8
    assert start["training_flops"] == step and start["proof_error"] < 1e-5
    losses = [result["metrics"]["loss"] for result in (start, narrow)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4), "before any step"
