"""Growth in depth and resolution: the same function, with blocks that start as the identity."""

from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
from torch import nn

from rbdc.coupling import example_for
from rbdc.errors import ModelError
from rbdc.models import ModelSpec, build, depths, extend, image_side, sized, spec_of
from rbdc.models.extend import NewBlocks, block_places, make_identity
from rbdc.models.language import is_language
from rbdc.plan import Growth
from rbdc.structure import call
from tests.models.small_language import EXACT
from tests.support import SMALL, images, logits, randomized

DEPTHS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "deit_tiny_patch16_224": ({"depth": 2}, {"depth": 5}),
    "deit3_large_patch16_224": ({"depth": 1}, {"depth": 2}),
    "resnet18d": ({"layers": [1, 2, 1, 1]}, {"layers": [2, 3, 1, 2]}),
    "resnet50d": ({"layers": [1, 1, 1, 1]}, {"layers": [2, 1, 1, 2]}),
}


def specs(name: str) -> tuple[ModelSpec, ModelSpec]:
    shallow, deep = (ModelSpec(name=name, arguments=SMALL[name] | more) for more in DEPTHS[name])
    return shallow, deep


@pytest.mark.parametrize("name", DEPTHS)
def test_a_deeper_model_computes_the_same_and_all_of_it_can_learn(name: str) -> None:
    shallow, deep = specs(name)
    model = randomized(build(shallow), 1)
    grown = extend(model, deep, seed=3)
    x = images(model)
    assert torch.equal(logits(model, x), logits(grown.model, x))
    assert grown.error is not None and grown.error <= 1e-6
    state, before = grown.model.state_dict(), model.state_dict()
    assert {*grown.origin.values()} == {*before}
    assert all(torch.equal(state[new], before[old]) for new, old in grown.origin.items())
    assert {*state} - {*grown.origin}  # the new blocks' own
    grown.model.train()(x).square().sum().backward()
    new = [n for n, _ in grown.model.named_parameters() if n not in grown.origin]
    weights = dict(grown.model.named_parameters())
    zeros = [n for n in new if not weights[n].any() and "bias" not in n]
    assert zeros and all(weights[n].grad is not None and weights[n].grad.any() for n in zeros)  # type: ignore[union-attr]


REPEATING: dict[str, dict[str, Any]] = {
    "convnext_atto": {"depths": [2, 2, 3, 1], "dims": [8, 16, 16, 32], "img_size": 64},
    "swin_tiny_patch4_window7_224": {
        "img_size": 64, "window_size": 4, "embed_dim": 16, "depths": [2, 2, 4, 2],
        "num_heads": [2, 2, 4, 4],
    },
    "gpt2": {**EXACT["gpt2"], "n_layer": 3, "sequence_length": 32},
    "llama": {**EXACT["llama"], "num_hidden_layers": 3, "sequence_length": 32},
    "gemma2": {**EXACT["gemma2"], "num_hidden_layers": 4, "sequence_length": 32,
               "sliding_window": 8},
}  # fmt: skip
"""Architectures whose blocks are found, with every second block of another kind in two of them."""


@pytest.mark.parametrize("name", REPEATING)
def test_blocks_are_inserted_into_any_model_whose_blocks_repeat(name: str) -> None:
    """Its stages halve in depth and in resolution, and the deeper model computes the same."""
    if is_language(name):
        pytest.importorskip("transformers")
    target = ModelSpec(name=name, arguments=REPEATING[name])
    growth = Growth(axes=("depth", "resolution"))
    _, small = growth.levels(target, 1)
    assert image_side(small) < image_side(target) and depths(small) != depths(target)
    model = randomized(build(small), 1)
    deeper = extend(model, sized(target, image_side(small)), seed=0)
    assert deeper.error is not None and deeper.error <= 1e-6
    assert {*deeper.origin.values()} == {*model.state_dict()}
    grown = extend(model, target, seed=0)
    assert spec_of(grown.model) == target and image_side(spec_of(grown.model)) == image_side(target)
    assert call(grown.model, example_for(grown.model))[0].isfinite().all()


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
@pytest.mark.parametrize("blocks", ["identity", "copy"])
def test_language_models_get_deeper(name: str, blocks: NewBlocks) -> None:
    pytest.importorskip("transformers")
    layers = "n_layer" if name == "gpt2" else "num_hidden_layers"
    shallow, deep = (
        ModelSpec(name=name, arguments={**EXACT[name], layers: count, "tie_word_embeddings": True})
        for count in (2, 4)
    )
    model: Any = randomized(build(shallow), 1)
    grown: Any = extend(model, deep, seed=3, blocks=blocks)
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        found, expected = (m.eval()(tokens, use_cache=False).logits for m in (grown.model, model))
    assert torch.equal(found, expected) == (blocks == "identity")
    assert grown.error == (0 if blocks == "identity" else None)
    state, before = grown.model.state_dict(), model.state_dict()
    assert all(torch.equal(state[new], before[old]) for new, old in grown.origin.items())
    assert ({*state} == {*grown.origin}) == (blocks == "copy")


def test_a_model_whose_constructor_takes_no_depth_has_none() -> None:
    assert depths(ModelSpec(name="regnety_002")) == {}
    assert depths(ModelSpec(name="torchvision:resnet18")) == {}


def test_new_weights_follow_from_the_seed() -> None:
    shallow, deep = specs("resnet18d")
    model = build(shallow)
    states = [extend(model, deep, seed=seed).model.state_dict() for seed in (1, 1, 2)]
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    assert any(not torch.equal(tensor, states[2][name]) for name, tensor in states[0].items())


@pytest.mark.parametrize(
    "name, shallow, deep, zero",
    [
        ("convnext_atto", {"depths": (1, 1, 2, 1)}, {"depths": (1, 2, 4, 1)}, {"gamma"}),
        ("seresnet50", {"layers": (1, 1, 1, 1)}, {"layers": (2, 1, 1, 1)}, {"bn3"}),
        ("swin_tiny_patch4_window7_224", {"depths": (2, 2, 2, 2)}, {"depths": (2, 2, 4, 2)},
         {"proj", "fc2"}),
    ],
)  # fmt: skip
def test_the_last_layers_of_residual_branches_are_found(
    name: str, shallow: dict[str, Any], deep: dict[str, Any], zero: set[str]
) -> None:
    """Architectures that nothing here knows by name."""
    before, after = (randomized(timm.create_model(name, **a), 1) for a in (shallow, deep))
    new = [path for path, old in block_places(before, after).items() if old is None]
    with torch.no_grad():
        make_identity(after, new)
    zeros = [n for n, w in after.named_parameters() if not w.any()]
    layers = {n.removesuffix(".weight").removesuffix(".bias") for n in zeros}
    assert {layer.rpartition(".")[2] for layer in layers} == zero
    assert all(any(n.startswith(path) for path in new) for n in zeros)


def test_a_block_without_a_residual_connection_is_refused() -> None:
    model: Any = build("resnet18d", **SMALL["resnet18d"])
    model.layer1[1] = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
    with (
        pytest.raises(ModelError, match=r"layer1\.1 cannot start as"),
        torch.no_grad(),
    ):
        make_identity(model, ["layer1.1"])


def test_stacked_blocks_are_copies_in_order() -> None:
    shallow, deep = (
        ModelSpec(name="deit_tiny_patch16_224", arguments=SMALL["deit_tiny_patch16_224"] | depth)
        for depth in ({"depth": 2}, {"depth": 4})
    )
    model = randomized(build(shallow), 1)
    grown = extend(model, deep, seed=0, blocks="copy")
    assert grown.error is None
    blocks = [grown.origin[f"blocks.{index}.mlp.fc1.weight"] for index in range(4)]
    assert blocks == [f"blocks.{index}.mlp.fc1.weight" for index in (0, 1, 0, 1)]
    shallow, deep = specs("resnet18d")
    with pytest.raises(ModelError, match=r"no trained block has the shape of layer4\.1"):
        extend(build(shallow), deep, seed=0, blocks="copy")


def test_position_embeddings_are_resampled() -> None:
    arguments = SMALL["deit_tiny_patch16_224"]
    spec = ModelSpec(name="deit_tiny_patch16_224", arguments=arguments)
    model: Any = randomized(build(spec), 1)
    with torch.no_grad():  # a ramp from left to right stays one
        ramp = torch.tensor([0.0, 1.0]).repeat(2).view(1, 4, 1)
        model.pos_embed[:, 1:] = ramp.expand(1, 4, 32)
    grown = extend(model, replace(spec, arguments=arguments | {"img_size": 32}), seed=0)
    found: Any = grown.model
    assert found.pos_embed.shape == (1, 17, 32) and "pos_embed" not in grown.origin
    rows = found.pos_embed[0, 1:].view(4, 4, 32)
    assert torch.allclose(rows, rows[:1].expand_as(rows), atol=1e-5)
    assert (rows[0].diff(dim=0) > 0).all()
    assert torch.equal(found.pos_embed[:, 0], model.pos_embed[:, 0])  # the class token's
    assert torch.equal(found.head.weight, model.head.weight)
    assert found.pretrained_cfg["input_size"] == (3, 32, 32)


def test_a_resnet_takes_another_size_as_it_is() -> None:
    arguments = SMALL["resnet18d"]
    spec = ModelSpec(name="resnet18d", arguments=arguments)
    model = randomized(build(spec), 1)
    grown = extend(model, replace(spec, arguments=arguments | {"img_size": 40}), seed=0)
    assert {*grown.origin} == {*model.state_dict()}
    assert torch.equal(logits(model, images(grown.model)), logits(grown.model, images(grown.model)))
