"""Which units belong together."""

from math import prod

import pytest

from rbdc.errors import CouplingError
from rbdc.growth.units import units_of
from rbdc.models import ModelSpec, build_meta
from tests.growth.context import wide_spec

NAMES = [
    "resnet18d",
    "resnet50d",
    "resnet18",
    "deit_tiny_distilled_patch16_224",
    "deit3_large_patch16_224",
]


@pytest.mark.parametrize("name", NAMES)
def test_every_axis_that_doubles_has_a_group_and_no_other_has(name: str) -> None:
    spec = wide_spec(name).scaled(0.5)
    units, wide = units_of(spec), build_meta(wide_spec(name)).state_dict()
    for key, tensor in build_meta(spec).state_dict().items():
        sizes = zip(units.axes[key], tensor.shape, wide[key].shape, strict=True)
        for number, (name_, narrow_size, wide_size) in enumerate(sizes):
            assert (name_ is not None) == (wide_size == 2 * narrow_size), key
            if name_ is not None:
                group, packed = units.groups[name_], ".qkv." in key and number == 0
                shape = (3 if packed else 1, group.units, group.channels)
                assert units.by_unit(tensor, key, number).shape[number : number + 3] == shape, key
                assert narrow_size == prod(shape), key
    assert units.uniform == bool(units.mixed) == ("deit" in name)


@pytest.mark.parametrize("name", NAMES)
def test_an_inner_group_has_one_writer_and_one_reader(name: str) -> None:
    units = units_of(wide_spec(name).scaled(0.5))
    assert units.inner
    for inner in units.inner:
        having = {
            (key.rpartition(".")[0], number if units.layout[key].input_axis is not None else 0)
            for key, axes in units.axes.items()
            for number, group in enumerate(axes)
            if group == inner.group
        }
        norm = {(inner.norm, 0)} if inner.norm else set()
        assert having == {(inner.first, 0), (inner.second, 1)} | norm


def test_a_unit_of_attention_is_a_head_in_each_of_q_k_and_v() -> None:
    units = units_of(ModelSpec(name="deit_base_patch16_224", width=0.5))
    group = units.axes["blocks.0.attn.qkv.weight"][0]
    assert group is not None and len(units.layout["blocks.0.attn.qkv.weight"].packed) == 3
    assert (units.groups[group].units, units.groups[group].channels) == (6, 64)


def test_a_branch_that_weights_channels_has_the_units_of_what_it_weights() -> None:
    units = units_of(ModelSpec(name="seresnet50", width=0.5))
    stream = units.axes["layer1.0.conv3.weight"][0]
    assert (
        stream == units.axes["layer1.0.se.fc2.weight"][0] == units.axes["layer1.0.se.fc1.weight"][1]
    )
    inner = next(inner for inner in units.inner if inner.first == "layer1.0.se.fc1")
    assert inner.second == "layer1.0.se.fc2" and units.groups[inner.group].units == 8


def test_layers_that_mix_neighbours_are_refused() -> None:
    arguments = {"block_args": {"attn_layer": "eca"}}
    with pytest.raises(CouplingError, match=r"layer1\.0\.se\.conv\.weight: both branches share it"):
        units_of(ModelSpec(name="resnet26d", width=0.5, arguments=arguments))
