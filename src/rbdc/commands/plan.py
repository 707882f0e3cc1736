"""`rbdc plan`: what a training will cost, before it is begun."""

import json
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rbdc.commands.common import check_picture
from rbdc.commands.console import make_console, say, show
from rbdc.commands.options import Parser, comma_separated_numbers, given_settings
from rbdc.commands.speeds import add_speeds, check_speed_options
from rbdc.errors import RbdcError
from rbdc.settings import (
    GROWTH,
    PLAN,
    SPEND,
    Machine,
    Request,
    names_baseline,
    read_recipe,
    split_settings,
)

if TYPE_CHECKING:
    from rbdc.cluster.allocation import ClusterPlan
    from rbdc.models import ModelSpec
    from rbdc.plan import Hardware, Hours, Plan, Rounding, Speeds

IMAGENET_IMAGES = 1_281_167
SOURCES = "Give --measure, --speeds FILE or --images-per-second N."


def plan_parser() -> Parser:
    """Return the parser of `rbdc plan`."""
    parser = Parser(
        description="Plan an RBDC training: models, epochs, FLOPs and hours of every level.",
        epilog="rbdc plan deit_base_patch16_224 --steps 2 --budget 0.7",
    )
    add = parser.add
    add("model", help="timm name of the target, the wide model")
    add("--images", type=int, default=IMAGENET_IMAGES,
        help="number of training images; ImageNet-1K has as many")  # fmt: skip
    add("--tokens", type=int, metavar="N",
        help="number of training tokens of a language model, in place of --images")  # fmt: skip
    add("--warmup-epochs", type=float, brief=False,
        help="epochs of warm-up (default 5 for ViTs, 2 for ResNets)")  # fmt: skip
    add("--json", action="store_true", help="print the plan as JSON")
    add("--plot", type=Path, metavar="FILE", help="draw the FLOPs of each level (.png, .svg, .pdf)")
    parser.add_settings("How much to spend (exactly one)", Request, only=SPEND, brief=SPEND)
    of_plan = {*PLAN, *GROWTH, "width", "img_size", "model_kwargs"} - {*SPEND}
    brief = ("steps", "grow", "ratio", "baseline_epochs", "rounding")
    parser.add_settings("What to train", Request, only=of_plan, brief=brief)
    _add_hours(parser)
    _add_cluster(parser)
    return parser


def _add_hours(parser: Parser) -> None:
    group = parser.add_argument_group("In hours and money, on one device")
    add = partial(parser.add, group=group)
    add("--measure", action="store_true",
        help="measure the training speed of every level on this device; remembered")  # fmt: skip
    add_speeds(parser, group)
    add("--images-per-second", nargs="+", default=[], metavar="N",
        help="training speed of one device: the target's, or each level's, target first (with "
        "--devices, default: an assumption for an A100)")  # fmt: skip
    add("--price", type=float, help="price of a device-hour, in any currency")
    add("--batch-size", type=int, default=1024, brief=False,
        help="images per update of each training, over all its devices")  # fmt: skip
    add("--amp", action="store_true", brief=False, help="measure in mixed precision")
    parser.add_settings("What to measure on", Machine, only=("device", "threads", "compile"))


def _add_cluster(parser: Parser) -> None:
    add = partial(parser.add, group=parser.add_argument_group("On a cluster"))
    add("--devices", type=int, help="number of devices: print how long the plan takes on them")
    add("--simulate", action="store_true", help="print which model trains when, as a Gantt chart")
    add("--gantt", type=Path, metavar="FILE", brief=False,
        help="draw which model trains when and where (.png, .svg, .pdf)")  # fmt: skip
    add("--devices-per-node", type=int, default=8, brief=False,
        help="devices per node, connected by the faster links")  # fmt: skip
    add("--node-bandwidth", type=float, default=200.0, brief=False,
        help="all-reduce bandwidth within a node in GB/s, as busbw of nccl-tests")  # fmt: skip
    add("--network-bandwidth", type=float, default=50.0, brief=False,
        help="all-reduce bandwidth between nodes in GB/s")  # fmt: skip


def plan_command(options: Namespace) -> None:
    """Print the plan, and draw what was asked for."""
    from rbdc.plan import Growth, Hours, fewest_hours, hours_by_steps, make_plan
    from rbdc.report.plan import save_plan_plot

    _check_options(options)
    request = Request(**given_settings(options, Request))
    model = _model(options.model, request)
    hardware = _hardware(options)
    speeds = _speeds(model, request, options, hardware)
    planning = {name: getattr(request, name) for name in PLAN} | {
        "growth": Growth.of(request, model),
        "warmup_epochs": options.warmup_epochs,
        "images": _samples(model, options),
        "batch_size": options.batch_size,
        "speeds": speeds,
    }
    candidates: tuple[Hours, ...] = ()
    if speeds and request.steps == "auto":

        def plan_of(steps: int, rounding: "Rounding") -> "Plan":
            return make_plan(model, **planning | {"steps": steps, "rounding": rounding})

        candidates = hours_by_steps(plan_of, speeds, request.rounding)
        planning["steps"] = fewest_hours(candidates)
    plan = make_plan(model, **planning)
    hours = Hours(plan=plan, speeds=speeds, price=options.price) if speeds else None
    cluster = None
    if options.devices is not None:
        cluster = _on_cluster(plan, speeds, options, hardware)
    if options.plot:
        save_plan_plot(plan, options.plot)
    if options.json:
        parts = {"hours": hours, "cluster": cluster}
        more: dict[str, Any] = {name: part.to_json() for name, part in parts.items() if part}
        if candidates:
            more["steps_auto"] = [candidate.to_json() for candidate in candidates]
        say(json.dumps(plan.to_json() | more, indent=2))
    _show(plan, hours, candidates, cluster, options, names_baseline(request.to_json()))


def _samples(model: "ModelSpec", options: Namespace) -> int:
    """Return the number of training images, or of the sequences that the tokens make."""
    from rbdc.models import image_side
    from rbdc.models.language import is_language

    if options.tokens is None:
        return int(options.images)
    if not is_language(model.name):
        raise RbdcError(f"{model.name} takes images, and --tokens is for text", "Give --images.")
    length = image_side(model)
    if options.tokens < length:
        raise RbdcError(
            f"--tokens {options.tokens} is less than one sequence of {length}",
            "Give the number of training tokens of the whole data.",
        )
    return int(options.tokens) // length


def _show(
    plan: "Plan",
    hours: "Hours | None",
    candidates: "tuple[Hours, ...]",
    cluster: "ClusterPlan | None",
    options: Namespace,
    relative: bool,
) -> None:
    from rbdc.report.plan import plan_table, steps_table
    from rbdc.report.timetable import gantt, save_timetable_plot, timetable_table

    if cluster and options.gantt:
        save_timetable_plot(cluster, options.gantt)
    if options.json:
        return
    if candidates:
        show(steps_table(candidates, plan.steps))
    show(plan_table(plan, hours, relative=relative))
    if cluster:
        show(timetable_table(cluster))
    if cluster and options.simulate:
        show(gantt(cluster, width=min(100, make_console().width)))


def _check_options(options: Namespace) -> None:
    """Refuse options that do not go together, before anything is measured."""
    for picture in (options.plot, options.gantt):
        if picture:
            check_picture(picture)
    if options.devices is None and (options.simulate or options.gantt):
        raise RbdcError("nothing says how many devices there are", "Give --devices N.")
    if options.price is not None and not options.price > 0:
        raise RbdcError(
            f"--price is {options.price:g}, expected more than 0",
            "Give the price of a device-hour.",
        )
    if check_speed_options(options):
        return
    for name, value in (("loader", options.loader), ("price", options.price)):
        if value is not None:
            raise RbdcError(f"--{name} needs the training speed of each level", SOURCES)


def _model(name: str, request: Request) -> "ModelSpec":
    from rbdc.models import as_spec

    arguments = dict(request.model_kwargs)
    if request.img_size is not None:
        if "img_size" in arguments:
            raise RbdcError("the image size was given twice", "Give --img-size once.")
        arguments["img_size"] = request.img_size
    return as_spec(name, request.width, **arguments)


def _speeds(
    model: "ModelSpec", request: Request, options: Namespace, hardware: "Hardware"
) -> "Speeds | None":
    """Return the speeds of the levels that the plan may have; None if none are asked for."""
    from rbdc.plan import Growth, assumed_speeds, check_equal_flops, forward_flops, table_speeds

    growth = Growth.of(request, model)
    if request.steps == "auto":
        check_equal_flops(request.budget, request.total_flops)
    steps = growth.most_steps(model) if request.steps == "auto" else request.steps
    given = comma_separated_numbers("--images-per-second", options.images_per_second)
    measures = options.measure or options.measure_again
    if not (measures or options.speeds or given):
        if request.steps == "auto":
            raise RbdcError("--steps auto needs the training speed of each level", SOURCES)
        return None
    levels = growth.levels(model, steps)
    if options.speeds:
        return table_speeds(options.speeds, levels, loader=options.loader)
    if measures:
        return _measured(levels, options)
    return assumed_speeds(
        levels,
        [forward_flops(level, counter=request.counter) for level in levels],
        given,
        flops_per_second=hardware.flops_per_second,
        narrow_efficiency=hardware.narrow_efficiency,
        loader=options.loader,
    )


def _measured(levels: "list[ModelSpec]", options: Namespace) -> "Speeds":
    """Measure the levels with the recipe of their family."""
    from rbdc.experiments.reproduce import imagenet_outline
    from rbdc.jobs.speeds import measured_speeds
    from rbdc.models import family
    from rbdc.training import Task, image_format

    given = {"batch_size": options.batch_size, "amp": options.amp}
    _, recipe = split_settings(read_recipe(family(levels[0]).recipe), given)
    data = imagenet_outline()
    tasks = [
        Task(
            model=level,
            recipe=recipe,
            image=image_format(level, recipe, data),
            epochs=1,
            seed=0,
            data_seed=0,
            warmup_epochs=0,
        )
        for level in levels
    ]
    machine = Machine(**given_settings(options, Machine))
    return measured_speeds(tasks, machine, again=options.measure_again, loader=options.loader)


def _hardware(options: Namespace) -> "Hardware":
    from rbdc.plan import Hardware

    return Hardware(
        devices_per_node=options.devices_per_node,
        node_bytes_per_second=1e9 * options.node_bandwidth,
        network_bytes_per_second=1e9 * options.network_bandwidth,
    )


def _on_cluster(
    plan: "Plan", speeds: "Speeds | None", options: Namespace, hardware: "Hardware"
) -> "ClusterPlan":
    from rbdc.cluster.allocation import plan_cluster
    from rbdc.plan import scaling_of

    scaling = scaling_of(
        plan,
        batch_size=options.batch_size,
        images_per_second=speeds.images_per_second[: len(plan.stages)] if speeds else (),
        hardware=hardware,
    )
    return plan_cluster(plan, options.devices, scaling)
