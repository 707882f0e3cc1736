"""`rbdc reproduce`: the paper's experiments and ours, each a few comparisons."""

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rbdc.commands.common import add_run, joined
from rbdc.commands.compare import show_comparison
from rbdc.commands.console import say
from rbdc.commands.options import Parser
from rbdc.errors import RbdcError
from rbdc.settings import Machine

if TYPE_CHECKING:
    from rbdc.experiments.compare import Comparison


def reproduce_parser() -> Parser:
    """Return the parser of `rbdc reproduce`."""
    parser = Parser(
        description="Run one of the paper's experiments (efficiency, ratio, padding, growth), or "
        "ours: attribution, what growth in width, depth and resolution gives. The same command "
        "resumes it.",
        epilog="rbdc reproduce growth --scale small",
    )
    add = parser.add
    add("experiment", help="efficiency, ratio, padding, growth or attribution")
    add("--scale", type=Literal["paper", "small"], default="small",
        help="the paper's models on ImageNet, for GPUs; or small models on CPU cores")  # fmt: skip
    add("--data", help="data set (default: the embedded images; --scale paper needs ImageNet)")
    add("--seeds", type=int, help="number of seeds (default: the experiment's own)")
    add("--images-per-second", type=float,
        help="training speed of the first case's target, for the hours; those of other cases "
        "follow by FLOPs (default: measured)")  # fmt: skip
    add("--json", action="store_true", help="print the summaries as JSON")
    add("--set", type=dict, default={},
        help="settings to override, such as baseline_epochs=4 lr=0.004")  # fmt: skip
    add_run(parser, "EXPERIMENT-SCALE")
    return parser


def reproduce_command(options: Namespace) -> None:
    """Run the comparisons of one experiment."""
    from rbdc.experiments.reproduce import imagenet_outline, prepare_case, read_experiment

    experiment = read_experiment(options.experiment, options.scale)
    given = {**options.set, **({"data": options.data} if options.data else {})}
    absent = options.scale == "paper" and not options.data
    if absent and not options.dry_run:
        raise RbdcError(
            "the paper's experiments need ImageNet", "Give its folder with --data PATH."
        )
    data = imagenet_outline() if absent else None
    output = options.output or Path("runs") / f"{options.experiment}-{options.scale}"
    with joined(options) as where:
        cases = [
            (case.name, prepare_case(case, given, seeds=options.seeds, where=where, data=data))
            for case in experiment.cases
        ]
        speaks = where.world.is_main and not options.json
        if speaks:
            say(experiment.head)
        first = cases[0][1].setting.forward_flops()
        for name, comparison in cases:
            if speaks:
                say(f"\n{name}: {comparison.setting.model} on {comparison.setting.data.name}")
            if options.dry_run and where.world.is_main:
                speed = options.images_per_second
                scale = first / comparison.setting.forward_flops()
                _hours(comparison, where.machine, None if speed is None else speed * scale)
            show_comparison(comparison, output / name, options, where)


def _hours(comparison: "Comparison", machine: Machine, images_per_second: float | None) -> None:
    """Print what a case would take, from the speed at which the target trains."""
    from rbdc.experiments.results import flops_of
    from rbdc.jobs.measure import measure_training
    from rbdc.report.compare import hours_lines

    setting = comparison.setting
    measured_here = images_per_second is None
    if images_per_second is None:
        task = setting.training("target", 0, setting.baseline_epochs).task
        images_per_second = measure_training(task, machine).images_per_second
    _, shared = flops_of(comparison.planned)
    passes = shared / setting.baseline_flops * setting.baseline_epochs
    images = passes * len(setting.data.train)
    say("\n".join(hours_lines(images / images_per_second, images_per_second, measured_here)))
