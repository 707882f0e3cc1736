"""`rbdc compare`: protocols at equal FLOPs."""

import json
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rbdc.commands.common import add_run, add_training, chosen_settings, joined
from rbdc.commands.console import make_console, say
from rbdc.commands.options import Parser, comma_separated, comma_separated_numbers
from rbdc.settings import SPEND

if TYPE_CHECKING:
    from rbdc.experiments.compare import Comparison
    from rbdc.runs.run import Where


def compare_parser() -> Parser:
    """Return the parser of `rbdc compare`."""
    parser = Parser(
        description="Compare protocols at equal FLOPs, with every parent paid for. The same "
        "command resumes a comparison; protocols, budgets and seeds can be added to it.",
        epilog="rbdc compare --protocols standard,rbdc:2,net2net --budgets 0.5,1.0 --seeds 3",
    )
    add = parser.add
    add("--protocols", nargs="+", metavar="P", default=["standard,rbdc:1,rbdc:2"],
        help="names, with options after colons (rbdc:2:carry); `list` prints them all")  # fmt: skip
    add("--budgets", nargs="+", metavar="B", default=["0.5,1.0"],
        help="FLOPs of all models, relative to standard training")  # fmt: skip
    add("--seeds", type=int, default=3, help="number of seeds per protocol and budget")
    add("--standard-budgets", nargs="+", metavar="B", default=[], brief=False,
        help="additional budgets for standard training only, as a reference curve")  # fmt: skip
    add("--tune", nargs="+", metavar="LR", default=[], brief=False,
        help="learning rates to try for each protocol (default: no tuning)")  # fmt: skip
    add("--tune-decay", nargs="+", metavar="X", default=[], brief=False,
        help="starts of the learning rate's decay to try with each rate, as shares of the "
        "training (default: the recipe's decay-start)")  # fmt: skip
    add("--tune-split", type=float, default=0.1, brief=False,
        help="share of the training images that tuning holds out, and tests on")  # fmt: skip
    add("--tune-budget", type=float, brief=False,
        help="budget to tune at (default: the largest of --budgets)")  # fmt: skip
    add("--clock", type=Literal["elapsed", "cpu"], default="elapsed", brief=False,
        help="measure trainings by elapsed time, or by the CPU time of their processes: on a CPU "
        "that does other things, too")  # fmt: skip
    add("--json", action="store_true", help="print the summary as JSON")
    # A protocol says its steps and the budgets how much is spent, exactly: nothing is rounded.
    decided = {*SPEND, "steps", "schedule", "costs", "rounding", "seed", "with_baseline",
               "baseline_budget"}  # fmt: skip
    add_training(parser, without=decided)
    add_run(parser, "compare-RECIPE")
    return parser


def compare_command(options: Namespace) -> None:
    """Run a comparison, or continue it."""
    if options.protocols == ["list"]:
        _list_protocols()
        return
    from rbdc.experiments.compare import ComparisonSpec, prepare_comparison

    name, request, recipe = chosen_settings(options)
    spec = ComparisonSpec(
        protocols=comma_separated(options.protocols),
        budgets=comma_separated_numbers("--budgets", options.budgets),
        standard_budgets=comma_separated_numbers("--standard-budgets", options.standard_budgets),
        seeds=options.seeds,
        tune=comma_separated_numbers("--tune", options.tune),
        tune_decay=comma_separated_numbers("--tune-decay", options.tune_decay),
        tune_split=options.tune_split,
        tune_budget=options.tune_budget,
        clock=options.clock,
    )
    output = options.output or Path("runs") / f"compare-{Path(name).stem}"
    with joined(options) as where:
        comparison = prepare_comparison(request, recipe, spec, where)
        show_comparison(comparison, output, options, where)


def _list_protocols() -> None:
    from rbdc.growth import protocols

    for name, protocol in protocols().items():
        words = f"\n{'':16} after a colon: {protocol.words}" if protocol.words else ""
        say(f"{name:16} {protocol.summary}{words}")


def show_comparison(
    comparison: "Comparison", output: Path, options: Namespace, where: "Where"
) -> None:
    """Print what a comparison costs; unless that is all, run it and print its result."""
    from rbdc.experiments.compare import run_comparison
    from rbdc.experiments.results import flops_of
    from rbdc.report.compare import cost_lines, plan_lines
    from rbdc.report.live import LiveRun
    from rbdc.runs.run import check, chosen_lines

    setting, planned, run = comparison.setting, comparison.planned, comparison.run()
    if not options.dry_run:
        check(run, output, where)
    console = make_console(quiet=not where.world.is_main or options.json)
    console.print(plan_lines(comparison.planned_rows()))
    lines = [
        f"{setting.model} on {setting.data.name}, {setting.baseline_epochs:g} epochs of standard "
        f"training; seeds {comparison.spec.seeds}",
        *cost_lines(len(planned), len(run.nodes), *flops_of(planned), setting.baseline_flops),
        *chosen_lines(run, where),
        f"output {output}\n",
    ]
    console.print("\n".join(lines), highlight=False)
    if options.dry_run:
        return
    try:
        with LiveRun(run.nodes, console) as live:
            run_comparison(comparison, output, where, live, live.expect)
    finally:  # of a comparison that was stopped, what there is
        if where.world.is_main:
            _print_result(output, options, console)


def _print_result(output: Path, options: Namespace, console: Any) -> None:
    from rbdc.jobs.layout import RESULT
    from rbdc.jobs.records import read_run_result
    from rbdc.report.compare import comparison_table, save_comparison_plots
    from rbdc.report.page import REPORT, write_report

    summary = read_run_result(output / RESULT)
    if summary is None:
        return
    if options.json:
        say(json.dumps(summary, indent=2))
    console.print(comparison_table(summary))
    for path in save_comparison_plots(summary, output):
        console.print(f"picture {path}", highlight=False)
    console.print(f"page {write_report([output], output / REPORT)}", highlight=False)
