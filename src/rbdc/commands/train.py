"""`rbdc train`: leaves, couplings, target; going on where a run was stopped."""

from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import Namespace

from rbdc.commands.console import make_console, show
from rbdc.commands.where import joined
from rbdc.options import Parser, add_settings, default_recipe, given_settings
from rbdc.settings import Cluster, Machine, Recipe, Request, read_recipe, split_settings

if TYPE_CHECKING:
    from rbdc.experiments.train import Training


def train_parser() -> Parser:
    parser = Parser(
        description="Train a wide model by RBDC: leaves, couplings, target. Give the same command "
        "again to go on with a run that was stopped.",
        epilog="rbdc train --model deit_base_patch16_224 --data PATH --steps 2 --budget 0.7",
    )
    add = parser.add_argument
    add("--recipe", type=str, help="a shipped recipe or a YAML file; options override it")
    add("--output", type=Path, help="the run's folder; by default runs/RECIPE")
    add("--jobs", type=int, help="siblings side by side; by default 1, on a CPU what is faster")
    add("--node", type=str, metavar="NAME",
        help="train this model of the tree alone, once its parents are trained: for schedulers "
        "that start each training on their own")  # fmt: skip
    add("--dry-run", action="store_true", help="check and print the plan, train nothing")
    for title, settings in (
        ("What to train", Request),
        ("How to train it (the recipe, by timm's names)", Recipe),
        ("On what", Machine),
        ("On a cluster", Cluster),
    ):
        add_settings(parser.add_argument_group(title), settings)
    return parser


def train_command(options: Namespace) -> None:
    """Train the tree, or continue it."""
    from rbdc.experiments.train import prepare
    from rbdc.report.live import LiveRun
    from rbdc.report.page import REPORT, write_report
    from rbdc.report.run import result_lines
    from rbdc.runs.run import check, execute

    given = given_settings(options, Request) | given_settings(options, Recipe)
    name = options.recipe or default_recipe(given)
    settings = split_settings(read_recipe(name), given)
    output = options.output or Path("runs") / Path(name).stem
    with joined(options) as where:
        training = prepare(*settings, where.world)
        run = training.run()
        check(run, output, where)
        if where.world.is_main:
            _introduce(training, name, output)
        if options.dry_run:
            return
        with LiveRun(run.nodes, make_console(quiet=not where.world.is_main)) as live:
            result = execute(run, output, where, live)
        if where.world.is_main and result:
            print("\n" + "\n".join(result_lines(result, output)))
            print(f"open       {write_report([output], output / REPORT)}")


def _introduce(training: "Training", name: str, output: Path) -> None:
    from rbdc.report.plan import plan_table

    recipe, data = training.setting.recipe, training.setting.data
    show(plan_table(training.plan))
    print(
        f"recipe {name}: {recipe.opt}, learning rate {recipe.learning_rate:.3g} at a batch of "
        f"{recipe.batch_size}, transition {', '.join(training.setting.transition)}\n"
        f"data {data.name}: {len(data.train):,} training and {len(data.test):,} test images, "
        f"{len(data.class_names)} classes\n"
        f"output {output}\n"
    )
    for image in data.skipped:
        print(f"skipped, cannot be decoded: {image}")
