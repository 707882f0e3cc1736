"""How any module couples: found by running it, checked by changing one parent at a time."""

import copy
import json
from typing import Any, cast

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rbdc
from rbdc.coupling import structure_of
from rbdc.errors import CouplingError
from rbdc.structure import Structure
from tests.support import randomized

pytestmark = pytest.mark.numeric
TOKENS = 6


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads = width // 2

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, 2)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.proj(mixed.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.packed, self.out = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Any:
        value, gate = self.packed(x).chunk(2, dim=-1)
        return self.out(value * gate.sigmoid())


class Dense(nn.Module):
    """Concatenated inputs, as of DenseNet: packed along the input axis."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width // 2), nn.Linear(width + width // 2, width)

    def forward(self, x: Tensor) -> Any:
        return self.second(torch.cat([self.first(x), x], dim=-1).relu())


class Convolutions(nn.Module):
    """Along the tokens: depthwise; in groups that double in number; in groups that get wider."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.deep = nn.Conv1d(width, width, 3, padding=1, groups=width)
        self.more = nn.Conv1d(width, 2 * width, 1, groups=width // 2)
        self.wider = nn.Conv1d(2 * width, width, 1, groups=2)

    def forward(self, x: Tensor) -> Any:
        return self.wider(self.more(self.deep(x.mT)).relu()).mT


class Shuffled(nn.Module):
    """Two halves of the channels, interleaved and processed apart."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.even, self.odd = nn.Linear(width // 2, width // 2), nn.Linear(width // 2, width // 2)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Any:
        even, odd = (x * self.scale).unflatten(-1, (2, -1)).unbind(-2)
        pairs = torch.stack([self.even(even), self.odd(odd)], dim=-1)
        return pairs.flatten(-2).roll(1, dims=1)


class Normed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Any:
        return self.norm(x)


class Written(nn.Module):
    """Changes a slice in place, and adds a token and positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, TOKENS, width))

    def forward(self, x: Tensor) -> Any:
        x = torch.cat([self.token.expand(len(x), -1, -1), x[:, 1:]], dim=1) + self.positions
        x[:, :2] *= 2
        return x


class Groups(nn.Module):
    """Groups of eight channels, in a layer and a norm: one in the narrow model, two in the wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Conv1d(width, width, 1, groups=width // 8)
        self.norm, self.batch = nn.GroupNorm(width // 8, width), nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Any:
        return self.batch(self.norm(self.layer(x.mT))).mT


BLOCKS: tuple[Any, ...] = (
    Attention, Gated, Dense, Convolutions, Shuffled, Written, Groups, Normed,
)  # fmt: skip
APART = BLOCKS.index(Normed)
"""The number of those before that leave the branches apart."""
CROSSED = [
    [BLOCKS.index(kind) for kind in pair] for pair in ((Convolutions, Groups), (Groups, Shuffled))
]
"""Blocks that need the channels in different orders: a group, or half, of one has both branches."""


class Chain(nn.Module):
    def __init__(self, blocks: list[int], width: int, classes: int = 0) -> None:
        super().__init__()
        self.stem = nn.Linear(5, width)
        self.blocks = nn.Sequential(*(BLOCKS[kind](width) for kind in blocks))
        self.head = nn.Linear(width, classes) if classes else nn.Identity()

    def forward(self, x: Tensor) -> Any:
        return self.head(self.blocks(self.stem(x)))


def example() -> Tensor:
    return torch.randn(2, TOKENS, 5, generator=torch.Generator().manual_seed(0))


def made(blocks: list[int], width: int, seed: int, classes: int = 0) -> nn.Module:
    return randomized(Chain(blocks, width, classes), seed).double()


@settings(max_examples=40, deadline=None)
@given(
    blocks=st.lists(st.integers(0, len(BLOCKS) - 1), max_size=4),
    width=st.sampled_from([8, 16]),
    classes=st.sampled_from([0, 3]),
)
def test_any_chain_of_blocks_is_the_mean_of_its_parents(
    blocks: list[int], width: int, classes: int
) -> None:
    assume(not any({*blocks} >= {*pair} for pair in CROSSED))
    first, second = (made(blocks, width, seed, classes) for seed in (1, 2))
    into = made(blocks, 2 * width, 3, classes)
    wide = rbdc.couple(first, second, into=into, example=example())
    proof = rbdc.verify_coupling(first, second, wide, example())
    assert proof.holds and proof.error < 1e-9
    if APART not in blocks:
        assert proof.drift == 0


@settings(max_examples=20, deadline=None)
@given(blocks=st.lists(st.integers(0, APART - 1), max_size=4))
def test_each_feature_of_the_wide_model_depends_on_one_parent_alone(blocks: list[int]) -> None:
    """The oracle knows nothing of layouts: it changes one parent and looks what else changes."""
    assume(not any({*blocks} >= {*pair} for pair in CROSSED))
    parents = [made(blocks, 8, seed) for seed in (1, 2)]

    def features(*models: nn.Module) -> Tensor:
        wide = rbdc.couple(*models, into=made(blocks, 16, 3), example=example())
        with torch.no_grad():
            found: Tensor = wide.eval()(example().double())
        return found

    before = features(*parents)
    changed = []
    for which in range(2):
        others = list(parents)
        others[which] = made(blocks, 8, 5 + which)
        changed.append((features(*others) != before).flatten(0, 1).any(dim=0))
    assert torch.equal(changed[0], ~changed[1])
    assert changed[0].sum() == 8


def test_a_structure_is_the_same_after_json() -> None:
    structure = structure_of(made([0, 2, 4, APART], 8, 1), made([0, 2, 4, APART], 16, 2), example())
    assert structure.joint and structure.outputs[0] is not None
    assert Structure.from_json(json.loads(json.dumps(structure.to_json()))) == structure
    assert structure.layout["blocks.1.second.weight"].packed_second[:1] == (4,)


# What is inexact or refused, by name and cause


class Shared(nn.Module):
    """One scale for all channels, and a hidden layer that does not grow."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem, self.scale = nn.Linear(5, width), nn.Parameter(torch.ones(1))
        self.reduce, self.expand = nn.Linear(width, 4), nn.Linear(4, width)

    def forward(self, x: Tensor) -> Any:
        hidden = self.reduce(self.stem(x) * self.scale).relu()
        return self.expand(hidden)


def test_what_makes_a_coupling_inexact_is_named_with_its_cause() -> None:
    first, second, wide = Shared(8), Shared(8), Shared(16)
    found = structure_of(first, wide, example()).inexact
    assert found["scale"] == "both branches share it"
    assert found["reduce.weight"] == found["reduce.bias"]
    assert "relu in the model itself follows the mean" in found["reduce.weight"]
    with pytest.raises(CouplingError, match="would not be exact, because of"):
        rbdc.couple(first, second, into=wide, example=example())
    rbdc.couple(first, second, into=wide, example=example(), allow_inexact=True)
    assert not rbdc.verify_coupling(first, second, wide, example()).holds


class OnData(Normed):
    def forward(self, x: Tensor) -> Any:
        x = self.norm(x)
        return x * 2 if x.sum().item() > -1e9 else x + 1


class ByWidth(Normed):
    def forward(self, x: Tensor) -> Any:
        x = self.norm(x)
        return x.tanh() if x.shape[-1] > 8 else x.relu()


class Sorted(Normed):
    def forward(self, x: Tensor) -> Any:
        return x.sort(dim=-1).values


class Numpy(Normed):
    def forward(self, x: Tensor) -> Any:
        return self.norm(torch.from_numpy(x.detach().numpy() + 1.0))


class Detached(Normed):
    """Adds to its input by another name for the same memory."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.added = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Any:
        x = self.norm(x)
        x.detach()[:, 1:].add_(self.added)
        return x


class Data(Detached):
    def forward(self, x: Tensor) -> Any:
        x = self.norm(x)
        x.data += self.added
        return x


class Viewed(Detached):
    def forward(self, x: Tensor) -> Any:
        x = self.norm(x)
        before = x.unflatten(-1, (2, -1))
        x[:, :1] = self.added
        return before.flatten(-2)


class Lazy(Normed):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.lazy = nn.LazyLinear(width)


class Inner(nn.Module):
    def __init__(self, inner: Any, width: int) -> None:
        super().__init__()
        self.stem, self.inner = nn.Linear(5, width), inner(width)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        return self.inner(self.stem(x if y is None else x + y))


@pytest.mark.parametrize(
    ("inner", "problem"),
    [
        (OnData, "_local_scalar_dense in inner cannot be coupled"),
        (ByWidth, "relu in inner at the narrow width, tanh in inner at the wide one"),
        (Sorted, "sort in inner cannot be coupled: no rule"),
        (Numpy, "inner.norm.weight cannot be coupled"),
        (Lazy, "lazy parameters"),
    ],
)
def test_a_model_that_cannot_be_followed_is_refused_and_nothing_is_written(
    inner: Any, problem: str
) -> None:
    first, second, wide = Inner(inner, 8), Inner(inner, 8), Inner(inner, 16)
    before = copy.deepcopy(wide.stem.weight)
    with pytest.raises(CouplingError) as caught:
        rbdc.couple(first, second, into=wide, example=example(), allow_inexact=True)
    assert problem in str(caught.value)
    assert torch.equal(before, wide.stem.weight)


@pytest.mark.parametrize("inner", [Detached, Data, Viewed])
def test_a_tensor_that_is_changed_by_another_name_is_followed(inner: Any) -> None:
    models: Any = [randomized(Inner(inner, width), width).double() for width in (8, 8, 16)]
    randomized(models[1], 1)
    first, second, into = models
    wide = rbdc.couple(first, second, into=into, example=example())
    assert rbdc.verify_coupling(first, second, wide, example()).holds
    assert torch.equal(wide.get_parameter("inner.added")[:4], first.inner.added[:4])


@pytest.mark.parametrize("blocks", CROSSED)
def test_groups_of_both_branches_are_refused_where_groups_of_one_follow(blocks: list[int]) -> None:
    parents = [made(blocks, 8, seed) for seed in (1, 2)]
    with pytest.raises(CouplingError, match=r"along axis 0 .*in (stem|blocks)"):
        rbdc.couple(*parents, into=made(blocks, 16, 3), example=example())


def test_parents_of_two_versions_of_a_class_are_refused() -> None:
    class Gated(nn.Module):  # as above, with another gate
        def __init__(self, width: int) -> None:
            super().__init__()
            self.packed, self.out = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

        def forward(self, x: Tensor) -> Any:
            value, gate = self.packed(x).chunk(2, dim=-1)
            return self.out(value * gate.tanh())

    old, new, wide = Inner(BLOCKS[1], 8), Inner(Gated, 8), Inner(Gated, 16)
    for parents in ((old, new), (new, old), (old, Inner(BLOCKS[1], 8))):
        with pytest.raises(CouplingError, match="code of inner is"):
            rbdc.couple(*parents, into=wide, example=example())
    rbdc.couple(new, Inner(Gated, 8), into=wide, example=example())


def test_a_model_of_unknown_inputs_needs_an_example_of_each() -> None:
    models: Any = [Inner(Gated, 8), Inner(Gated, 8), Inner(Gated, 16)]
    first, second, wide = models
    with pytest.raises(CouplingError, match="the inputs of a Inner are not known"):
        rbdc.couple(first, second, into=wide)
    with pytest.raises(CouplingError, match="forward pass of Inner failed"):
        rbdc.couple(first, second, into=wide, example=(example(), example()[:, :3, :2]))
    for inputs in ((example(), example()), {"x": example(), "y": example()}):
        rbdc.couple(first, second, into=wide, example=inputs)
        assert rbdc.verify_coupling(first, second, wide, inputs).holds


def test_wrapped_models_are_unwrapped() -> None:
    first, second, wide = (Inner(Gated, width) for width in (8, 8, 16))
    average = torch.optim.swa_utils.AveragedModel(first)
    parallel, compiled = nn.DataParallel(second), cast(nn.Module, torch.compile(wide))
    result: Any = rbdc.couple(average, parallel, into=compiled, example=example())
    assert result is compiled
    assert rbdc.verify_coupling(first, second, wide, example()).holds
