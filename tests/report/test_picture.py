"""The picture of how a model couples."""

from pathlib import Path
from typing import Any

import pytest

from rbdc.cli import main
from rbdc.coupling import Axes
from rbdc.report.structure import draw_structure

SHAPES = {
    "qkv.weight": (24, 8), "norm.weight": (8,), "head.weight": (5, 8), "head.bias": (5,),
    "conv.weight": (8, 8, 3, 3),
}  # fmt: skip
LAYOUT = {
    "qkv.weight": Axes(scaled=(0, 1), input_axis=1, packed=(4, 4, 4)),
    "norm.weight": Axes(scaled=(0,)),
    "head.weight": Axes(scaled=(1,), input_axis=1),
    "head.bias": Axes(scaled=()),
    "conv.weight": Axes(scaled=(0, 1), input_axis=1),
}
COVERED = {"qkv": 0.25, "norm": 0.5, "head": 0.5, "bias": 0, "conv": 0.25}
"""Part of each tensor that has the entries of one parent."""


def test_each_parent_covers_as_much_as_its_entries_are() -> None:
    groups = {rule: [name] for rule, name in zip(COVERED, SHAPES, strict=True)}
    figure = draw_structure(groups, LAYOUT, SHAPES)
    for axes, name in zip(figure.axes, SHAPES, strict=True):
        patches: Any = axes.patches
        parts = list(patches[1:-1])  # between what lies below, and the frame
        colours = sorted({p.get_facecolor()[:3] for p in parts})
        assert len(colours) == (2 if LAYOUT[name].scaled else 0)
        for colour in colours:
            own = [p for p in parts if p.get_facecolor()[:3] == colour]
            area = sum(p.get_width() * p.get_height() for p in own)
            assert area == pytest.approx(COVERED[axes.get_title()])
            blocks = len(LAYOUT[name].packed) or 1
            assert len(own) == blocks
        assert patches[0].get_fill() == (not LAYOUT[name].scaled)
        assert {p.get_alpha() for p in parts} <= ({0.5} if name == "head.weight" else {1.0})


def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("picture.docx", "absent/picture.png"):
        assert main(["explain", "no_such_model", "--plot", str(tmp_path / name)]) == 2
        assert name.split("/")[0] in capsys.readouterr().err
