"""Jobs on devices: small cases by hand, and what holds for every timetable."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rbdc.cluster.timetable import Demand, Slot, Timetable, simulate
from rbdc.errors import PlanError


def tree(*levels: tuple[int, float]) -> list[Demand]:
    """Devices and seconds of each level, the leaves first."""
    demands: list[Demand] = []
    below: list[str] = []
    for depth, (devices, seconds) in enumerate(levels):
        level = len(levels) - 1 - depth
        here = [f"{level}.{index}" for index in range(2**level)]
        for index, name in enumerate(here):
            parents = tuple(below[2 * index : 2 * index + 2])
            demands.append(
                Demand(name=name, level=level, devices=devices, seconds=seconds, parents=parents)
            )
        below = here
    return demands


def times(table: Timetable) -> dict[str, tuple[float, float]]:
    return {slot.name: (slot.start_seconds, slot.end_seconds) for slot in table.slots}


def held_devices(slot: Slot) -> set[int]:
    return {device for first, count in slot.places for device in range(first, first + count)}


def check_rules(table: Timetable, demands: list[Demand]) -> None:
    """No device has two jobs, no job too few devices, none starts before its parents end."""
    slots = {slot.name: slot for slot in table.slots}
    assert len(slots) == len(table.slots) == len(demands)
    for demand in demands:
        slot = slots[demand.name]
        devices = held_devices(slot)
        assert len(devices) == slot.devices == demand.devices
        assert devices <= set(range(table.devices))
        assert slot.start_seconds >= max((slots[p].end_seconds for p in demand.parents), default=0)
        assert slot.seconds == pytest.approx(demand.seconds)
    for one, other in combinations(table.slots, 2):
        if one.start_seconds < other.end_seconds and other.start_seconds < one.end_seconds:
            assert not held_devices(one) & held_devices(other)
    assert table.makespan_seconds >= table.bound_seconds * (1 - 1e-9)
    assert -1e-9 <= table.idle_share < 1


def test_four_leaves_on_three_devices() -> None:
    demands = tree((1, 2.0), (1, 3.0), (2, 4.0))
    table = simulate(demands, 3)
    check_rules(table, demands)
    assert times(table) == {
        "2.0": (0, 2),
        "2.1": (0, 2),
        "2.2": (0, 2),
        "2.3": (2, 4),
        "1.0": (2, 5),  # does not wait for the fourth leaf
        "1.1": (4, 7),
        "0.0": (7, 11),
    }
    assert table.makespan_seconds == 11
    assert table.critical_path_seconds == 2 + 3 + 4
    assert table.work_seconds == table.device_seconds == 4 * 2 + 2 * 3 + 2 * 4
    assert table.bound_seconds == 9
    assert table.gap == pytest.approx(11 / 9 - 1)
    assert table.idle_share == pytest.approx(1 - 22 / 33)
    target, middle, leaves = table.rows
    assert (leaves.models, leaves.devices, leaves.waves) == (4, 1, 2)
    assert (middle.start_seconds, middle.end_seconds, middle.device_seconds) == (2, 7, 6)
    assert (target.models, target.devices, target.waves) == (1, 2, 1)


def test_one_device_does_all_the_work_in_a_row() -> None:
    table = simulate(tree((1, 2.0), (1, 3.0), (1, 4.0)), 1)
    assert table.makespan_seconds == table.work_seconds == 4 * 2 + 2 * 3 + 4
    assert table.gap == table.idle_share == 0


def test_none_overtakes_one_that_waits_for_devices() -> None:
    demands = [
        Demand(name="small", level=0, devices=1, seconds=2),
        Demand(name="large", level=0, devices=2, seconds=1),
        Demand(name="late", level=0, devices=1, seconds=1),
    ]
    assert times(simulate(demands, 2)) == {"small": (0, 2), "large": (2, 3), "late": (3, 4)}


def test_what_is_ready_does_not_wait_for_what_is_not() -> None:
    slow, *others = tree((1, 1.0), (1, 1.0), (1, 1.0))
    assert slow.name == "2.0"
    table = simulate([replace(slow, seconds=9.0), *others], 4)
    assert times(table)["1.1"] == (1, 2)
    assert times(table)["1.0"] == (9, 10)
    assert table.makespan_seconds == table.critical_path_seconds == 11


def test_devices_are_neighbours_where_they_can_be() -> None:
    demands = [
        Demand(name="a", level=0, devices=2, seconds=1),
        Demand(name="b", level=0, devices=1, seconds=5),
        Demand(name="c", level=0, devices=3, seconds=1),
        Demand(name="d", level=0, devices=3, seconds=1),
        Demand(name="e", level=0, devices=5, seconds=1),
    ]
    table = simulate(demands, 6)
    check_rules(table, demands)
    slots = {slot.name: slot for slot in table.slots}
    assert [slots[name].places for name in "abc"] == [((0, 2),), ((2, 1),), ((3, 3),)]
    assert slots["d"].start_seconds == 1 and slots["d"].places == ((3, 3),)  # not 0, 1 and 3
    assert slots["e"].start_seconds == 2 and slots["e"].places == ((0, 2), (3, 3))


@given(
    levels=st.lists(st.tuples(st.integers(1, 9), st.floats(0.1, 50)), min_size=1, max_size=5),
    more=st.integers(0, 20),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_the_rules_hold_whatever_was_measured(
    levels: list[tuple[int, float]], more: int, data: st.DataObject
) -> None:
    demands = tree(*levels)
    devices = max(size for size, _ in levels) + more
    names = st.sampled_from([demand.name for demand in demands])
    measured = data.draw(st.dictionaries(names, st.floats(0.01, 500)))
    demands = [replace(job, seconds=measured.get(job.name, job.seconds)) for job in demands]
    table = simulate(demands, devices)
    check_rules(table, demands)
    assert [slot.start_seconds for slot in table.slots] == sorted(
        slot.start_seconds for slot in table.slots
    )


def test_what_cannot_run_is_refused() -> None:
    job = Demand(name="1.0", level=1, devices=2, seconds=1)
    with pytest.raises(PlanError, match=r"1\.0 asks for 2 devices, and there are 1"):
        simulate([job], 1)
    with pytest.raises(PlanError, match=r"two jobs are called 1\.0"):
        simulate([job, job], 2)
    with pytest.raises(PlanError, match=r"1\.0 takes nan s on 2 devices"):
        simulate([replace(job, seconds=float("nan"))], 2)
    with pytest.raises(PlanError, match=r"the parent 1\.0 of child comes after it"):
        simulate([Demand(name="child", level=0, devices=1, seconds=1, parents=("1.0",)), job], 2)
    with pytest.raises(PlanError, match="there are no jobs"):
        simulate([], 2)
