"""A plan on a cluster as people see it."""

import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

import rbdc
from rbdc.cluster.allocation import ClusterPlan, plan_cluster
from rbdc.models import ModelSpec
from rbdc.plan import Hardware, scaling_of
from rbdc.report.timetable import gantt, save_timetable_plot, time_unit, timetable_table
from tests.support import SMALL_VIT

MODEL = ModelSpec(
    name="deit_tiny_patch16_224",
    arguments=SMALL_VIT | {"embed_dim": 256, "num_heads": 64, "depth": 1},
)


def on_cluster(steps: int, devices: int, **hardware: float) -> ClusterPlan:
    plan = rbdc.make_plan(MODEL, steps=steps, budget=0.7, images=100_000)
    base = replace(Hardware(flops_per_second=1e8), **hardware)  # type: ignore[arg-type]
    return plan_cluster(plan, devices, scaling_of(plan, batch_size=1024, hardware=base))


def printed(renderable: RenderableType, width: int = 80) -> list[str]:
    console = Console(width=width, record=True, file=StringIO())
    console.print(renderable)
    return console.export_text().splitlines()


def test_the_table_says_who_trains_where_and_how_good_that_is() -> None:
    cluster = on_cluster(2, 3)
    tree = cluster.tree
    lines = printed(timetable_table(cluster))
    unit, seconds = time_unit(tree.makespan_seconds)
    for row, name in zip(
        tree.rows, ("1 × width 1", "2 × width 0.5", "4 × width 0.25"), strict=True
    ):
        figures = next(line for line in lines if line.strip().startswith(name + " "))
        found = figures.strip().removeprefix(name).split()
        assert found[:2] == [str(row.devices), str(row.waves)]
        assert float(found[4]) == pytest.approx(row.end_seconds / seconds, rel=0.01)
    assert found[:3] == ["1", "2", "100%"]  # four leaves on three devices
    text = "\n".join(lines)
    assert f"makespan {cluster.makespan_ratio:.3f}" in text
    assert f"device-{unit} {cluster.device_ratio:.3f} of standard training's" in text
    assert f"{tree.gap:.1%} above the bound" in text
    assert f"idle {tree.idle_share:.1%} of the time" in text
    assert "--gpus-per-job 2,1,1" in text
    assert "images/s of one device" in text and "batch 1024" in text and "200 GB/s" in text


@pytest.mark.parametrize(("steps", "devices"), [(0, 1), (2, 8), (6, 5), (6, 10_000)])
def test_it_fits_into_eighty_columns(steps: int, devices: int) -> None:
    cluster = on_cluster(steps, devices)
    lines = [*printed(timetable_table(cluster), width=200), *printed(gantt(cluster), width=200)]
    assert max(len(line.rstrip()) for line in lines if "images/s" not in line) <= 80
    assert not any("…" in line for line in printed(timetable_table(cluster)))


def test_a_bar_a_job() -> None:
    cluster = on_cluster(2, 3)
    *bars, axis = printed(gantt(cluster))
    assert [bar.split()[0] for bar in bars[:-1]] == [slot.name for slot in cluster.tree.slots]
    assert bars[-1].startswith("standard training on 2")
    end = max(cluster.tree.makespan_seconds, cluster.standard.makespan_seconds)
    margin = axis.index("0")
    for bar, slot in zip(bars, (*cluster.tree.slots, *cluster.standard.slots), strict=True):
        block = re.search("█+", bar)
        assert block
        for place, moment in zip(block.span(), (slot.start_seconds, slot.end_seconds), strict=True):
            assert place - margin == pytest.approx(moment / end * (80 - margin), abs=1.01)


def test_a_bar_a_level_where_there_are_many_jobs() -> None:
    cluster = on_cluster(6, 5)
    bars = printed(gantt(cluster))
    assert len(bars) == 7 + 1 + 1
    assert bars[0].startswith("6.0 - 6.63 on 1 ") and bars[6].startswith("target on 4 ")
    leaves, target = bars[0], bars[6]
    assert set(re.sub(".* on 1 ", "", leaves)) <= set(" ▁▂▃▄▅▆▇█")
    assert max(map(leaves.rfind, "▁▂▃▄▅▆▇█")) < target.index("█")


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_the_picture_is_drawn(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"gantt.{suffix}"
    save_timetable_plot(on_cluster(2, 8), path)
    head = path.read_bytes()[:500]
    assert {"png": b"\x89PNG", "svg": b"<svg", "pdf": b"%PDF"}[suffix] in head


@pytest.mark.parametrize("devices", [5, 1000])
def test_a_picture_of_many_jobs_names_those_that_have_room(devices: int, tmp_path: Path) -> None:
    cluster = on_cluster(6, devices, least_step_seconds=0.0)
    save_timetable_plot(cluster, tmp_path / "gantt.svg")
    drawn = (tmp_path / "gantt.svg").read_text()
    named = {slot.name for slot in cluster.tree.slots if f">{slot.name}<" in drawn}
    assert "target" in named and "6.17" not in named
    assert "64 × width 0.0156" in drawn


def test_times_are_read_in_hours_minutes_or_seconds() -> None:
    assert time_unit(30) == ("seconds", 1)
    assert time_unit(1800) == ("minutes", 60)
    assert time_unit(9000) == ("hours", 3600)
