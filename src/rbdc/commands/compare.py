"""`rbdc compare`: protocols at equal FLOPs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import Namespace

from rbdc.commands.console import make_console
from rbdc.commands.where import joined
from rbdc.options import (
    Parser,
    add_settings,
    comma_separated,
    comma_separated_numbers,
    default_recipe,
    given_settings,
)
from rbdc.settings import SPEND, Cluster, Machine, Recipe, Request, read_recipe, split_settings

if TYPE_CHECKING:
    from rbdc.experiments.compare import Comparison
    from rbdc.runs.run import Where


def compare_parser() -> Parser:
    parser = Parser(
        description="Put protocols side by side at the same FLOPs, with all parents paid for. Give "
        "the same command again to go on; add protocols, budgets or seeds to it.",
        epilog="rbdc compare --protocols standard,rbdc:2,net2net --budgets 0.5,1.0 --seeds 3",
    )
    add = parser.add_argument
    add("--protocols", type=str, nargs="+", metavar="P", default=["standard,rbdc:1,rbdc:2"],
        help="names, with options after colons (rbdc:2:carry); `list` lists them")  # fmt: skip
    add("--budgets", type=str, nargs="+", metavar="B", default=["0.5,1.0"],
        help="FLOPs of everything, relative to standard training")  # fmt: skip
    add("--seeds", type=int, default=3, help="how many")
    add("--standard-budgets", type=str, nargs="+", metavar="B", default=[],
        help="more budgets for standard training alone: what the others are to reach")  # fmt: skip
    add("--tune", type=str, nargs="+", metavar="LR", default=[],
        help="learning rates to try for each protocol, the same for all")  # fmt: skip
    add("--tune-budget", type=float, help="by default the largest budget")
    add("--recipe", type=str, help="a shipped recipe or a YAML file; options override it")
    add("--output", type=Path, help="the comparison's folder; by default runs/compare-RECIPE")
    add("--jobs", type=int, help="trainings side by side; by default 1, on a CPU what is faster")
    add("--dry-run", action="store_true", help="check and print what it costs, train nothing")
    add("--json", action="store_true", help="print the summary as JSON")
    budgets = {*SPEND, "steps", "schedule", "costs", "rounding", "seed", "with_baseline"}
    add_settings(parser.add_argument_group("What to compare"), Request, without=budgets)
    add_settings(parser.add_argument_group("How to train (the recipe)"), Recipe)
    add_settings(parser.add_argument_group("On what"), Machine)
    add_settings(parser.add_argument_group("On a cluster"), Cluster)
    return parser


def compare_command(options: Namespace) -> None:
    """Run a comparison, or continue it."""
    if options.protocols == ["list"]:
        _list_protocols()
        return
    from rbdc.experiments.compare import ComparisonSpec, prepare_comparison

    given = given_settings(options, Request) | given_settings(options, Recipe)
    name = options.recipe or default_recipe(given)
    spec = ComparisonSpec(
        protocols=comma_separated(options.protocols),
        budgets=comma_separated_numbers("--budgets", options.budgets),
        standard_budgets=comma_separated_numbers("--standard-budgets", options.standard_budgets),
        seeds=options.seeds,
        tune=comma_separated_numbers("--tune", options.tune),
        tune_budget=options.tune_budget,
    )
    settings = split_settings(read_recipe(name), given)
    output = options.output or Path("runs") / f"compare-{Path(name).stem}"
    with joined(options) as where:
        show_comparison(prepare_comparison(*settings, spec, where.world), output, options, where)


def _list_protocols() -> None:
    from rbdc.growth import protocols

    for name, protocol in protocols().items():
        words = f"\n{'':16} after a colon: {protocol.words}" if protocol.words else ""
        print(f"{name:16} {protocol.summary}{words}")


def show_comparison(
    comparison: "Comparison", output: Path, options: Namespace, where: "Where"
) -> None:
    """Print what a comparison costs; unless that is all, run it and print its result."""
    from rbdc.experiments.compare import run_comparison
    from rbdc.experiments.results import flops_of
    from rbdc.report.compare import cost_lines, plan_lines
    from rbdc.report.live import LiveRun
    from rbdc.runs.run import check

    setting, run = comparison.setting, comparison.run()
    if not options.dry_run:
        check(run, output, where)
    console = make_console(quiet=not where.world.is_main or options.json)
    costs = cost_lines(
        len(comparison.planned),
        len(run.nodes),
        *flops_of(comparison.planned),
        setting.baseline_flops,
    )
    about = (
        f"{setting.model} on {setting.data.name}, {setting.baseline_epochs:g} epochs of standard "
        f"training; seeds {comparison.spec.seeds}"
    )
    console.print(plan_lines(comparison.planned_rows()))
    console.print("\n".join([about, *costs, f"output {output}\n"]), highlight=False)
    if options.dry_run:
        return
    try:
        with LiveRun(run.nodes, console) as live:
            run_comparison(comparison, output, where, live, live.expect)
    finally:  # of a comparison that was stopped, what there is
        if where.world.is_main:
            _print_result(output, options, console)


def _print_result(output: Path, options: Namespace, console: Any) -> None:
    from rbdc.disk import read_json
    from rbdc.jobs.layout import RESULT
    from rbdc.report.compare import comparison_table, save_comparison_plots
    from rbdc.report.page import REPORT, write_report

    summary = read_json(output / RESULT)
    if summary is None:
        return
    if options.json:
        print(json.dumps(summary, indent=2))
    console.print(comparison_table(summary))
    for path in save_comparison_plots(summary, output):
        console.print(f"picture {path}", highlight=False)
    console.print(f"page {write_report([output], output / REPORT)}", highlight=False)
