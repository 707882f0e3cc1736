"""Speeds from timm's benchmark tables: found by what a model is, not by what it is called."""

from math import log
from pathlib import Path

import pytest

from rbdc.errors import PlanError
from rbdc.models import ModelSpec
from rbdc.plan import Growth, forward_flops, table_speeds
from rbdc.plan.table import _pair, read_table

HEADER = "model,train_samples_per_sec,train_step_time,train_batch_size,train_img_size,param_count"
TINY = "deit_tiny_patch16_224,2290.53,222.68,512,224,5.72"
SMALL = "deit_small_patch16_224,1053.64,363.563,384,224,22.05"
BASE = "deit_base_patch16_224,390.88,490.307,192,224,86.57"
OTHERS = ["mixer_b32_224,1784.58,286.101,512,224,60.29", "a_model_of_2031,1,1,1,224,22.05"]
DEIT_BASE = Growth().levels(ModelSpec(name="deit_base_patch16_224"), 2)


def table(folder: Path, *lines: str, header: str = HEADER) -> Path:
    path = folder / "speeds.csv"
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


def test_a_narrow_level_finds_the_model_that_it_is(tmp_path: Path) -> None:
    path = table(tmp_path, *OTHERS, TINY, SMALL, BASE)
    speeds = table_speeds(path, DEIT_BASE, loader=700)
    assert speeds.images_per_second == (390.88, 1053.64, 2290.53)
    assert [level.source for level in speeds.levels] == ["table"] * 3
    assert [level.detail.split("_")[1] for level in speeds.levels] == ["base", "small", "tiny"]
    assert [level.batch_size for level in speeds.levels] == [192, 384, 512]
    assert speeds.loader == 700 and speeds.device == "speeds.csv"


def test_two_columns_are_enough_and_names_may_have_tags(tmp_path: Path) -> None:
    path = table(
        tmp_path,
        "vit_small_patch16_224.augreg_in1k,1052.92",  # the same shapes under another name
        "deit_small_patch16_384,300",
        "deit_base_patch16_224,",  # timm leaves out what failed
        header="model,train_samples_per_sec",
    )
    (half,) = table_speeds(path, DEIT_BASE[1:2]).levels
    assert (half.images_per_second, half.detail) == (1052.92, "vit_small_patch16_224")
    data = ModelSpec(name="deit_base_patch16_224", arguments={"num_classes": 10}).scaled(0.5)
    assert table_speeds(path, [data]).levels[0].source == "table"


def test_a_missing_level_is_interpolated_between_models_of_its_family(tmp_path: Path) -> None:
    path = table(tmp_path, *OTHERS, TINY, BASE)
    found = table_speeds(path, DEIT_BASE)
    small = found.levels[1]
    assert small.source == "interpolated"
    assert small.detail == "deit_tiny_patch16_224 and deit_base_patch16_224 by FLOPs"
    low, mid, high = (forward_flops(level, counter="torch") for level in reversed(DEIT_BASE))
    # the geometric mean of the speeds, weighted by where log(FLOPs) lies
    weight = log(mid / low) / log(high / low)
    assert small.images_per_second == pytest.approx(2290.53 ** (1 - weight) * 390.88**weight)
    assert small.images_per_second == pytest.approx(1053.64, rel=0.15)  # what timm measured


def test_a_level_outside_of_the_table_is_extrapolated_by_one_halving(tmp_path: Path) -> None:
    path = table(tmp_path, SMALL, BASE)
    tiny = table_speeds(path, DEIT_BASE).levels[2]
    assert tiny.source == "extrapolated"
    assert 1053.64 < tiny.images_per_second < 1053.64 * 4  # not faster than by FLOPs
    assert _pair([100, 110, 400], 50) == (100, 400)  # 110 is too near to give a slope
    assert _pair([100, 400], 24) is None  # more than one halving away
    assert _pair([100, 110], 50) is None
    assert _pair([100, 110, 400], 105) == (100, 110)
    assert _pair([], 50) is None and _pair([50], 50) is None


@pytest.mark.parametrize("rows", [[], [TINY], [SMALL.replace(",224,", ",384,")]])
def test_a_level_that_nothing_is_known_of_is_named(rows: list[str], tmp_path: Path) -> None:
    path = table(tmp_path, BASE, *rows) if not rows else table(tmp_path, *OTHERS, *rows)
    with pytest.raises(PlanError, match=r"no row for deit_base_patch16_224 at width 0.5 \(22.1 M"):
        table_speeds(path, DEIT_BASE[1:2])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model,infer_samples_per_sec\nx,1\n", "has no column train_samples_per_sec"),
        ("speed\n1\n", "has no column model and no column train_samples_per_sec"),
        ("", "has no column model"),
        ("model,train_samples_per_sec\n", "has no row with a training speed"),
        ("model,train_samples_per_sec\nx,fast\n", "in line 2 of .* is fast"),
        ("model,train_samples_per_sec\nx,0\n", "in line 2 of .* is 0"),
        ("model,train_samples_per_sec\nx,-3\n", "in line 2 of .* is -3"),
        ("model,train_samples_per_sec\nx,inf\n", "in line 2 of .* is inf"),
        ("model,train_samples_per_sec\nx,1,2\n", "line 2 of .* has more cells"),
        ("model,train_samples_per_sec\nx\n", "line 2 of .* has fewer cells"),
        ('model,train_samples_per_sec\n"x,1\n', "cannot be read as a table"),
        ("model,train_samples_per_sec\nx,1\nx,2\n", "has x in lines 2 and 3"),
        ("model,train_samples_per_sec,param_count\nx,1,many\n", "param_count in line 2"),
    ],
)
def test_a_broken_table_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "speeds.csv"
    path.write_text(text)
    with pytest.raises(PlanError, match=message):
        read_table(path)


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="No such file"):
        read_table(tmp_path / "missing.csv")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(PlanError, match="cannot be read as a table"):
        read_table(tmp_path / "picture.png")
