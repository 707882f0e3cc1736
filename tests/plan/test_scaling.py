"""The model of speed: its formula by hand, and what no cluster can do."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rbdc
from rbdc.data.batches import check_batch_size
from rbdc.errors import DataError, PlanError
from rbdc.models import ModelSpec
from rbdc.plan import Hardware, Scaling, scaling_of
from tests.support import SMALL_VIT

SMALL = ModelSpec(name="deit_tiny_patch16_224", arguments=SMALL_VIT)
BYTES = {"node_bytes_per_second": 100.0, "network_bytes_per_second": 10.0, "devices_per_node": 2}
PLAIN = Scaling(
    batch_size=48,
    images_per_second=(2.0, 8.0),
    gradient_bytes=(400, 100),
    hardware=Hardware(latency_seconds=0.5, least_step_seconds=1.0, **BYTES),  # type: ignore[arg-type]
)


def test_a_step_by_hand() -> None:
    assert PLAIN.step_seconds(0, 1) == 24
    # 12 s of compute: the all-reduce, 2 x 1/2 x 400 / 100 = 4 s, hides behind 8 s of backward
    assert PLAIN.step_seconds(0, 2) == 12 + 0.5
    # 6 s of compute, 2 of them forward; between nodes 2 x 3/4 x 400 / 10 = 60 s
    assert PLAIN.step_seconds(0, 4) == pytest.approx(2 + 60 + 2 * 0.5)
    # 48 / 24 / 8 = 0.25 s of compute, but no step is shorter than 1 s
    free = replace(PLAIN, gradient_bytes=(0, 0))
    assert free.step_seconds(1, 24) == pytest.approx(1 + 0.5 * 4.585, rel=1e-3)
    assert PLAIN.training_seconds(0, 480, 1) == 240
    assert PLAIN.efficiency(0, 2) == pytest.approx(24 / 12.5 / 2)


@given(batch_size=st.integers(1, 300), devices=st.integers(1, 400))
def test_groups_are_those_that_can_share_a_batch(batch_size: int, devices: int) -> None:
    sizes = replace(PLAIN, batch_size=batch_size).group_sizes(devices)
    for size in range(1, devices + 1):
        try:
            check_batch_size(10_000, batch_size, size, mixes=False)
        except DataError:
            assert size not in sizes
        else:
            assert size in sizes


def test_groups_have_the_memory_for_their_shares() -> None:
    assert PLAIN.group_sizes(12) == [1, 2, 3, 4, 6, 8, 12]
    assert replace(PLAIN, max_images_per_device=12).group_sizes(12) == [4, 6, 8, 12]
    assert replace(PLAIN, max_images_per_device=12).group_sizes(3) == [
        3
    ]  # too little, and all there is


@given(level=st.integers(0, 1), devices=st.integers(1, 10_000), latency=st.floats(0, 1))
def test_no_group_does_more_than_its_devices(level: int, devices: int, latency: float) -> None:
    hardware = replace(PLAIN.hardware, latency_seconds=latency)
    scaling = replace(PLAIN, hardware=hardware)
    assert 0 < scaling.efficiency(level, devices) <= 1 + 1e-12
    assert scaling.efficiency(level, 1) == 1


def test_speeds_follow_from_flops_or_from_what_was_measured() -> None:
    plan = rbdc.make_plan(SMALL, steps=2, epochs=4, images=640)
    flops = [stage.forward_flops for stage in reversed(plan.stages)]
    hardware = Hardware(flops_per_second=3e9, narrow_efficiency=0.5)
    derived = scaling_of(plan, batch_size=64, hardware=hardware).images_per_second
    assert derived == pytest.approx([1e9 / flops[0], 0.5e9 / flops[1], 0.25e9 / flops[2]])

    one = scaling_of(plan, batch_size=64, hardware=hardware, images_per_second=[100])
    assert one.images_per_second == pytest.approx([100 * speed / derived[0] for speed in derived])
    every = scaling_of(plan, batch_size=64, images_per_second=[100, 300, 700])
    assert list(every.images_per_second) == [100, 300, 700]

    target = sum(weight.numel() for weight in rbdc.build(SMALL).parameters())
    assert every.gradient_bytes[0] == 4 * target
    assert every.gradient_bytes[0] > 2 * every.gradient_bytes[1] > 4 * every.gradient_bytes[2]


def test_the_measured_models_lose_what_we_assume() -> None:
    """timm's images/s on one GPU (`Hardware.narrow_efficiency`), with the FLOPs we count."""
    rates = [391 * 35.17, 1054 * 9.217, 2291 * 2.517]  # DeiT-Base, Small, Tiny
    assert rates[1] / rates[0] == pytest.approx(0.71, abs=0.005)
    assert rates[2] / rates[1] == pytest.approx(0.59, abs=0.005)
    assert (rates[2] / rates[0]) ** 0.5 == pytest.approx(Hardware().narrow_efficiency, abs=0.005)


def test_what_cannot_be_is_refused() -> None:
    plan = rbdc.make_plan(SMALL, steps=2, epochs=4, images=640)
    with pytest.raises(PlanError, match="has 2 numbers, and the plan has 3 levels"):
        scaling_of(plan, batch_size=64, images_per_second=[100, 200])
    with pytest.raises(PlanError, match="images per second is -1"):
        scaling_of(plan, batch_size=64, images_per_second=[-1])
    for batch_size in (0, 641):
        with pytest.raises(PlanError, match=f"the batch size is {batch_size}, and there are 640"):
            scaling_of(plan, batch_size=batch_size)
    with pytest.raises(PlanError, match="node bytes per second is 0, expected more than 0"):
        Hardware(node_bytes_per_second=0)
    with pytest.raises(PlanError, match="latency seconds is -1, expected 0 or more"):
        Hardware(latency_seconds=-1)
    with pytest.raises(PlanError, match="flops per second is nan"):
        Hardware(flops_per_second=float("nan"))
