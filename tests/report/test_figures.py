"""Figures of a run: what they show is what was measured, and nothing hides anything else."""

import re
from itertools import combinations
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from rbdc.report.compare import save_comparison_plots
from rbdc.report.figures import (
    block_ratios,
    draw_blocks,
    draw_budget,
    draw_curves,
    draw_rates,
    line_to_target,
    save_each,
)
from rbdc.report.read import read_run

STEPS = 3
EPOCHS = {3: 20, 2: 39, 1: 79, 0: 157}


@pytest.fixture(scope="module")
def run(finished: Path) -> dict[str, Any]:
    return read_run(finished)


def nodes_of(run: dict[str, Any]) -> list[dict[str, Any]]:
    return list(run["nodes"].values())


def named(run: dict[str, Any], name: str) -> dict[str, Any]:
    return next(node for node in nodes_of(run) if node["name"] == name)


def long_node(level: int, index: int, name: str = "") -> dict[str, Any]:
    """A model of a long training of a large transformer, with made-up numbers."""
    epochs = EPOCHS[level]
    layers = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    times = list(range(0, epochs + 1, max(1, epochs // 29)))
    parents = [f"{level + 1}.{2 * index + side}" for side in (0, 1)]
    return {
        "key": name or f"{level}.{index}",
        "name": name or (f"{level}.{index}" if level else "target"),
        "kind": "train",
        "level": level,
        "width": 0.5**level,
        "parents": parents if level < STEPS and not name else [],
        "planned_flops": 4.0 ** (-level) * epochs,
        "flops_before": 4.0 ** (-level) * epochs,
        "metric": "top1",
        "start": {} if level == STEPS or name else {"top1": 0.4},
        "epochs": epochs,
        "epochs_before": sum(EPOCHS[k] for k in range(level + 1, STEPS + 1)),
        "history": {
            "epoch": list(range(1, epochs + 1)),
            "flops": [4.0 ** (-level) * (20 + epoch) for epoch in range(1, epochs + 1)],
            "top1": [0.8 - 0.1 * level - 0.4 * exp(-e / 20) for e in range(1, epochs + 1)],
        },
        "steps": {"epoch": [0.5, 1.0, epochs], "lr": [1e-3, 1e-4, 1e-5]},
        "blocks": {
            "epoch": times,
            "names": [f"blocks.{n}.{layer}.weight" for n in range(12) for layer in layers],
            "sizes": [[[1.0, t / 200, t / 200, 1.0]] * 48 for t in times],
        },
    }


def long_run() -> dict[str, Any]:
    tree = [long_node(level, i) for level in sorted(EPOCHS, reverse=True) for i in range(2**level)]
    levels = [
        {
            "standard": False,
            "level": level,
            "width": 0.5**level,
            "models": 2**level,
            "planned_flops": 2.0**-level * epochs,
            "flops": 2.0**-level * epochs,
        }
        for level, epochs in EPOCHS.items()
    ]
    nodes = {node["key"]: node for node in [*tree, long_node(0, 0, "standard")]}
    return {"nodes": nodes, "levels": levels, "about": {"baseline_flops": 300.0}}


def draw_all(run: dict[str, Any]) -> dict[str, Any]:
    """One figure of each kind."""
    scale = run["about"]["baseline_flops"]
    figures = {
        "curves": draw_curves(nodes_of(run), baseline_flops=scale),
        "rates": draw_rates(nodes_of(run)),
        "budget": draw_budget(run["levels"], baseline_flops=scale),
        "blocks": draw_blocks(named(run, "target"), standard=named(run, "standard")),
    }
    return {name: drawn(figure) for name, figure in figures.items()}


def drawn(figure: Figure | None) -> Any:
    assert figure is not None
    return figure


@pytest.mark.parametrize(
    ("end", "head"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_the_suffix_decides_the_format(
    end: str, head: bytes, run: dict[str, Any], tmp_path: Path
) -> None:
    paths = save_each({**draw_all(run), "nothing": None}, tmp_path, [end])
    assert len(paths) == 4
    for path in paths:
        assert path.read_bytes().startswith(head)
        if end == "svg":
            assert re.search(r"(epochs|FLOPs)[^<]*</text>", path.read_text())  # it can be edited


def test_curves_end_at_what_was_measured(run: dict[str, Any]) -> None:
    scale = run["about"]["baseline_flops"]
    axes = drawn(draw_curves(nodes_of(run), baseline_flops=scale)).axes[0]
    lines = [(tuple(line.get_xydata()[-1]), line) for line in axes.lines]  # ends may coincide
    for name, colour in (("target", "#0072B2"), ("standard", "#000000")):
        flops = run["result"]["training_flops"]
        if name == "standard":
            flops = run["result"]["standard"]["training_flops"]
        end = (pytest.approx(flops / scale, rel=1e-4), 100 * named(run, name)["metrics"]["top1"])
        assert colour in [line.get_color() for place, line in lines if place == end]
    assert len({line.get_color() for _, line in lines}) == 4  # levels, standard training


def test_the_accuracy_right_after_a_coupling_is_marked_where_its_training_begins(
    run: dict[str, Any],
) -> None:
    scale = run["about"]["baseline_flops"]
    axes = drawn(draw_curves(nodes_of(run), baseline_flops=scale)).axes[0]
    marks = [line.get_xydata() for line in axes.lines if line.get_marker() == "D"]
    assert len(marks) == 3 and all(len(mark) == 1 for mark in marks)
    narrow = sum(level["flops"] for level in run["levels"] if level["level"])
    found = max(marks, key=lambda mark: mark[0][0])[0]
    assert found[0] == pytest.approx(narrow / scale)
    assert found[1] == 100 * named(run, "coupling target")["metrics"]["top1"]


def test_rates_go_from_a_leaf_to_the_target(run: dict[str, Any]) -> None:
    assert [node["name"] for node in line_to_target(nodes_of(run))] == ["2.0", "1.0", "target"]
    axes = drawn(draw_rates(nodes_of(run))).axes[0]
    curves = [line for line in axes.lines if line.get_label()[0] != "_"]
    assert [round(line.get_xdata()[-1]) for line in curves] == [1, 3, 7]
    restarts = [line.get_xdata()[0] for line in axes.lines if line.get_label()[0] == "_"]
    assert restarts == [1, 3]


def test_the_budget_is_stacked_by_level(run: dict[str, Any]) -> None:
    scale = run["about"]["baseline_flops"]
    halfway = [{**level, "flops": level["flops"] / 2} for level in run["levels"]]
    bars = drawn(draw_budget(halfway, baseline_flops=scale)).axes[0].patches
    ends = sorted({round(bar.get_y()): bar.get_x() + bar.get_width() for bar in bars}.items())
    planned, spent = run["about"]["training_flops"], run["result"]["training_flops"] / 2
    assert [end for _, end in ends] == pytest.approx([spent / scale, planned / scale, 1.0])
    assert len(bars) == 7  # three levels planned and spent, and standard training


def test_blocks_are_seen_as_two_by_two() -> None:
    whole = {"names": ["a", "b"], "sizes": [[[3.0, 4.0, 0.0, 3.0], [1.0, 1.0, 1.0, 1.0]]]}
    ratios = block_ratios({"blocks": whole})
    assert ratios is not None and ratios.tolist() == [[pytest.approx((16 / 18) ** 0.5), 1.0]]
    # of 4 x 4 blocks, what lies within a half is the half's own
    apart, own = 2.0, 1.0
    rows = [[own if (i < 2) == (j < 2) else apart for j in range(4)] for i in range(4)]
    four = {"names": ["a"], "sizes": [[np.ravel(rows).tolist()]]}
    found = block_ratios({"blocks": four})
    assert found is not None and found.tolist() == [[2.0]]
    assert block_ratios({"blocks": {"names": ["a"], "sizes": [[[1.0]]]}}) is None
    assert block_ratios({"blocks": None}) is None


def test_halves_are_apart_right_after_a_coupling_and_grow_together(run: dict[str, Any]) -> None:
    ratios, standard = (block_ratios(named(run, name)) for name in ("target", "standard"))
    assert ratios is not None and standard is not None
    assert np.all(ratios[0] == 0) and np.all(ratios[-1] > 0)
    assert standard[0].mean() == pytest.approx(1.0, abs=0.2)


def test_where_there_is_nothing_yet_nothing_is_drawn(run: dict[str, Any]) -> None:
    bare = [{**n, "history": {}, "steps": {}, "blocks": None} for n in nodes_of(run)]
    assert draw_curves(bare, baseline_flops=1.0) is None
    assert draw_rates(bare) is draw_rates([]) is None
    assert draw_budget([], baseline_flops=1.0) is None
    assert draw_blocks(bare[0]) is None


def shown_texts(figure: Any) -> list[Any]:
    """All texts but the labels of ticks that lie outside their axes: those are not drawn."""
    hidden = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        for place, label in zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True):
            if not low <= place <= high:
                hidden.add(label)
    found = figure.findobj(Text)
    return [t for t in found if t.get_text() and t.get_visible() and t not in hidden]


@pytest.mark.parametrize("kind", ["small", "long"])
def test_no_text_lies_on_another(kind: str, run: dict[str, Any]) -> None:
    for figure in draw_all(run if kind == "small" else long_run()).values():
        figure.draw_without_rendering()  # lays it out
        boxes = {text: text.get_window_extent() for text in shown_texts(figure)}
        assert len(boxes) > 8
        for (one, a), (other, b) in combinations(boxes.items(), 2):
            assert not a.overlaps(b), (one.get_text(), other.get_text())
            assert figure.bbox.contains(a.x0, a.y0) and figure.bbox.contains(a.x1, a.y1)


@pytest.mark.parametrize(
    "budgets", [(0.4, 0.6, 0.8, 1.0), (0.5, 0.6, 1.0), (0.4, 0.5, 0.6, 0.7, 0.8, 1.0)]
)
def test_epochs_below_curves_do_not_run_into_each_other(
    budgets: tuple[float, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_args, **_more: drawn.append(figure))
    names = ["standard", *(f"rbdc:{n}:carry" for n in (1, 2, 3)), "net2net", "gradmax", "firefly"]
    lines = [
        {
            "protocol": name, "budget": budget, "flops": budget, "score": 0.5 + budget / 9,
            "score_interval": 0.01, "seconds": 60.0, "seeds": 3,
            "epochs": {str(level): [0.1234 * 2**level] for level in range(1 + number % 4)},
        }
        for number, name in enumerate(names)
        for budget in budgets
    ]  # fmt: skip
    summary = {"model": {"name": "deit_tiny_patch16_224"}, "metric": "top1", "lines": lines}
    save_comparison_plots(summary, tmp_path, ends=("png",))
    figure = drawn[0]
    figure.draw_without_rendering()  # lays it out
    boxes = {text: text.get_window_extent() for text in figure.axes[1].texts}
    assert len(boxes) == len(lines)
    for (one, a), (other, b) in combinations(boxes.items(), 2):
        assert not a.overlaps(b), (one.get_text(), other.get_text())
