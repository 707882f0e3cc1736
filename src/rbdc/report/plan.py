"""Print a plan: the table of `rbdc plan`, and the budget by level as a picture."""

from pathlib import Path

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rbdc.models import scaled_widths
from rbdc.plan import Plan, Stage
from rbdc.report.figures import new_figure, save_figure
from rbdc.report.units import counted, readable_flops, scaled

LEVEL_COLOURS = ("#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#F0E442", "#0072B2", "#D55E00")
"""Okabe and Ito's colours, which the colour-blind can tell apart; the target's first."""


def plan_table(plan: Plan) -> RenderableType:
    """Return the tree, target first, with the cost of each level."""
    title = f"{plan.model}: {_steps(plan)}"
    if plan.steps:
        title += f", ratio {plan.ratio:g}, schedule {plan.schedule}"
    table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False)
    table.add_column("models", no_wrap=True)
    table.add_column("size", min_width=14)
    for column in ("epochs\neach", "forward\nFLOPs", "training\nFLOPs", "share"):
        table.add_column(column, justify="right", no_wrap=True)
    for stage in reversed(plan.stages):
        indent = "  " * stage.level + ("└ " if stage.level else "")  # as a tree
        table.add_row(
            f"{indent}{stage.models} × width {stage.width:g}",
            _size(stage),
            _epochs(stage.epochs),
            scaled(stage.forward_flops),
            scaled(stage.training_flops),
            f"{stage.share:.1%}",
        )
    table.add_section()
    table.add_row("everything", "", "", "", scaled(plan.training_flops), "100.0%", style="bold")
    return Group(table, *(Text(line) for line in _notes(plan)))


def save_plan_plot(plan: Plan, path: Path) -> None:
    """Draw the budget by level as a stacked bar beside standard training, as in the paper."""
    figure, axes = new_figure(f"{plan.model}: training budget by level", (8, 3.2))
    axes.barh(1, 1, color="0.8", edgecolor="white")
    axes.text(0.5, 1, f"{_epochs(plan.baseline_epochs)} epochs", ha="center", va="center")
    left = 0.0
    for stage in plan.stages:
        part = stage.share * plan.normalized_flops
        colour = LEVEL_COLOURS[stage.level % len(LEVEL_COLOURS)]
        label = f"{stage.models} × width {stage.width:g}, {_epochs(stage.epochs)} epochs each"
        axes.barh(0, part, left=left, color=colour, edgecolor="white", label=label)
        if part > 0.05 * max(1, plan.normalized_flops):
            axes.text(left + part / 2, 0, f"{part:.2f}", ha="center", va="center")
        left += part
    axes.text(left + 0.01, 0, f"{left:.3g}", va="center", weight="bold")
    axes.set_yticks(
        [0, 1], [f"RBDC, {_steps(plan)}" if plan.steps else "this plan", "standard training"]
    )
    axes.set_xlim(0, max(1, left) * 1.1)
    axes.set_xlabel(f"normalized FLOPs (1 = {readable_flops(plan.baseline_flops)})")
    figure.legend(loc="outside lower center", frameon=False)
    save_figure(figure, path)


def _steps(plan: Plan) -> str:
    return counted(plan.steps, "recursive step") if plan.steps else "standard training"


def _size(stage: Stage) -> str:
    """Return the scaled arguments of a stage's model: 'embed_dim 192, num_heads 3'."""
    return ", ".join(
        f"{key} {f'{value[0]}-{value[-1]}' if isinstance(value, tuple) else value}"
        for key, value in scaled_widths(stage.model).items()
    )


def _epochs(epochs: float) -> str:
    return f"{epochs:.4g}"


def _notes(plan: Plan) -> list[str]:
    saved = 1 - plan.normalized_flops
    uncounted = ", ".join(name.removeprefix("aten::") for name in plan.uncounted) or "nothing"
    return [
        f"normalized FLOPs {plan.normalized_flops:.3f}: {abs(saved):.1%} "
        f"{'less' if saved >= 0 else 'more'} than standard training for "
        f"{_epochs(plan.baseline_epochs)} epochs ({readable_flops(plan.baseline_flops)})",
        f"{plan.data_passes:.4g} passes over {plan.images:,} images "
        f"(standard: {_epochs(plan.baseline_epochs)})",
        f"counter {plan.counter}; not counted: {uncounted}",
        *(f"warning: {warning}" for warning in plan.warnings),
    ]
