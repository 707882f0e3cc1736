"""A plan as people see it."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import rbdc
from rbdc.models import ModelSpec
from rbdc.report.plan import plan_table, save_plan_plot
from rbdc.report.units import readable_flops

SMALL = ModelSpec(
    name="deit_tiny_patch16_224",
    arguments={"img_size": 28, "patch_size": 4, "embed_dim": 64, "num_heads": 4, "depth": 2},
)


def test_the_table_says_what_runs_and_what_it_costs() -> None:
    plan = rbdc.make_plan(SMALL, steps=2, budget=0.7, images=10_000)
    console = Console(width=140, record=True, file=StringIO())
    console.print(plan_table(plan))
    text = console.export_text()
    for stage in plan.stages:
        row = next(line for line in text.splitlines() if f"{stage.models} × width" in line)
        assert f" {stage.epochs} " in row and f"{stage.share:.1%}" in row
    assert "embed_dim 16, num_heads 1" in text
    assert f"normalized FLOPs {plan.normalized_flops:.3f}" in text
    assert f"{plan.data_passes:g} passes over 10,000 images (standard: 300)" in text
    assert "counter fvcore+sdpa; not counted: add, gelu" in text
    assert "warning" not in text


def test_warnings_are_in_the_table() -> None:
    console = Console(width=140, record=True, file=StringIO())
    console.print(plan_table(rbdc.make_plan(SMALL, steps=2, ratio=0.5, epochs=2)))
    assert console.export_text().count("warning:") == 1


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_the_picture_is_drawn(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"plan.{suffix}"
    save_plan_plot(rbdc.make_plan(SMALL, steps=2, budget=0.7), path)
    head = path.read_bytes()[:500]
    assert {"png": b"\x89PNG", "svg": b"<svg", "pdf": b"%PDF"}[suffix] in head


def test_readable_flops() -> None:
    assert readable_flops(8_705_517_568) == "8.706 GFLOPs"
    assert readable_flops(144_078_080) == "144.1 MFLOPs"
    assert readable_flops(4.055e19) == "40.55 EFLOPs"
    assert readable_flops(12) == "12 FLOPs"
