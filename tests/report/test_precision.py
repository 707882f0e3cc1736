"""Detectors' precision: averaged in one place, shown in a table and in figures."""

from io import StringIO
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rbdc.metrics import METRICS
from rbdc.report.figures import draw_precision, draw_precision_curves, save_each
from rbdc.report.transfer import COLUMNS, PARTS, has_scores, precision, transfer_table
from tests.report.test_figures import drawn, shown_texts


def trained(seed: int, ap: float | None, **by_class: float | None) -> dict[str, Any]:
    numbers = {**dict.fromkeys(COLUMNS.values(), ap), "ap_large": None, "by_class": by_class}
    return {"seed": seed, "scores": dict.fromkeys(PARTS, numbers)}


ROWS: list[dict[str, Any]] = [
    {"backbone": "[red]a[/red]", "trained": [trained(1, 0.1, cat=0.5), trained(2, 0.3, cat=None)]},
    {"backbone": "$b$", "trained": [trained(3, 0.9), trained(2, 0.35, dog=0.25)]},
    {"backbone": "not yet", "trained": []},
]


def test_differences_are_of_the_same_seeds() -> None:
    first, second = precision(ROWS)["masks"]
    assert first["cells"]["ap"] == {"mean": pytest.approx(0.2), "spread": pytest.approx(0.02**0.5)}
    assert first["more"] is None and first["seeds"] == 2
    assert second["more"]["ap"] == {"mean": pytest.approx(0.05), "spread": None}  # of seed 2 alone
    assert second["cells"]["ap_large"] is second["more"]["ap_large"] is None
    apart = [ROWS[0], {"backbone": "c", "trained": [trained(9, 0.5)]}]
    assert precision(apart)["boxes"][1]["more"]["ap"] is None


def test_classes_of_all_backbones() -> None:
    found = precision(ROWS)["classes"]
    assert [one["name"] for one in found] == ["cat", "dog"]
    assert found[0]["boxes"] == [0.5, None] and found[1]["masks"] == [None, 0.25]


def test_nothing_is_trained_yet() -> None:
    assert precision(ROWS[2:]) == {"boxes": [], "masks": [], "classes": []}
    assert transfer_table({"rows": ROWS[2:]}) == "no detector is trained yet"


@pytest.mark.parametrize("scores", [None, 3, {}, {"boxes": {"ap": 1}, "masks": []}, {"boxes": {}}])
def test_what_are_no_scores(scores: Any) -> None:
    assert not has_scores({"scores": scores}) and has_scores(trained(1, None))


def test_the_table_in_a_terminal() -> None:
    console = Console(width=120, file=StringIO(), record=True)
    console.print(transfer_table({"rows": ROWS}, by_class=True))
    text = " ".join(console.export_text().split())
    for line in ("[red]a[/red] 20.0 ± 14.1", "$b$ - [red]a[/red]", "+5.0", "mAP by class"):
        assert line in text
    assert "not yet" not in text


def detector(key: str, values: list[float | None]) -> dict[str, Any]:
    history = {"epoch": [float(n + 1) for n in range(len(values))], "mask_map": values}
    return {"key": key, "history": {**history, "box_map": [0.5] * len(values)} if values else {}}


NODES = {
    "a": detector("a", [0.1, None, 0.3]),
    "b": detector("b", [0.01 * n for n in range(36)]),
    "c": detector("c", []),
}
BOTH = [METRICS["box_map"], METRICS["mask_map"]]
BACKBONES = [{"name": "from $1", "keys": ["a"]}, {"name": "a/long/" * 9, "keys": ["b", "c"]}]


def test_curves_of_mask_and_box_precision() -> None:
    box, mask = drawn(draw_precision_curves(NODES, BACKBONES, BOTH)).axes
    assert [len(axes.lines) for axes in (box, mask)] == [2, 2]
    first, second = mask.lines
    assert first.get_ydata()[-1] == 30.0 and first.get_xdata()[-1] == 3.0
    assert second.get_marker() == "None" and first.get_color() != second.get_color()
    assert draw_precision_curves({"c": NODES["c"]}, BACKBONES, BOTH) is None


def test_bars_with_their_spread() -> None:
    box, mask = drawn(draw_precision(precision(ROWS))).axes
    assert [bar.get_width() for bar in mask.patches] == pytest.approx([20.0, 62.5])
    (error,) = box.collections[0].get_segments()
    assert error[:, 0] == pytest.approx([20 - 14.142, 20 + 14.142], abs=0.01)
    unknown = [{"backbone": "a", "trained": [trained(1, None)]}]
    assert draw_precision(precision(unknown)) is not None
    assert draw_precision(precision([])) is None


def many() -> dict[str, Any]:
    return precision(
        [
            {"backbone": "runs/a-long-name/" * 3 + str(n), "trained": [trained(1, 0.1 * n)]}
            for n in range(9)
        ]
    )


@pytest.mark.parametrize("kind", ["few", "many"])
def test_no_text_lies_on_another(kind: str) -> None:
    bars = draw_precision(precision(ROWS) if kind == "few" else many())
    curves = draw_precision_curves(NODES, BACKBONES, BOTH)
    for figure in map(drawn, (bars, curves)):
        figure.draw_without_rendering()  # lays it out
        boxes = {text: text.get_window_extent() for text in shown_texts(figure)}
        assert len(boxes) > 8
        for (one, a), (other, b) in combinations(boxes.items(), 2):
            assert not a.overlaps(b), (one.get_text(), other.get_text())
            assert figure.bbox.contains(a.x0, a.y0) and figure.bbox.contains(a.x1, a.y1)


def test_the_suffix_decides_the_format(tmp_path: Path) -> None:
    curves = draw_precision_curves(NODES, BACKBONES, BOTH)
    figures = {"bars": draw_precision(precision(ROWS)), "curves": curves}
    heads = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    paths = save_each(figures, tmp_path, list(heads))
    assert [path.name for path in paths] == [f"{name}.{end}" for name in figures for end in heads]
    for path in paths:
        assert path.read_bytes().startswith(heads[path.suffix[1:]])
    assert "from $1</text>" in (tmp_path / "curves.svg").read_text()
