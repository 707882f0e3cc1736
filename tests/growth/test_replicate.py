"""Net2Net and HyperCloning: the same function, and copies that go their own ways."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rbdc
from rbdc.errors import CouplingError, ModelError
from rbdc.growth.hypercloning import HyperCloning
from rbdc.growth.net2net import Net2Net
from rbdc.growth.replicate import Replication
from rbdc.growth.units import units_of
from rbdc.jobs.method import Parent
from rbdc.models import ModelSpec, halves_layout
from tests.growth.context import CONTEXT, SEED, grown, wide_spec
from tests.models.small_language import EXACT, INEXACT
from tests.structure.test_architectures import EXACT as ARCHITECTURES
from tests.support import SMALL, images, logits, parents, randomized

pytestmark = [pytest.mark.numeric, pytest.mark.usefixtures("double_precision")]
METHODS = [Net2Net, HyperCloning]
methods = pytest.mark.parametrize("method", METHODS)
DISTILLED = "deit_tiny_distilled_patch16_224"


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-10) -> None:
    assert theirs.std() > 0.1, "logits that say something"
    assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


@methods
@pytest.mark.parametrize("name", list(SMALL))
def test_without_noise_it_is_its_parent(method: type[Replication], name: str) -> None:
    model, parent = grown(method(noise=0.0), name)
    x = images(parent)
    assert_close(logits(model, x), logits(parent, x))


@methods
def test_both_heads_of_a_distilled_model_are_its_parent_s(method: type[Replication]) -> None:
    model, parent = grown(method(noise=0.0), DISTILLED)
    ours, theirs = (both_heads(one, images(parent)) for one in (model, parent))
    for mine, parents_ in zip(ours, theirs, strict=True):
        assert_close(mine, parents_)


@torch.no_grad()
def both_heads(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    model.train().set_distilled_training(True)
    first, second = model(x)
    return first, second


@methods
def test_what_proves_it_is_recorded(method: type[Replication]) -> None:
    parent = parents(DISTILLED)[0]
    record = method().grow([Parent(model=parent)], wide_spec(DISTILLED), CONTEXT).record
    assert record["proof_error"] < 1e-10 and record["norm_drift"] < 1e-10


@pytest.mark.parametrize("name", [DISTILLED, "resnet50d", "resnet18"])
def test_hypercloning_s_noise_cancels(name: str) -> None:
    model, parent = grown(HyperCloning(noise=0.1), name)
    x = images(parent)
    assert_close(logits(model, x), logits(parent, x))
    plain = grown(HyperCloning(noise=0.0), name)[0].state_dict()
    moved = [
        key for key, tensor in model.state_dict().items() if not torch.equal(tensor, plain[key])
    ]
    layers = [key for key, tensor in plain.items() if is_layer_weight(key, tensor)]
    assert set(layers) - set(moved) == {layers[0]}  # only the image's own channels are not doubled


@pytest.mark.parametrize("name", [DISTILLED, "resnet50d"])
def test_net2net_s_noise_is_on_the_new_units_incoming_weights_alone(name: str) -> None:
    before, after = (grown(Net2Net(noise=noise), name)[0].state_dict() for noise in (0.0, 0.1))
    for key, tensor in before.items():
        moved = after[key] - tensor
        if not (is_layer_weight(key, tensor) and "head" not in key and key != "fc.weight"):
            assert not moved.any(), key
            continue
        # q, k and v have old and new heads each
        parts = moved.reshape(3 if ".qkv." in key else 1, 2, -1)
        assert not parts[:, 0].any(), key
        assert parts[:, 1].ne(0).double().mean() > 0.99, key  # a draw may be lost in rounding
        if parts[:, 1].numel() > 500:
            assert parts[:, 1].std().item() == pytest.approx(0.1 * tensor.std().item(), rel=0.15)


def is_layer_weight(key: str, tensor: Tensor) -> bool:
    return key.endswith(".weight") and tensor.ndim in (2, 4)


@methods
def test_noise_is_the_seed_s(method: type[Replication]) -> None:
    first, again = (grown(method(), "resnet18d")[0].state_dict() for _ in range(2))
    assert all(torch.equal(tensor, again[key]) for key, tensor in first.items())


@pytest.mark.parametrize(
    ("name", "layer"), [(DISTILLED, "blocks.0.mlp.fc1"), ("resnet50d", "layer2.0.conv1")]
)
def test_noise_breaks_the_symmetry_of_the_copies(name: str, layer: str) -> None:
    """Without it two copies have the same weights and gradients, and would for ever."""
    for noise in (0.0, 1e-2):
        model, parent = grown(HyperCloning(noise=noise), name)
        weight, gradient = with_gradient(model, layer, images(parent))
        for tensor in (weight, gradient):
            old, new = tensor.chunk(2)
            distance = (old - new).norm() / old.norm()
            assert (distance > 1e-3) if noise else (distance < 1e-10)


def with_gradient(model: nn.Module, layer: str, x: Tensor) -> tuple[Tensor, Tensor]:
    weight = model.get_submodule(layer).weight
    assert isinstance(weight, Tensor)
    model.eval()(x).square().sum().backward()
    assert weight.grad is not None
    return weight.detach(), weight.grad


def test_net2net_copies_random_units_and_keeps_the_old() -> None:
    units = units_of(wide_spec("resnet50d").scaled(0.5))
    maps = Net2Net().maps(units, SEED)
    assert maps.keys() == units.groups.keys()
    for name, group in units.groups.items():
        assert maps[name].shape == (2 * group.units,) and maps[name].max() < group.units
        assert torch.equal(maps[name][: group.units], torch.arange(group.units))
    new = {name: chosen.chunk(2)[1].tolist() for name, chosen in maps.items()}
    assert any(len(set(chosen)) < len(chosen) for chosen in new.values()), "with replacement"
    alike = [name for name, group in units.groups.items() if group.units == 8]
    assert len({tuple(new[name]) for name in alike}) == len(alike) > 1, "a map for each group"
    other = Net2Net().maps(units, SEED + 1)
    assert any(not torch.equal(chosen, other[name]) for name, chosen in maps.items())


def test_net2net_has_every_unit_of_a_transformer_twice() -> None:
    units = units_of(ModelSpec(name="deit_tiny_patch16_224"))
    maps = Net2Net().maps(units, SEED)
    for name, group in units.groups.items():
        assert maps[name].bincount().tolist() == [2] * group.units
        assert torch.equal(maps[name][: group.units], torch.arange(group.units))
    (stream,) = units.mixed
    assert not torch.equal(*maps[stream].chunk(2))


def test_hypercloning_is_four_halves_of_the_parent() -> None:
    model, parent = grown(HyperCloning(noise=0.0), "resnet18d")
    half = parent.state_dict()["layer2.0.conv2.weight"] / 2
    row = torch.cat([half, half], dim=1)
    assert torch.equal(model.state_dict()["layer2.0.conv2.weight"], torch.cat([row, row]))


@pytest.mark.parametrize(
    "name",
    [
        "convnext_atto",  # depthwise convolutions, layer norms
        "mobilenetv3_small_100",  # depthwise convolutions, gates
        "resnet50_gn",  # a unit is the channels of a norm's group
        "swin_tiny_patch4_window7_224",  # biases by head; one head in the narrow model
    ],
)
def test_net2net_s_units_are_found_in_other_architectures(name: str) -> None:
    wide = ModelSpec(name=name, arguments=ARCHITECTURES[name])
    Net2Net().check_model(wide)
    parent = randomized(rbdc.build(wide.scaled(0.5)), 1)
    grown = Net2Net(noise=0.0).grow([Parent(model=parent)], wide, CONTEXT)
    assert grown.record["proof_error"] < 1e-10
    maps = Net2Net().maps(units_of(wide.scaled(0.5)), SEED)
    assert any(not torch.equal(*chosen.chunk(2)) for chosen in maps.values())


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        (
            "densenet121",
            r"features\.denseblock1\.denselayer1\.conv2\.weight",
        ),  # groups side by side
        ("resnext50_32x4d", r"layer1\.0\.conv1\.weight"),  # channels must stay in their group
    ],
)
def test_a_model_whose_units_cannot_be_copied_is_refused_before_training(
    name: str, tensor: str
) -> None:
    spec = ModelSpec(name=name, arguments=ARCHITECTURES[name])
    with pytest.raises(ModelError, match=tensor):
        Net2Net().check_model(spec)
    HyperCloning().check_model(spec)  # each unit twice, in order: groups need not be known


@methods
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "phi3", "gemma2"])
def test_a_language_model_is_its_parent(method: type[Replication], name: str, tied: bool) -> None:
    pytest.importorskip("transformers")
    spec = ModelSpec(name=name, arguments={**EXACT[name], "tie_word_embeddings": tied})
    parent = randomized(rbdc.build(spec.scaled(0.5)), 1)
    tokens = torch.arange(12)[None]
    expected = parent.eval()(tokens, use_cache=False).logits
    noisy = method is HyperCloning  # whose noise cancels
    model = method(noise=0.1 if noisy else 0.0).grow([Parent(model=parent)], spec, CONTEXT).model
    ours = model.eval()(tokens, use_cache=False).logits
    assert_close(ours, expected, 1e-6)  # transformers' norms and positions are fp32 always
    plain = method(noise=0.0).grow([Parent(model=parent)], spec, CONTEXT).model.state_dict()
    moved = method().grow([Parent(model=parent)], spec, CONTEXT).model.state_dict()
    layout = halves_layout(spec)
    for key, tensor in plain.items():  # every layer gets noise, and nothing else
        inside = layout[key].input_axis is not None and len(layout[key].scaled) > 1
        head = layout[key].is_head and method is HyperCloning
        assert torch.equal(tensor, moved[key]) != (inside or head), key


@methods
def test_a_model_whose_halves_mix_is_refused(method: type[Replication]) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(CouplingError, match="q_norm"):
        method().check_model(ModelSpec(name="qwen3", arguments=INEXACT["qwen3"][0]))
