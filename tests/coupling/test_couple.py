"""What coupling promises, on real timm models of both families."""

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rbdc
from rbdc.coupling import structure_of
from rbdc.errors import CouplingError
from rbdc.models import build_meta
from tests.support import SMALL, SMALL_VIT, images, logits, parents, randomized

pytestmark = pytest.mark.numeric
double = pytest.mark.usefixtures("double_precision")
NAMES = list(SMALL)
VIT = "deit_tiny_patch16_224"


def wide_of(first: Any) -> Any:
    return rbdc.build(rbdc.spec_of(first).scaled(2))


@double
@pytest.mark.parametrize("name", NAMES)
def test_coupling_a_model_with_itself_changes_nothing(name: str) -> None:
    model, _ = parents(name)
    wide = rbdc.couple(model, copy.deepcopy(model), into=wide_of(model), allow_identical=True)
    x = images(model)
    torch.testing.assert_close(logits(wide, x), logits(model, x), rtol=0, atol=1e-10)


@double
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("resnet")])
def test_a_coupled_resnet_in_eval_mode_is_the_mean_of_its_parents(name: str) -> None:
    first, second = parents(name)
    wide = rbdc.couple(first, second, into=wide_of(first))
    x = images(first)
    mean = (logits(first, x) + logits(second, x)) / 2
    torch.testing.assert_close(logits(wide, x), mean, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [0.5, 0.25])
def test_the_proof_holds_for_every_family_at_every_width(name: str, width: float) -> None:
    first, second = parents(name, width)
    wide = rbdc.couple(first, second, into=wide_of(first))
    proof = rbdc.verify_coupling(first, second, wide, images(first))
    assert proof.holds and proof.error <= 1e-5
    assert (proof.drift == 0) == name.startswith("resnet")


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("deit_tiny_distilled_patch16_224", "blocks.1.attn.qkv.weight"),
        ("deit_tiny_distilled_patch16_224", "blocks.0.norm1.weight"),
        ("deit_tiny_distilled_patch16_224", "dist_token"),
        ("deit_tiny_distilled_patch16_224", "head_dist.bias"),
        ("deit_tiny_distilled_patch16_224", "pos_embed"),
        ("resnet50d", "conv1.0.weight"),
        ("resnet50d", "layer2.0.bn2.running_var"),
        ("resnet18", "fc.weight"),
    ],
)
def test_the_proof_fails_when_a_single_tensor_is_wrong(name: str, tensor: str) -> None:
    first, second = parents(name)
    wide = rbdc.couple(first, second, into=wide_of(first))
    with torch.no_grad():
        wide.state_dict()[tensor].flatten()[0] += 0.5
    assert not rbdc.verify_coupling(first, second, wide, images(first)).holds


@pytest.mark.parametrize(
    ("name", "change"), [(VIT, {}), ("resnet18d", {}), ("resnet18d", {"global_pool": ""})]
)
def test_models_without_a_head_are_side_by_side(name: str, change: dict[str, Any]) -> None:
    first, second = parents(name, **(SMALL[name] | {"num_classes": 0} | change))
    wide = rbdc.couple(first, second, into=wide_of(first))
    assert rbdc.verify_coupling(first, second, wide, images(first)).holds


@pytest.mark.parametrize(
    ("name", "change", "shared"),
    [
        *((name, {}, set()) for name in NAMES),
        (VIT, {"qk_norm": True, "depth": 1}, {"q_norm.weight", "k_norm.bias"}),
        ("seresnet18", SMALL["resnet18"], set()),
        ("ecaresnet26t", SMALL["resnet18"], {"layer1.0.se.conv.weight"}),
    ],
)
def test_what_cannot_be_exact_is_known_without_training(
    name: str, change: dict[str, Any], shared: set[str]
) -> None:
    first, second = parents(name, **(SMALL.get(name, {}) | change))
    if shared:
        assert "would not be exact, because of" in refused(first, second, wide_of(first))
    wide = rbdc.couple(first, second, into=wide_of(first), allow_inexact=True)
    found = structure_of(first, wide).inexact
    assert all(any(tensor.endswith(end) for tensor in found) for end in shared)
    assert rbdc.verify_coupling(first, second, wide, images(first)).holds == (not found)


def test_the_proof_leaves_the_models_as_they_were() -> None:
    first, second = parents("deit_tiny_patch16_224")
    wide = rbdc.couple(first, second, into=wide_of(first))
    wide.train().blocks.eval()
    before = copy.deepcopy(wide.state_dict())
    rbdc.verify_coupling(first, second, wide, images(first))
    assert wide.training and not wide.blocks.training
    assert all(torch.equal(before[key], value) for key, value in wide.state_dict().items())
    assert not any(module._forward_hooks for module in wide.modules())


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "resnet18d"])
def test_random_padding_keeps_the_diagonal_and_initialises_the_rest(name: str) -> None:
    first, second = parents(name)
    spec = rbdc.spec_of(first).scaled(2)
    zero = rbdc.couple(first, second, into=rbdc.build(spec)).state_dict()
    options: dict[str, Any] = {"off_diagonal": "random", "seed": 3}
    random = rbdc.couple(first, second, into=rbdc.build(spec), **options).state_dict()
    again = rbdc.couple(first, second, into=rbdc.build(spec), **options).state_dict()
    other = rbdc.couple(first, second, into=rbdc.build(spec), off_diagonal="random", seed=4)
    torch.manual_seed(3)
    key = "blocks.0.mlp.fc1.weight" if "deit" in name else "layer1.0.conv1.weight"
    off = zero[key] == 0
    assert torch.equal(random[key][~off], zero[key][~off])
    assert torch.equal(random[key], again[key])
    assert not torch.equal(random[key], other.state_dict()[key])
    ordinary = rbdc.build(spec).state_dict()[key].std()  # at wide fan-in
    assert random[key][off].count_nonzero() == off.sum()
    assert random[key][off].std() == pytest.approx(float(ordinary), rel=0.2)
    for name_, tensor in zero.items():  # only blocks off the diagonal differ
        assert torch.equal(random[name_][tensor != 0], tensor[tensor != 0])


def test_random_padding_leaves_the_global_generator_alone() -> None:
    first, second = parents("resnet18d")
    wide = wide_of(first)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    rbdc.couple(first, second, into=wide, off_diagonal="random")
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("dtypes", [("double", "double"), ("float", "double"), ("half", "float")])
def test_parents_of_another_dtype_are_coupled_in_that_of_the_wide_model(
    dtypes: tuple[str, str],
) -> None:
    models = parents("resnet18d")
    first, second = (getattr(model, dtype)() for model, dtype in zip(models, dtypes, strict=True))
    exact = [model.fc.bias.clone().float() for model in (first, second)]
    wide = rbdc.couple(first, second, into=wide_of(first))
    assert wide.fc.weight.dtype == torch.float32
    assert torch.equal(wide.fc.weight[:, 16:] * 2, second.fc.weight.float())
    assert torch.equal(wide.fc.bias, exact[0] / 2 + exact[1] / 2)
    assert rbdc.verify_coupling(first, second, wide, images(first)).holds


def test_dropout_rates_may_differ() -> None:
    first, _ = parents(VIT)
    second = randomized(rbdc.build(VIT, 0.5, **SMALL_VIT, drop_path_rate=0.2, drop_rate=0.1), 2)
    rbdc.couple(first, second, into=wide_of(first))


def test_models_on_the_meta_device_are_refused() -> None:
    first, second = parents(VIT)
    empty = build_meta(rbdc.spec_of(first))
    with pytest.raises(CouplingError, match="second parent is on the meta device"):
        rbdc.couple(first, empty, into=wide_of(first))
    with pytest.raises(CouplingError, match="no storage"):
        rbdc.couple(first, second, into=build_meta(rbdc.spec_of(first).scaled(2)))


def test_the_proof_looks_at_each_head_and_at_the_wide_models_own_settings() -> None:
    first, second = parents("deit_tiny_distilled_patch16_224")
    wide = rbdc.couple(first, second, into=wide_of(first))
    with torch.no_grad():  # errors that cancel in the mean of both heads
        wide.head.bias += 1
        wide.head_dist.bias -= 1
    assert not rbdc.verify_coupling(first, second, wide, images(first)).holds
    wide.head.bias.data -= 1
    wide.head_dist.bias.data[0] = float("nan")
    proof = rbdc.verify_coupling(first, second, wide, images(first))
    assert math.isnan(proof.error) and not proof.holds
    wide.norm.eps = 10.0
    with pytest.raises(CouplingError, match="eps of norm"):
        rbdc.verify_coupling(first, second, wide, images(first))


@settings(max_examples=15, deadline=None)
@given(
    heads=st.integers(1, 3),
    head_dim=st.sampled_from([2, 4, 6]),
    depth=st.integers(1, 3),
    classes=st.integers(1, 7),
    channels=st.sampled_from([1, 3]),
    distilled=st.booleans(),
)
def test_any_vit_couples_exactly(
    heads: int, head_dim: int, depth: int, classes: int, channels: int, distilled: bool
) -> None:
    name = f"deit_tiny{'_distilled' if distilled else ''}_patch16_224"
    arguments = SMALL_VIT | {
        "embed_dim": 2 * heads * head_dim,
        "num_heads": 2 * heads,
        "depth": depth,
        "num_classes": classes,
        "in_chans": channels,
    }
    assert_couples_exactly(*parents(name, **arguments))


def assert_couples_exactly(first: Any, second: Any) -> None:
    """In float64: a norm over two channels may make more of float32's rounding than is allowed."""
    wide = wide_of(first).double()
    rbdc.couple(first.double(), second.double(), into=wide)
    proof = rbdc.verify_coupling(first, second, wide, images(first))
    assert proof.holds and proof.error < 1e-10


@settings(max_examples=10, deadline=None)
@given(
    name=st.sampled_from(["resnet18", "resnet26d", "resnet34d", "resnet50"]),
    base=st.integers(1, 4),
    classes=st.integers(1, 7),
)
def test_any_resnet_couples_exactly(name: str, base: int, classes: int) -> None:
    arguments: dict[str, Any] = {"channels": [4 * base] * 4, "num_classes": classes, "img_size": 32}
    assert_couples_exactly(*parents(name, **arguments))


# What is refused, each with its own message


def refused(first: Any, second: Any, into: Any, **options: Any) -> str:
    before = copy.deepcopy(into.state_dict())
    with pytest.raises(CouplingError) as caught:
        rbdc.couple(first, second, into=into, **options)
    assert all(torch.equal(before[key], value) for key, value in into.state_dict().items())
    return caught.value.problem


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"depth": 3}, r"depth of blocks is 2 in the first parent and 3 in the second"),
        ({"patch_size": 4}, r"patch_size of patch_embed is (8, 8)"),
        ({"img_size": 24}, r"img_size of patch_embed is (16, 16)"),
        ({"num_classes": 6}, r"num_classes of the model is 5"),
        ({"num_heads": 8}, r"num_heads of blocks.0.attn is 2 in the first parent and 4"),
        ({"mlp_ratio": 2}, r"blocks.0.mlp.fc1.weight is (64, 16) in the first parent and (32, 16)"),
        ({"in_chans": 1}, r"in_chans of the model is 3"),
        ({"pool_include_prefix": True}, r"pool_include_prefix of the model is False"),
        ({"act_layer": "relu"}, r"type of blocks.0.mlp.act is GELU"),
        ({"act_layer": "gelu_tanh"}, r"type of blocks.0.mlp.act is GELU"),
    ],
)
def test_parents_that_differ_are_named(change: dict[str, Any], expected: str) -> None:
    first, _ = parents(VIT)
    second = randomized(rbdc.build(VIT, 0.5, **(SMALL_VIT | change)), 2)
    assert expected in refused(first, second, wide_of(first))


def test_a_wide_model_that_is_not_twice_as_wide_is_refused() -> None:
    first, second = parents(VIT)
    assert "is as wide as its parents" in refused(first, second, parents(VIT)[0])
    fewer_heads = rbdc.build(VIT, **(SMALL_VIT | {"num_heads": 2}))
    assert "because of bmm in blocks.0.attn: it mixes" in refused(first, second, fewer_heads)
    more_channels = rbdc.build(VIT, **(SMALL_VIT | {"in_chans": 6}))
    assert "in_chans of the model is 3" in refused(first, second, more_channels)
    half_the_mlp = rbdc.build(VIT, **(SMALL_VIT | {"mlp_ratio": 2}))
    assert "because of blocks.0.mlp.fc1.weight" in refused(first, second, half_the_mlp)
    too_wide = rbdc.build(VIT, **(SMALL_VIT | {"embed_dim": 48, "num_heads": 4, "num_classes": 5}))
    assert "is 8 in the parents and 12" in refused(first, second, too_wide)
    first, second = parents("resnet18d")
    problem = refused(first, second, rbdc.build("resnet18d", 2.0, **SMALL["resnet18d"]))
    assert "conv1.0.weight is (2, 3, 3, 3) in the narrow model and (8, 3, 3, 3)" in problem


def test_a_model_is_not_coupled_with_itself_unless_forced() -> None:
    first, _ = parents(VIT)
    assert "same model" in refused(first, first, wide_of(first))
    assert "same model" in refused(first, copy.deepcopy(first), wide_of(first))
    rbdc.couple(first, first, into=wide_of(first), allow_identical=True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_parent_that_diverged_is_refused(bad: float) -> None:
    first, second = parents(VIT)
    with torch.no_grad():
        second.state_dict()["blocks.1.mlp.fc2.bias"][3] = bad
    problem = refused(first, second, wide_of(first))
    assert "blocks.1.mlp.fc2.bias of the second parent has 1 values of 16" in problem


def test_class_lists_are_compared() -> None:
    first, second = parents(VIT)
    first.pretrained_cfg["label_names"] = ["a", "b", "c", "d", "e"]
    second.pretrained_cfg["label_names"] = ["a", "c", "b", "d", "e"]
    problem = refused(first, second, wide_of(first))
    assert "different order: class 1 is 'b' in the first and 'c' in the second" in problem
    second.pretrained_cfg["label_names"] = ["a", "b", "x", "d", "e"]
    assert "different classes: class 2 is 'c'" in refused(first, second, wide_of(first))
    second.pretrained_cfg["label_names"] = ["a", "b", "c", "d", "e"]
    wide = rbdc.couple(first, second, into=wide_of(first))
    assert wide.pretrained_cfg["label_names"] == ["a", "b", "c", "d", "e"]


def test_an_unknown_padding_is_refused() -> None:
    first, second = parents(VIT)
    assert "off_diagonal is 'zeros'" in refused(first, second, wide_of(first), off_diagonal="zeros")
