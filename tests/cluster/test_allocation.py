"""A plan on a cluster: allocations by hand, and promises for every number of devices."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rbdc
from rbdc.cluster.allocation import demands_of, plan_cluster, soonest
from rbdc.cluster.timetable import simulate
from rbdc.errors import PlanError
from rbdc.growth import Setting
from rbdc.growth.rbdc import Rbdc
from rbdc.jobs.train import TrainJob
from rbdc.models import ModelSpec
from rbdc.plan import Hardware, Plan, Scaling, Stage, scaling_of
from tests.cluster.test_timetable import check_rules, times
from tests.support import SMALL_VIT, small_data, small_recipe

FREE = Hardware(
    node_bytes_per_second=1e30,
    network_bytes_per_second=1e30,
    latency_seconds=0,
    least_step_seconds=0,
)
"""Communication costs nothing, and so do small batches."""
DEEP = rbdc.make_plan(
    ModelSpec(
        name="deit_tiny_patch16_224",
        arguments=SMALL_VIT | {"embed_dim": 256, "num_heads": 64, "depth": 1},
    ),
    steps=6,
    epochs=64,
    images=4800,
)


def plan_of(*epochs: float, baseline_epochs: float = 300) -> Plan:
    """A plan with these epochs, the leaves' first."""
    stages = zip(DEEP.stages[-len(epochs) :], epochs, strict=True)
    return replace(
        DEEP,
        steps=len(epochs) - 1,
        baseline_epochs=baseline_epochs,
        stages=tuple(replace(stage, epochs=count) for stage, count in stages),
    )


def scaling_for(plan: Plan, *speeds: float, batch_size: int, hardware: Hardware = FREE) -> Scaling:
    """Images a second of the target, the level below, ..."""
    scaling = scaling_of(plan, batch_size=batch_size, hardware=hardware)
    return replace(scaling, images_per_second=speeds)


def allocate(plan: Plan, devices: int, scaling: Scaling) -> tuple[int, ...]:
    """The devices of a model, target first, with which each level for itself finishes first."""

    def of_level(stage: Stage) -> int:
        images, sizes = stage.epochs * plan.images, scaling.group_sizes(devices)
        seconds = {size: scaling.training_seconds(stage.level, images, size) for size in sizes}
        return soonest(stage.models, seconds, devices)

    return tuple(of_level(stage) for stage in reversed(plan.stages))


def test_siblings_side_by_side_first_then_data_parallel() -> None:
    plan = plan_of(1, 2, 4)
    scaling = scaling_for(plan, 1, 2, 4, batch_size=48)
    assert allocate(plan, 1, scaling) == (1, 1, 1)
    assert allocate(plan, 4, scaling) == (4, 2, 1)
    assert allocate(plan, 8, scaling) == (8, 4, 2)
    assert allocate(plan, 24, scaling) == (24, 12, 6)
    assert allocate(plan, 10_000, scaling) == (24, 24, 24)  # no share is less than a pair


def test_fewer_at_a_time_where_it_ends_sooner() -> None:
    plan = plan_of(1, 2, 4)
    pairs_of_three = scaling_for(plan, 1, 2, 4, batch_size=48)
    # a leaf takes 1200 s alone: two waves of one device each, or four of three devices each
    assert allocate(plan, 3, pairs_of_three) == (3, 3, 3)
    assert times(plan_cluster(plan, 3, pairs_of_three).tree)["2.3"] == (1200, 1600)
    powers_of_two = scaling_for(plan, 1, 2, 4, batch_size=64)
    assert allocate(plan, 3, powers_of_two) == (2, 1, 1)


def test_not_more_devices_than_help() -> None:
    plan = plan_of(1, 2, 4)
    slow = replace(FREE, latency_seconds=1000.0)
    assert allocate(plan, 8, scaling_for(plan, 1, 2, 4, batch_size=48, hardware=slow)) == (1, 1, 1)


def test_a_timetable_by_hand() -> None:
    """4800 images: a leaf's epoch takes 1200 s of one device, one of the middle 2400, 4800."""
    plan = plan_of(1, 2, 4, baseline_epochs=8)
    scaling = scaling_for(plan, 1, 2, 4, batch_size=48)
    cluster = plan_cluster(plan, 4, scaling, coupling_seconds=10)
    assert times(cluster.tree) == {
        "2.0": (0, 1200),
        "2.1": (0, 1200),
        "2.2": (0, 1200),
        "2.3": (0, 1200),
        "1.0": (1200, 1200 + 10 + 2400),
        "1.1": (1200, 1200 + 10 + 2400),
        "target": (3610, 3610 + 10 + 4800),
    }
    assert times(cluster.standard) == {"standard": (0, 9600)}
    assert cluster.makespan_ratio == pytest.approx(8420 / 9600)
    work = 4 * 1200 + 2 * (2 * 2400 + 2 * 10) + 4 * 4800 + 4 * 10
    assert cluster.tree.device_seconds == work
    assert cluster.device_ratio == pytest.approx(work / (4 * 9600))
    # at its cheapest, a coupling holds one device
    assert cluster.tree.work_seconds == 4 * 1200 + 2 * (2 * 2400 + 10) + 4 * 4800 + 10


@pytest.mark.parametrize("devices", [1, 2, 4, 8, 16])
def test_perfect_scaling_reaches_the_bound_and_saves_the_flops(devices: int) -> None:
    plan = rbdc.make_plan(DEEP.model, steps=4, budget=0.7, images=4800)
    hardware = replace(FREE, narrow_efficiency=1.0)
    cluster = plan_cluster(plan, devices, scaling_of(plan, batch_size=1024, hardware=hardware))
    assert cluster.tree.gap == pytest.approx(0, abs=1e-9)
    assert cluster.tree.idle_share == pytest.approx(0, abs=1e-9)
    assert cluster.makespan_ratio == pytest.approx(plan.normalized_flops)
    assert cluster.device_ratio == pytest.approx(plan.normalized_flops)


def test_a_plan_of_no_steps_is_standard_training() -> None:
    plan = plan_of(300)
    cluster = plan_cluster(plan, 8, scaling_of(plan, batch_size=64))
    assert cluster.makespan_ratio == cluster.device_ratio == 1


plans = st.lists(st.sampled_from([1, 2, 3, 5, 8, 20]), min_size=1, max_size=7).map(
    lambda epochs: plan_of(*epochs)
)


@st.composite
def scalings(draw: st.DrawFn, levels: int) -> Scaling:
    return Scaling(
        batch_size=draw(st.sampled_from([1, 2, 8, 30, 96, 256, 720])),
        images_per_second=tuple(draw(st.floats(10, 1e4)) for _ in range(levels)),
        gradient_bytes=tuple(draw(st.integers(0, 10**9)) for _ in range(levels)),
        hardware=Hardware(
            devices_per_node=draw(st.integers(1, 16)),
            network_bytes_per_second=draw(st.sampled_from([1e8, 1e10, 1e12])),
            latency_seconds=draw(st.sampled_from([0.0, 1e-4, 1e-1])),
            least_step_seconds=draw(st.sampled_from([0.0, 0.02])),
        ),
    )


@given(plan=plans, devices=st.integers(1, 300), more=st.integers(1, 300), data=st.data())
@settings(max_examples=60, deadline=None)
def test_promises_for_any_plan_on_any_cluster(
    plan: Plan, devices: int, more: int, data: st.DataObject
) -> None:
    scaling = data.draw(scalings(len(plan.stages)))
    cluster = plan_cluster(plan, devices, scaling)
    check_rules(cluster.tree, demands_of(plan, cluster.allocation, scaling))
    assert cluster.tree.devices == devices
    # more devices never make it slower
    larger = plan_cluster(plan, devices + more, scaling)
    assert larger.tree.makespan_seconds <= cluster.tree.makespan_seconds * (1 + 1e-6)
    assert larger.standard.makespan_seconds <= cluster.standard.makespan_seconds * (1 + 1e-6)
    # one device does all the work in a row
    alone = plan_cluster(plan, 1, scaling).tree
    assert alone.makespan_seconds == pytest.approx(alone.work_seconds)


@pytest.mark.parametrize("batch_size", [64, 48, 30])
@pytest.mark.parametrize("epochs", [(1, 2, 4, 8), (20, 1, 1, 1), (1, 1, 20, 1), (1, 20, 1, 5)])
def test_never_slower_than_level_by_level(epochs: tuple[int, ...], batch_size: int) -> None:
    plan = plan_of(*epochs)
    scaling = scaling_for(plan, 1, 3, 7, 20, batch_size=batch_size)
    sooner = 0
    for devices in range(1, 20):
        in_waves = 0.0
        for stage, size in zip(plan.stages[::-1], allocate(plan, devices, scaling), strict=True):
            waves = -(-stage.models // (devices // size))
            images = stage.epochs * plan.images
            in_waves += waves * scaling.training_seconds(stage.level, images, size)
        makespan = plan_cluster(plan, devices, scaling).tree.makespan_seconds
        assert makespan <= in_waves * (1 + 1e-6)
        sooner += makespan < in_waves * (1 - 1e-6)
    # who has both parents does not wait for the rest of their level; groups of 3 leave no rest
    assert sooner or batch_size % 3 == 0


def test_fewer_devices_where_all_of_them_would_take_longer() -> None:
    """Who starts first can be in the way of who matters: Graham's anomaly, seen with 21 devices."""
    plan = plan_of(1, 2, 4, 6, 1, 1)
    scaling = scaling_for(plan, 1, 1, 1, 1, 1, 1, batch_size=6)

    def with_all(devices: int) -> float:
        demands = demands_of(plan, allocate(plan, devices, scaling), scaling)
        return simulate(demands, devices).makespan_seconds

    assert with_all(21) > with_all(20)
    found = plan_cluster(plan, 21, scaling).tree
    assert found.makespan_seconds <= with_all(20) < with_all(21)
    assert found.devices == 21


def test_a_large_tree_on_thousands_of_devices() -> None:
    cluster = plan_cluster(DEEP, 10_000, scaling_of(DEEP, batch_size=4096, hardware=FREE))
    assert len(cluster.tree.slots) == 127
    target, *_, leaves = cluster.tree.rows
    assert (leaves.models, leaves.devices, leaves.waves) == (64, 128, 1)
    assert target.devices == 2048


def test_jobs_are_named_and_coupled_as_in_the_tree() -> None:
    plan = plan_of(1, 2, 4, 8)
    setting = Setting(
        model=plan.model, recipe=small_recipe(), data=small_data(), baseline_epochs=1.0
    )
    tree = Rbdc().tree(setting, plan, 0)
    nodes = [node for node in tree.nodes if isinstance(node.job, TrainJob)]
    names = {node.job.key: node.name for node in nodes}
    demands = demands_of(plan, (1, 1, 1, 1), scaling_of(plan))
    assert [(demand.name, demand.level) for demand in demands] == [
        (node.name, node.level) for node in nodes
    ]
    for demand, node in zip(demands, nodes, strict=True):
        grown_from = [names[parent.key] for job in node.job.parents for parent in job.parents]
        assert list(demand.parents) == grown_from


def test_a_timetable_can_be_held_against_a_run() -> None:
    plan = plan_of(1, 2)
    scaling = scaling_for(plan, 1, 2, batch_size=48)
    demands = demands_of(plan, (2, 1), scaling)
    assert [demand.name for demand in demands] == ["1.0", "1.1", "target"]
    assert demands[-1].parents == ("1.0", "1.1")
    measured = {"1.0": 30.0, "1.1": 35.0, "target": 50.0}
    table = simulate([replace(job, seconds=measured[job.name]) for job in demands], 2)
    assert table.makespan_seconds == 85
    assert table.device_seconds == 30 + 35 + 2 * 50


def test_json_has_it_all() -> None:
    plan = plan_of(1, 2, 4)
    cluster = plan_cluster(plan, 8, scaling_of(plan, batch_size=48))
    record = json.loads(json.dumps(cluster.to_json()))
    assert record["tree"]["makespan_seconds"] == cluster.tree.makespan_seconds
    assert [slot["name"] for slot in record["tree"]["slots"]][-1] == "target"
    assert record["standard"]["slots"][0]["name"] == "standard"
    assert record["scaling"]["hardware"]["devices_per_node"] == 8
    assert [row["devices"] for row in record["tree"]["levels"]] == [
        row.devices for row in cluster.tree.rows
    ]


def test_what_cannot_be_is_refused() -> None:
    plan = plan_of(1, 2)
    scaling = scaling_of(plan, batch_size=48)
    with pytest.raises(PlanError, match="there are 0 devices"):
        plan_cluster(plan, 0, scaling)
    with pytest.raises(PlanError, match="a coupling takes -1 s"):
        plan_cluster(plan, 1, scaling, coupling_seconds=-1)
    with pytest.raises(PlanError, match="given for 1 levels, and the plan has 2"):
        demands_of(plan, [1], scaling)
    with pytest.raises(PlanError, match="a batch of 48 cannot be divided among 5 devices"):
        demands_of(plan, [5, 1], scaling)
