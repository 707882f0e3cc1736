"""Print a plan: the table of `rbdc plan`, and the budget by level as a picture."""

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rbdc.models import scaled_widths
from rbdc.plan import Hours, LevelSpeed, Plan, Stage
from rbdc.plan.growth import depth_of, size_of
from rbdc.plan.speeds import CACHED
from rbdc.report.figures import new_figure, save_figure
from rbdc.report.units import counted, readable_flops, scaled

LEVEL_COLOURS = ("#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#F0E442", "#0072B2", "#D55E00")
"""Okabe and Ito's colours, which the colour-blind can tell apart; the target's first."""


def plan_table(plan: Plan, hours: Hours | None = None, *, relative: bool = True) -> RenderableType:
    """Return the tree, target first, with the cost of each level; with speeds, also in hours.

    Costs are also shown relative to standard training, unless nobody has named it.
    """
    title = f"{plan.model}: {_steps(plan)}"
    if plan.steps:
        title += f", ratio {plan.ratio:g}, schedule {plan.schedule}"
    table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False)
    table.add_column("models", no_wrap=True)
    table.add_column("size", min_width=14)
    tokens = ("tokens/\nparameter",) if plan.sequence_length else ()
    for column in ("epochs\neach", *tokens, "forward\nFLOPs", "training\nFLOPs", "share"):
        table.add_column(column, justify="right", no_wrap=True)
    for stage in reversed(plan.stages):
        table.add_row(
            _models(stage),
            _size(stage, plan),
            _epochs(stage.epochs),
            *([f"{plan.tokens_per_parameter(stage):.3g}"] if tokens else []),
            scaled(stage.forward_flops),
            scaled(stage.training_flops),
            f"{stage.share:.1%}",
        )
    table.add_section()
    table.add_row(
        "everything",
        "",
        "",
        *("" for _ in tokens),
        "",
        scaled(plan.training_flops),
        "100.0%",
        style="bold",
    )
    in_hours = [Text(), hours_table(hours, relative=relative)] if hours else []
    return Group(table, *(Text(line) for line in _notes(plan, relative)), *in_hours)


def hours_table(hours: Hours, *, relative: bool = True) -> RenderableType:
    """Return the hours of each level, target first, beside standard training's."""
    plan = hours.plan
    title = f"{_number(hours.total)} hours on one device"
    if relative:
        title += f", {hours.ratio:.3f} of standard training's {_number(hours.standard)}"
    table = Table(box=SIMPLE, pad_edge=False)  # its title could be wider than the table
    table.add_column("models", no_wrap=True)
    measured = hours.speeds.peak_flops_per_second is not None
    columns = ["images/s", *(["of\npeak", "peak\nmemory"] if measured else []), "passes",
               "passes\ndecoded", "hours", *(["money"] if hours.price else [])]  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for stage in reversed(plan.stages):
        speed, part = hours.speed(stage), hours.peak_share(stage)
        memory, alone = speed.memory_bytes, stage.models == 1 or plan.batches == "shared"
        cells = {
            "images/s": _number(speed.images_per_second),
            "of\npeak": "" if part is None else f"{part:.0%}",
            "peak\nmemory": "" if memory is None else f"{scaled(memory)}B",
            "passes": f"{stage.models * stage.epochs:.4g}",
            "passes\ndecoded": f"{stage.epochs * (1 if alone else stage.models):.4g}",
            **_costs(hours, hours.hours(stage), mark="*" if hours.loader_bound(stage) else ""),
        }
        table.add_row(_models(stage), *(cells[column] for column in columns))
    table.add_section()
    baseline = _epochs(plan.baseline_epochs)
    sums = [("everything", f"{plan.data_passes:.4g}", f"{plan.decoded_passes:.4g}", hours.total)]
    if relative:
        sums.append(("standard training", baseline, baseline, hours.standard))
    for name, passes, decoded, spent in sums:
        cells = {"passes": passes, "passes\ndecoded": decoded, **_costs(hours, spent)}
        style = "bold" if name == "everything" else ""
        table.add_row(name, *(cells.get(column, "") for column in columns), style=style)
    title_line = Text(title, style="italic")
    return Group(title_line, table, *(Text(line) for line in _hours_notes(hours)))


def steps_table(candidates: Sequence[Hours], chosen: int) -> RenderableType:
    """Return the hours of each number of steps at the same FLOPs, and which one is taken."""
    table = Table(title="the same FLOPs by number of steps", title_justify="left", box=SIMPLE)
    for column in ("steps", "normalized\nFLOPs", "epochs of\nthe target", "passes\ndecoded",
                   "hours", "of\nstandard"):  # fmt: skip
        table.add_column(column, justify="right")
    for hours in candidates:
        plan = hours.plan
        table.add_row(
            str(plan.steps),
            f"{plan.normalized_flops:.3f}",
            _epochs(plan.target.epochs),
            f"{plan.decoded_passes:.4g}",
            _number(hours.total),
            f"{hours.ratio:.3f}",
            style="bold" if plan.steps == chosen else "",
        )
    lines = [f"{counted(chosen, 'step')} take{'s' if chosen == 1 else ''} the fewest hours"]
    if not chosen and len(candidates) > 1:
        lines += [
            "warning: 0 steps is standard training. Narrow models reach fewer FLOP/s here, so",
            "  a tree takes longer for the same FLOPs, and may be more accurate (--steps N)",
        ]
    return Group(table, *map(Text, lines), Text())


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


def _size(stage: Stage, plan: Plan) -> str:
    """Return the scaled arguments of a stage's model: 'embed_dim 192, num_heads 3'."""
    grown = {axis for each in plan.stages for axis in each.grown}
    scaled = [
        f"{key} {f'{value[0]}-{value[-1]}' if isinstance(value, tuple) else value}"
        for key, value in scaled_widths(stage.model).items()
        if isinstance(value, int) or all(isinstance(n, int) for n in value)
    ] or [f"width {stage.model.width:g}"]
    if "depth" in grown:
        scaled.append(f"{depth_of(stage.model)} blocks")
    if "resolution" in grown:
        scaled.append(size_of(stage.model))
    return ", ".join(scaled)


def _epochs(epochs: float) -> str:
    return f"{epochs:.4g}"


def _notes(plan: Plan, relative: bool) -> list[str]:
    saved = 1 - plan.normalized_flops
    uncounted = ", ".join(name.removeprefix("aten::") for name in plan.uncounted) or "nothing"
    decoded = ""
    if plan.decoded_passes != plan.data_passes:
        decoded = f"; {plan.decoded_passes:.4g} decoded: siblings share a pass"
    cost = (
        f"normalized FLOPs {plan.normalized_flops:.3f}: {abs(saved):.1%} "
        f"{'less' if saved >= 0 else 'more'} than standard training for "
        f"{_epochs(plan.baseline_epochs)} epochs ({readable_flops(plan.baseline_flops)})"
    )
    standard = f" (standard: {_epochs(plan.baseline_epochs)})" if relative else ""
    return [
        *([cost] if relative else []),
        f"{plan.data_passes:.4g} passes over {_items(plan)}{standard}{decoded}",
        f"counter {plan.counter}; not counted: {uncounted}",
        *(f"warning: {warning}" for warning in plan.warnings),
    ]


def _items(plan: Plan) -> str:
    """Return what a pass over the data has: images, or sequences of tokens."""
    if plan.sequence_length is None:
        return f"{plan.images:,} images"
    tokens = scaled(plan.images * plan.sequence_length)
    return f"{plan.images:,} sequences of {plan.sequence_length} tokens ({tokens})"


def _costs(hours: Hours, spent: float, mark: str = "") -> dict[str, str]:
    money = hours.money(spent)
    return {"hours": _number(spent) + mark, "money": "" if money is None else f"{money:,.2f}"}


def _hours_notes(hours: Hours) -> list[str]:
    speeds = hours.speeds
    levels = speeds.levels[: len(hours.plan.stages)]
    lines = [f"speeds of {speeds.device}:", *(f"  {_source(level)}" for level in levels)]
    if speeds.peak_flops_per_second is not None:
        batches = sorted({level.batch_size for level in levels if level.batch_size})
        lines.append(
            f"measured on noise, {' or '.join(map(str, batches))} images per step; peak "
            f"{readable_flops(speeds.peak_flops_per_second)}/s, a matrix product in {speeds.dtype}"
        )
    if any(level.detail == CACHED for level in levels):
        lines.append(f"{CACHED}: on this device; --measure-again measures anew")
    if speeds.loader is None:
        return [*lines, "the loader is assumed to keep up (--loader N)"]
    bound = [stage for stage in reversed(hours.plan.stages) if hours.loader_bound(stage)]
    limited = f"; * it limits {', '.join(f'width {stage.width:g}' for stage in bound)}"
    return [*lines, f"loader {_number(speeds.loader)} images/s{limited if bound else ''}"]


def _source(level: LevelSpeed) -> str:
    """Return where a level's speed comes from: 'width 0.5: table, deit_small_patch16_224'."""
    known = level.source if level.detail != CACHED else ""
    return f"width {level.model.width:g}: {', '.join(filter(None, (known, level.detail)))}"


def _models(stage: Stage) -> str:
    indent = "  " * stage.level + ("└ " if stage.level else "")  # as a tree
    return f"{indent}{stage.models} × width {stage.width:g}"


def _number(value: float) -> str:
    """Return three digits, or all of a large number."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
