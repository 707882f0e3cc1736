"""A plan as people see it."""

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

import rbdc
from rbdc.models import ModelSpec
from rbdc.plan import Hours, LevelSpeed, Speeds
from rbdc.report.plan import plan_table, save_plan_plot, steps_table
from rbdc.report.units import readable_flops
from rbdc.settings import names_baseline

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
    passes = f"{plan.data_passes:g} passes over 10,000 images (standard: 300)"
    assert f"{passes}; {plan.decoded_passes:g} decoded: siblings share a pass" in text
    assert "counter fvcore+sdpa; not counted: add, gelu" in text
    assert "warning" not in text


def test_a_plan_without_a_baseline_is_compared_with_none() -> None:
    hours = hours_of()
    text = text_of(plan_table(hours.plan, hours, relative=False))
    assert "standard" not in text and "normalized" not in text and "1 hours on one device" in text
    assert names_baseline({"epochs": 4.0}) is False
    assert names_baseline({"with_baseline": True}) and names_baseline({"budget": 0.5})


def text_of(renderable: RenderableType) -> str:
    console = Console(width=100, record=True, file=StringIO())
    console.print(renderable)
    return console.export_text()


def hours_of(**speeds: Any) -> Hours:
    plan = rbdc.make_plan(SMALL, steps=1, epochs=4, images=3600, baseline_epochs=5)
    levels = tuple(
        LevelSpeed(
            model=stage.model,
            images_per_second=5.0 * 4**stage.level,
            source="measured",
            batch_size=8,
            memory_bytes=2_500_000_000 >> stage.level,
        )
        for stage in reversed(plan.stages)
    )
    return Hours(plan=plan, speeds=Speeds(device="a GPU", levels=levels, **speeds), price=2.1)


def test_hours_are_a_table_of_their_own() -> None:
    plain = hours_of()
    text = text_of(plan_table(plain.plan, plain))
    assert "1 hours on one device, 1.000 of standard training's 1" in text
    assert "memory" not in text and "the loader is assumed to keep up" in text
    assert "width 0.5: measured" in text and "2.10" in text and "0.42" in text

    known = hours_of(peak_flops_per_second=1e9, dtype="float32", loader=8.0)
    text = text_of(plan_table(known.plan, known))
    rows = [line for line in text.splitlines() if "2 × width 0.5" in line]
    assert "1.25 GB" in rows[1] and "0.25*" in rows[1]  # 2 epochs at 8 images/s for both
    part = known.peak_share(known.plan.leaves)
    assert part is not None and f" {part:.0%} " in rows[1]
    assert "loader 8 images/s; * it limits width 0.5" in text
    assert "peak 1 GFLOPs/s, a matrix product in float32" in text


def test_steps_are_compared_in_a_table() -> None:
    text = text_of(steps_table([hours_of()], 1))
    assert "1 step takes the fewest hours" in text and "warning" not in text


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
