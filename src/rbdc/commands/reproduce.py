"""`rbdc reproduce`: the paper's experiments, each a few comparisons."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jsonargparse import Namespace

from rbdc.commands.compare import show_comparison
from rbdc.commands.where import joined
from rbdc.errors import RbdcError
from rbdc.options import Parser, add_settings, keyword_arguments
from rbdc.settings import Cluster, Machine

if TYPE_CHECKING:
    from rbdc.experiments.compare import Comparison


def reproduce_parser() -> Parser:
    parser = Parser(
        description="Run one of the paper's experiments: efficiency, ratio, padding, growth. Give "
        "the same command again to go on.",
        epilog="rbdc reproduce growth --scale small",
    )
    add = parser.add_argument
    add("experiment", type=str, help="efficiency, ratio, padding or growth")
    add("--scale", type=Literal["paper", "small"], default="small",
        help="the real thing, with GPUs and ImageNet; or small models on two cores")  # fmt: skip
    add("--data", type=str, help="by default the embedded images; paper scale needs ImageNet's")
    add("--output", type=Path, help="by default runs/EXPERIMENT-SCALE; a folder a case in it")
    add("--seeds", type=int, help="by default the experiment's own number")
    add("--jobs", type=int, help="trainings side by side; by default 1, on a CPU what is faster")
    add("--dry-run", action="store_true", help="print jobs, epochs, FLOPs and hours, train nothing")
    add("--images-per-second", type=float,
        help="of the target in training, for the hours; by default measured here")  # fmt: skip
    add("--json", action="store_true", help="print the summaries as JSON")
    add("--set", type=str, nargs="+", default=[], metavar="K=V",
        help="settings that go before the experiment's: baseline_epochs=4 lr=0.004")  # fmt: skip
    add_settings(parser.add_argument_group("On what"), Machine)
    add_settings(parser.add_argument_group("On a cluster"), Cluster)
    return parser


def reproduce_command(options: Namespace) -> None:
    """Run the comparisons of one experiment."""
    from rbdc.experiments.reproduce import imagenet_outline, prepare_case, read_experiment

    experiment = read_experiment(options.experiment, options.scale)
    given = keyword_arguments(options.set, "--set")
    given |= {"data": options.data} if options.data else {}
    outline = None
    if options.scale == "paper" and not options.data:
        if not options.dry_run:
            raise RbdcError(
                "the paper's experiments need ImageNet", "Give its folder with --data PATH."
            )
        outline = imagenet_outline()
    output = options.output or Path("runs") / f"{options.experiment}-{options.scale}"
    with joined(options) as where:
        cases = {
            case.name: prepare_case(
                case, given, seeds=options.seeds, world=where.world, data=outline
            )
            for case in experiment.cases
        }
        speaks = where.world.is_main and not options.json
        if speaks:
            print(experiment.head)
        for name, comparison in cases.items():
            if speaks:
                print(f"\n{name}: {comparison.setting.model} on {comparison.setting.data.name}")
            if options.dry_run and where.world.is_main:
                _hours(comparison, where.machine, options.images_per_second)
            show_comparison(comparison, output / name, options, where)


def _hours(comparison: "Comparison", machine: Machine, images_per_second: float | None) -> None:
    """Print what a case would take, from the speed at which the target trains."""
    from rbdc.experiments.results import flops_of
    from rbdc.jobs.measure import images_per_second as measured
    from rbdc.report.compare import hours_lines

    setting = comparison.setting
    measured_here = images_per_second is None
    if images_per_second is None:
        task = setting.training("target", 0, setting.baseline_epochs).task
        images_per_second, _ = measured(task, machine)
    _, shared = flops_of(comparison.planned)
    passes = shared / setting.baseline_flops * setting.baseline_epochs
    images = passes * len(setting.data.train)
    print("\n".join(hours_lines(images / images_per_second, images_per_second, measured_here)))
