"""Training speeds from a table in the format of timm's benchmark results.

A level takes the speed of the row whose model has the same tensors and image size, whatever its
name: DeiT-Base at half width is deit_small_patch16_224. If no row has, its speed is interpolated
between rows of the same family and image size, linearly in log(images/s) over log(FLOPs).
"""

import csv
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import exp, isfinite, log
from pathlib import Path

import timm

from rbdc.errors import ModelError, PlanError
from rbdc.models import ModelSpec, build_meta, family, record_of, shapes_of
from rbdc.plan.flops import forward_flops
from rbdc.plan.speeds import LevelSpeed, Source, Speeds

NAME, SPEED = "model", "train_samples_per_sec"
BATCH_SIZE, IMAGE_SIZE, PARAMETERS = "train_batch_size", "train_img_size", "param_count"
WRITTEN_BY = "timm's benchmark.py --bench train --results-file FILE writes such a table."
NEIGHBOURS = 4  # rows on either side, by parameters, whose FLOPs are counted
HALVING = 4.0  # a halving of the width, in FLOPs: how far a speed is extrapolated
APART = 1.5  # FLOPs of two models that a slope is taken from, at least
OF_THE_DATA = ("num_classes", "in_chans", "drop_rate", "drop_path_rate")
"""Arguments of a level that hardly change its speed, and that published models do not have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A model of the table."""

    line: int
    name: str
    images_per_second: float
    batch_size: int | None
    image_size: int | None
    parameters: float | None
    """Parameters in millions, as the table rounds them."""

    @property
    def model(self) -> ModelSpec:
        return ModelSpec(name=self.name)


def table_speeds(path: Path, levels: Sequence[ModelSpec], *, loader: float | None = None) -> Speeds:
    """Return the speeds of the levels, target first, from a table."""
    rows = read_table(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # timm's, about deprecated names in old tables
        found = tuple(_level_speed(level, rows, path) for level in levels)
    return Speeds(device=path.name, levels=found, loader=loader)


def read_table(path: Path) -> list[Row]:
    """Read the rows that have a training speed, and refuse a table that is broken."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            missing = [key for key in (NAME, SPEED) if key not in (reader.fieldnames or ())]
            if missing:
                raise PlanError(
                    f"{path} has no column {' and no column '.join(missing)}", WRITTEN_BY
                )
            rows = [row for cells in reader if (row := _row(path, reader.line_num, cells))]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise PlanError(f"{path} cannot be read as a table: {reason}", WRITTEN_BY) from None
    if not rows:
        raise PlanError(f"{path} has no row with a training speed", WRITTEN_BY)
    first: dict[str, Row] = {}
    for row in rows:
        other = first.setdefault(row.name, row)
        if other is not row:
            raise PlanError(
                f"{path} has {row.name} in lines {other.line} and {row.line}",
                "Leave one row for each model.",
            )
    return rows


def _row(path: Path, line: int, cells: dict[str | None, str | None]) -> Row | None:
    """Return a row; None if its speed is empty, as timm writes for models that failed."""
    if None in cells or None in cells.values():
        raise PlanError(
            f"line {line} of {path} has {'more' if None in cells else 'fewer'} cells than the "
            "header",
            "Repair the line or remove it.",
        )
    if not (cells[SPEED] or "").strip():
        return None
    speed = _number(path, line, cells, SPEED)
    assert speed is not None
    batch_size, image_size = (_number(path, line, cells, key) for key in (BATCH_SIZE, IMAGE_SIZE))
    return Row(
        line=line,
        name=(cells[NAME] or "").strip().partition(".")[0],  # without the tag of its weights
        images_per_second=speed,
        batch_size=None if batch_size is None else int(batch_size),
        image_size=None if image_size is None else int(image_size),
        parameters=_number(path, line, cells, PARAMETERS),
    )


def _number(path: Path, line: int, cells: dict[str | None, str | None], key: str) -> float | None:
    text = (cells.get(key) or "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not (isfinite(value) and value > 0):
        raise PlanError(
            f"{key} in line {line} of {path} is {text}, expected a number above 0",
            "Repair the line or remove it.",
        )
    return value


def _level_speed(level: ModelSpec, rows: Sequence[Row], path: Path) -> LevelSpeed:
    published = replace(
        level, arguments={k: v for k, v in level.arguments.items() if k not in OF_THE_DATA}
    )
    near = _by_distance(published, rows)
    for row in near:
        if _same_parameters(row, published) and _same_model(row, published):
            return _speed(level, row.images_per_second, "table", row.name, row.batch_size)
    return _interpolated(level, published, near, path)


def _interpolated(
    level: ModelSpec, published: ModelSpec, near: Sequence[Row], path: Path
) -> LevelSpeed:
    flops = forward_flops(published, counter="torch")  # the quickest: it needs no memory
    points: dict[int, Row] = {}
    for row in _neighbours(published, near):
        points.setdefault(forward_flops(row.model, counter="torch"), row)
    pair = _pair(sorted(points), flops)
    if pair is None:
        raise PlanError(
            f"{path} has no row for {level} ({_parameters(published):.1f} M parameters, "
            f"{_size_of(published)} px), and no two models of its family and image size to "
            "interpolate between by FLOPs",
            "Add its speed to the table, or measure it (--measure).",
        )
    nearer, other = (points[known] for known in pair)
    slope = log(other.images_per_second / nearer.images_per_second) / log(pair[1] / pair[0])
    inside = min(pair) <= flops <= max(pair)
    if not inside:
        slope = min(0.0, max(-1.0, slope))  # never more FLOP/s than a wider model
    speed = nearer.images_per_second * exp(slope * log(flops / pair[0]))
    source: Source = "interpolated" if inside else "extrapolated"
    return _speed(level, speed, source, f"{nearer.name} and {other.name} by FLOPs", None)


def _pair(known: Sequence[int], flops: int) -> tuple[int, int] | None:
    """Return the FLOPs of the two models to interpolate between; None if there are none.

    They lie on either side of `flops`. Where all lie on one side, they are the nearest, at most
    one halving of the width away, and the next that differs enough from it to give a slope.
    """
    below = [each for each in known if each <= flops]
    above = [each for each in known if each > flops]
    if below and above:
        return below[-1], above[0]
    by_distance = below[::-1] or above
    if not by_distance or not 1 / HALVING <= by_distance[0] / flops <= HALVING:
        return None
    first = by_distance[0]
    apart = (each for each in by_distance if max(each / first, first / each) >= APART)
    other = next(apart, None)
    return None if other is None else (first, other)


def _speed(
    level: ModelSpec, speed: float, source: Source, detail: str, batch_size: int | None
) -> LevelSpeed:
    return LevelSpeed(
        model=level, images_per_second=speed, source=source, detail=detail, batch_size=batch_size
    )


def _by_distance(published: ModelSpec, rows: Sequence[Row]) -> list[Row]:
    """Return timm's models: those defined beside this one, then by similar parameters."""
    size, beside = log(_parameters(published)), _module(published.name)
    kind = family(published).model_class
    known = [row for row in rows if timm.is_model(row.name) and _may_build(row.name, kind)]
    return sorted(known, key=lambda row: (_module(row.name) != beside, abs(log(_size(row)) - size)))


def _may_build(name: str, kind: type) -> bool:
    """Return whether timm's module of this model knows the class: quicker than building it."""
    return getattr(sys.modules[_module(name)], kind.__name__, None) is kind


def _module(name: str) -> str:
    return str(timm.model_entrypoint(name).__module__)


def _neighbours(published: ModelSpec, near: Sequence[Row]) -> Iterator[Row]:
    """Yield the nearest rows of the same family and image size, of different sizes."""
    size, wanted = _parameters(published), _size_of(published)
    taken: dict[bool, list[float]] = {True: [], False: []}
    for row in near:
        side = taken[_size(row) > size]
        if len(side) == NEIGHBOURS or any(abs(log(_size(row) / one)) < log(1.2) for one in side):
            continue
        if _in_family(row, published) and _image_size(row) == wanted:
            side.append(_size(row))
            yield row


def _same_parameters(row: Row, published: ModelSpec) -> bool:
    """Return whether the table's rounded count fits, which spares building most of the rows."""
    return row.parameters is None or abs(row.parameters - _parameters(published)) < 0.011


def _same_model(row: Row, published: ModelSpec) -> bool:
    return (
        _in_family(row, published)
        and _image_size(row) == _size_of(published)
        and {k: t.shape for k, t in shapes_of(row.model).items()}
        == {k: t.shape for k, t in shapes_of(published).items()}
    )


def _in_family(row: Row, published: ModelSpec) -> bool:
    try:
        return family(row.model) is family(published)
    except ModelError:
        return False


def _size(row: Row) -> float:
    return _parameters(row.model) if row.parameters is None else row.parameters


@cache
def _parameters(model: ModelSpec) -> float:
    """Return the parameters in millions."""
    try:
        return sum(weight.numel() for weight in build_meta(model).parameters()) / 1e6
    except ModelError:
        return 1e-6  # a row of another family, which is not asked for its speed


def _image_size(row: Row) -> int | None:
    return row.image_size or _size_of(row.model)


def _size_of(model: ModelSpec) -> int | None:
    """Return the side of a square input in pixels; None if it is not square."""
    _channels, height, width = record_of(model)["input_size"]
    return int(height) if height == width else None
