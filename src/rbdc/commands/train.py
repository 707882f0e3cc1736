"""`rbdc train`: leaves, couplings, target; going on where a run was stopped."""

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from rbdc.commands.common import add_run, add_training, chosen_settings, joined
from rbdc.commands.console import make_console, say, show
from rbdc.commands.options import Parser
from rbdc.commands.speeds import add_speeds, check_speed_options
from rbdc.settings import names_baseline

if TYPE_CHECKING:
    from rbdc.experiments.train import Training


def train_parser() -> Parser:
    """Return the parser of `rbdc train`."""
    parser = Parser(
        description="Train a wide model by RBDC: train narrow models, couple them, train the "
        "target. The same command resumes a run that was stopped.",
        epilog="rbdc train --model deit_base_patch16_224 --data PATH --steps 2 --budget 0.7",
    )
    add_training(parser)
    add_speeds(parser, parser.add_argument_group("Speeds, for a budget in hours"))
    add_run(parser, "RECIPE")
    parser.add("--node", metavar="NAME", brief=False,
               help="train only this model of the tree, whose parents must be trained: for "
               "schedulers that start each training themselves")  # fmt: skip
    return parser


def train_command(options: Namespace) -> None:
    """Train the tree, or continue it."""
    from rbdc.experiments.speeds import speeds_of
    from rbdc.experiments.train import prepare
    from rbdc.report.live import LiveRun
    from rbdc.report.page import REPORT, write_report
    from rbdc.report.run import result_lines
    from rbdc.runs.run import check, chosen_lines, execute

    check_speed_options(options)
    name, request, recipe = chosen_settings(options)
    output = options.output or Path("runs") / Path(name).stem
    with joined(options) as where:
        speeds = speeds_of(
            where.machine,
            output=output,
            table=options.speeds,
            loader=options.loader,
            again=options.measure_again,
        )
        training = prepare(request, recipe, where, speeds, output)
        run = training.run()
        check(run, output, where)
        if where.world.is_main:
            _introduce(training, name, output, chosen_lines(run, where))
        if options.dry_run:
            return
        with LiveRun(run.nodes, make_console(quiet=not where.world.is_main)) as live:
            result = execute(run, output, where, live)
        if where.world.is_main and result:
            say("\n" + "\n".join(result_lines(result, output)))
            say(f"open       {write_report([output], output / REPORT)}")


def _introduce(training: "Training", name: str, output: Path, chosen: list[str]) -> None:
    from rbdc.report.plan import plan_table, steps_table

    recipe, data = training.setting.recipe, training.setting.data
    if training.by_steps:
        show(steps_table(training.by_steps, training.plan.steps))
    relative = names_baseline(training.request.to_json())
    show(plan_table(training.plan, training.hours, relative=relative))
    say(
        f"recipe {name}: {recipe.opt}, learning rate {recipe.learning_rate:.3g} at a batch of "
        f"{recipe.batch_size}, transition {', '.join(training.setting.transition)}\n"
        f"data {data.describe()}\n" + "".join(f"{line}\n" for line in chosen) + f"output {output}\n"
    )
    for image in data.skipped:
        say(f"skipped, cannot be decoded: {image}")
