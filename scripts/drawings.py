"""Make the drawings of docs/method.md.

    python scripts/drawings.py             # into docs/drawings
    python scripts/drawings.py FOLDER

What they show is computed by the package: epochs by its plan, learning rates by the schedules of
the tree's own trainings, coupled matrices by its rules.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from torch import Tensor

from rbdc.coupling import Axes, couple_tensor
from rbdc.experiments.reproduce import imagenet_outline
from rbdc.growth import Setting
from rbdc.growth.protocol import TransitionName
from rbdc.growth.rbdc import Rbdc
from rbdc.jobs.train import TrainJob
from rbdc.plan import make_plan
from rbdc.settings import read_recipe, split_settings
from rbdc.training.optimizer import make_schedule

FOLDER = Path(__file__).parents[1] / "docs" / "drawings"
WIDTH = 7.6  # inches: as wide as a page's text, so that letters keep their size
BLUE, ORANGE, GREEN, PINK = "#56B4E9", "#E69F00", "#009E73", "#CC79A7"  # Okabe and Ito's
INK, GREY = "#222222", "#5F5F5F"
STYLE: Any = {
    "svg.hashsalt": "rbdc",  # the same drawing is the same file
    "svg.fonttype": "path",
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "xtick.color": GREY,
    "ytick.color": GREY,
}
Palette = Mapping[float, tuple[Any, str]]  # a value in a tensor: its colour, its letter
PLAN = make_plan("deit_base_patch16_224", steps=2, ratio=2, budget=0.7)


def tree(figure: Figure) -> None:
    """Four leaves become two models of twice their width, and those the target."""
    axes = _canvas(figure)
    mixed = _mixed(BLUE, ORANGE), _mixed(GREEN, PINK)
    columns = ((1.15, 0.42, 2, 0.98), (3.35, 0.84, 1, 1.96), (6.1, 1.68, 0, 0.0))
    middle = 2.25
    leaves = [(colour,) for colour in (BLUE, ORANGE, GREEN, PINK)]
    blocks: Any = (leaves, [(BLUE, ORANGE), (GREEN, PINK)], [mixed])
    for (x, side, level, gap), models in zip(columns, blocks, strict=True):
        stage = PLAN.stages[2 - level]
        for index, colours in enumerate(models):
            y = middle + gap * ((len(models) - 1) / 2 - index)
            _square(axes, x, y, side, colours)
            if level == 2:
                axes.text(x - 0.36, y, f"seed {index + 1}", ha="right", va="center", color=GREY)
            else:
                below, below_side, _, below_gap = columns[2 - level - 1]
                for side_of in (0.5, -0.5):
                    start = (below + below_side / 2 + 0.06, y + side_of * below_gap)
                    _arrow(axes, start, (x - side / 2 - 0.07, y + side_of * side * 0.5))
        count = {0: "the target", 1: "2 models", 2: "4 leaves"}[level]
        width = {0: "width 1", 1: "width 1/2", 2: "width 1/4"}[level]
        each = " each" if level else ""
        axes.text(x, 4.28, count, ha="center", weight="bold")
        axes.text(x, 0.02, f"{width}\n{stage.epochs:g} epochs{each}", ha="center", linespacing=1.4)
    for x in (2.2, 4.5):
        axes.text(x, 4.28, "couple", ha="center", color=GREY, style="italic")


def rules(figure: Figure) -> None:
    """Which axes are scaled decides how two tensors become one."""
    axes = _canvas(figure)
    palette: Palette = {
        3: (BLUE, ""), 10: (ORANGE, ""), 0: ("white", "0"), 1.5: (_mixed(BLUE, "white"), "½"),
        5: (_mixed(ORANGE, "white"), "½"), 6.5: (_mixed(BLUE, ORANGE), ""),
    }  # fmt: skip
    layer: Any = {"input_axis": 1}
    cases = (
        ("both axes scaled", "block-diagonal", (2, 2), Axes(scaled=(0, 1), **layer),
         "attention, MLP,\nconvolutions"),
        ("one axis scaled", "side by side", (2, 1), Axes(scaled=(0,)),
         "norms, biases, stem,\ntokens, positions"),
        ("only the input scaled", "side by side, halved", (3, 2), Axes(scaled=(1,), **layer),
         "weight of the head"),
        ("no axis scaled", "mean", (3, 1), Axes(scaled=()), "bias of the head"),
    )  # fmt: skip
    for number, (wide, rule, shape, how, where) in enumerate(cases):
        x = WIDTH * (number + 0.5) / len(cases)
        first, second = torch.full(shape, 3.0), torch.full(shape, 10.0)
        axes.text(x, 3.52, wide, ha="center", weight="bold")
        for side, parent in ((-1, first), (1, second)):
            _tensor(axes, parent, x + side * 0.42, 2.92, palette)
        _arrow(axes, (x, 2.38), (x, 2.0))
        _tensor(axes, couple_tensor(first, second, how), x, 1.36, palette)
        axes.text(x, 0.46, rule, ha="center", weight="bold", color=GREY)
        axes.text(x, 0.3, where, ha="center", va="top", color=GREY, linespacing=1.3)


def packed(figure: Figure) -> None:
    """q, k and v in one matrix: each is coupled by itself, and packed again."""
    axes = _canvas(figure)
    letters = "QKV"
    tints = (0.0, 0.3, 0.55)
    palette: dict[float, tuple[Any, str]] = {0: ("white", "0")}
    parents = []
    for parent, colour in enumerate((BLUE, ORANGE)):
        codes = [1 + 3 * parent + part for part in range(3)]
        for code, letter, tint in zip(codes, letters, tints, strict=True):
            palette[code] = (_mixed(colour, "white", tint), f"{letter}{'₁₂'[parent]}")
        parents.append(torch.tensor(codes).float().repeat_interleave(2)[:, None].expand(6, 2))
    wide = couple_tensor(
        parents[0], parents[1], Axes(scaled=(0, 1), input_axis=1, packed=(2, 2, 2))
    )
    block, middle, x = 0.48, 1.5, 4.45
    size: Any = {"cell": block, "fontsize": 9.5}
    for parent, name in enumerate(("first parent", "second parent")):
        at = 0.82 + 1.4 * parent
        _tensor(axes, parents[parent][::2, ::2], at, middle, palette, **size)
        axes.text(at, middle + 1.5 * block + 0.12, name, ha="center", color=GREY)
    _arrow(axes, (3.0, middle), (3.6, middle))
    axes.text(3.28, middle + 0.1, "couple", ha="center", color=GREY, style="italic")
    _tensor(axes, wide[::2, ::2], x, middle, palette, **size)
    axes.text(x, middle + 3 * block + 0.12, "wide model", ha="center", color=GREY)
    for part, name in enumerate(("queries", "keys", "values")):
        words = f"{name}: the first parent's heads,\nthen the second's"
        at = middle + 2 * block * (1 - part)
        axes.text(x + block + 0.18, at, words, va="center", color=GREY, linespacing=1.35)


def learning_rate(figure: Figure) -> None:
    """The rate on the way from a leaf to the target, with either transition."""
    figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.12)
    above, below = figure.subplots(2, 1, sharex=True)
    _, recipe = split_settings(read_recipe("deit"), {"model": "deit_base_patch16_224"})
    words: dict[TransitionName, str] = {
        "restart": "restart (the paper's): every model anneals, every model warms up",
        "carry": "carry (ours): only the target anneals, and the optimizer's moments are coupled",
    }
    for axes, (name, title) in zip((above, below), words.items(), strict=True):
        setting = Setting(
            model=PLAN.model,
            recipe=recipe,
            data=imagenet_outline(),
            baseline_epochs=PLAN.baseline_epochs,
            transition=(name,),
        )
        grown = Rbdc().tree(setting, PLAN, seed=0)
        jobs = {node.name: node.job for node in grown.nodes}
        start = 0.0
        for place, colour in (("2.0", BLUE), ("1.0", ORANGE), ("target", GREEN)):
            job = jobs[place]
            assert isinstance(job, TrainJob)
            rates = _rates(job)
            epochs = [start + index * job.task.epochs / len(rates) for index in range(len(rates))]
            axes.plot(epochs, [1000 * rate for rate in rates], color=colour, linewidth=2)
            label = {"2.0": "a leaf", "1.0": "width 1/2", "target": "the target"}[place]
            axes.text(start + job.task.epochs / 2, 0.08, label, ha="center", color=GREY)
            start += job.task.epochs
            if place != "target":
                axes.axvline(start, color=GREY, linewidth=1, linestyle=":")
        axes.set_title(title, loc="left", fontsize=9.5)
        axes.set_ylim(0, 1.12)
        axes.set_xlim(0, start)
        axes.set_ylabel("learning rate × 1000")
        axes.spines[["top", "right"]].set_visible(False)
    below.set_xlabel("epochs, on the way from one leaf to the target; dotted: a coupling")


DRAWINGS = {
    "tree": (tree, 4.75),
    "rules": (rules, 4.1),
    "packed": (packed, 3.55),
    "learning-rate": (learning_rate, 4.4),
}


def draw(folder: Path) -> list[Path]:
    """Every drawing as an SVG file, on white: to be read on a dark page, too."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with mpl.rc_context(STYLE):
        for name, (drawing, height) in DRAWINGS.items():
            figure = Figure(figsize=(WIDTH, height))
            drawing(figure)
            paths.append(folder / f"{name}.svg")
            figure.savefig(paths[-1], facecolor="white", metadata={"Date": None})
    return paths


def _canvas(figure: Figure) -> Any:
    """Axes over the whole figure, in inches."""
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, figure.get_figwidth())
    axes.set_ylim(-0.2, figure.get_figheight() - 0.2)
    return axes


def _square(axes: Any, x: float, y: float, side: float, colours: tuple[Any, ...]) -> None:
    """A weight matrix as it is initialised: random, or its parents with zeros between them."""
    left, top, block = x - side / 2, y + side / 2, side / len(colours)
    axes.add_patch(Rectangle((left, y - side / 2), side, side, facecolor="white"))
    for index, colour in enumerate(colours):
        corner = (left + index * block, top - (index + 1) * block)
        axes.add_patch(Rectangle(corner, block, block, facecolor=colour))
        if len(colours) > 1:
            zero = (left + (1.5 - index) * block, top - (index + 0.5) * block)
            axes.text(*zero, "0", ha="center", va="center", color=GREY)
    axes.add_patch(Rectangle((left, y - side / 2), side, side, fill=False, edgecolor=INK))


def _tensor(
    axes: Any,
    values: Tensor,
    x: float,
    y: float,
    palette: Palette,
    *,
    cell: float = 0.27,
    fontsize: float = 8,
) -> None:
    """A tensor centred at (x, y), a cell for each number."""
    rows, columns = values.shape
    left, top = x - columns * cell / 2, y + rows * cell / 2
    for row in range(rows):
        for column in range(columns):
            colour, letter = palette[float(values[row, column])]
            corner = (left + column * cell, top - (row + 1) * cell)
            square = Rectangle(corner, cell, cell, facecolor=colour)
            square.set(edgecolor="#B5B5B5", linewidth=0.6)
            axes.add_patch(square)
            centre = (corner[0] + cell / 2, corner[1] + cell / 2)
            axes.text(*centre, letter, ha="center", va="center", fontsize=fontsize)
    frame = Rectangle((left, top - rows * cell), columns * cell, rows * cell)
    frame.set(fill=False, edgecolor=INK)
    axes.add_patch(frame)


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    style: Any = {"arrowstyle": "-|>", "mutation_scale": 11, "color": GREY}
    axes.add_patch(FancyArrowPatch(start, end, shrinkA=0, shrinkB=0, **style))


def _mixed(first: Any, second: Any, share: float = 0.5) -> tuple[float, ...]:
    """A colour between two."""
    pairs = zip(to_rgb(first), to_rgb(second), strict=True)
    return tuple((1 - share) * a + share * b for a, b in pairs)


def _rates(job: TrainJob, steps_per_epoch: int = 10) -> list[float]:
    """The learning rate of every update, as the training itself would set it."""
    task = job.task
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=task.recipe.learning_rate)
    schedule = make_schedule(optimizer, task, steps_per_epoch)
    rates = []
    for update in range(task.steps(steps_per_epoch)):
        schedule.step(update)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


if __name__ == "__main__":
    for path in draw(Path(sys.argv[1]) if sys.argv[1:] else FOLDER):
        print(path)
