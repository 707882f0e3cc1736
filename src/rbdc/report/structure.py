"""Draw how a model couples: one tensor for each rule, with the entries of each parent."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rbdc.coupling import Axes
from rbdc.report.figures import COLOURS, new_figure

if TYPE_CHECKING:  # heavy, and only pictures need it
    from matplotlib.figure import Figure

_PARENTS, _BOTH = (COLOURS[6], COLOURS[5]), COLOURS[3]
_MOST_RULES = 8  # beside each other


def draw_structure(
    groups: Mapping[str, list[str]],
    layout: Mapping[str, Axes],
    shapes: Mapping[str, tuple[int, ...]],
) -> "Figure":
    """Draw the first tensor of each rule; `shapes` are those of the wide model.

    Blue entries are the first parent's, orange ones the second's, green ones the mean of both, pale
    ones are multiplied by a factor, and white ones are zero.
    """
    shown = list(groups.items())[:_MOST_RULES]
    figure, axes = new_figure("", (max(2.1 * len(shown), 4.2), 3), 1, len(shown), squeeze=False)
    for one, (rule, names) in zip(axes[0], shown, strict=True):
        name = max(names, key=lambda n: len(layout[n].packed) + len(layout[n].packed_second))
        _draw_tensor(one, layout[name], shapes[name])
        one.set_title(rule.replace(", ", ",\n"), fontsize="small", parse_math=False)
        size = " × ".join(map(str, shapes[name])) or "one number"
        more = f"\nand {len(names) - 1} more" if len(names) > 1 else ""
        one.set_xlabel(f"{_in_lines(name)}\n{size}{more}", fontsize="x-small", parse_math=False)
    return figure


def _draw_tensor(axes: Any, how: Axes, shape: tuple[int, ...]) -> None:
    """Draw a tensor as a rectangle: its first scaled axis downwards, another one to the right."""
    from matplotlib.patches import Rectangle

    across = [a for a in range(len(shape)) if a not in how.scaled[:1]]
    column = how.scaled[1] if len(how.scaled) > 1 else (across or [0])[0]
    only_input = len(how.scaled) == 1 and how.scaled[0] == how.input_axis
    rows = how.scaled[0] if how.scaled else 0
    axes.add_patch(Rectangle((0, 0), 1, 1, fill=not how.scaled, color=_BOTH))
    narrow = how.narrow_shape(shape)
    for branch, colour in enumerate(_PARENTS if how.scaled else ()):
        for _own, wide in how.blocks(narrow, branch):
            down = _part(wide[rows], shape[rows])
            right = _part(wide[column], shape[column]) if len(how.scaled) > 1 else (0.0, 1.0)
            (x, width), (y, height) = (down, right) if only_input else (right, down)
            alpha = 1.0 if how.factor == 1 else 0.5
            axes.add_patch(Rectangle((x, y), width, height, color=colour, alpha=alpha, lw=0))
    axes.add_patch(Rectangle((0, 0), 1, 1, fill=False, color="0.2"))
    axes.set(xlim=(-0.02, 1.02), ylim=(1.02, -0.02), aspect="equal", xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def _part(where: slice, size: int) -> tuple[float, float]:
    """Return where a part begins and how long it is, as fractions of an axis."""
    return where.start / size, (where.stop - where.start) / size


def _in_lines(name: str) -> str:
    """Break a long name after a dot."""
    lines = [""]
    for part in name.split("."):
        if len(lines[-1]) + len(part) > 20:
            lines.append("")
        lines[-1] += f"{part}."
    return "\n".join(lines)[:-1].lstrip("\n")
