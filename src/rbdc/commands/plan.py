"""`rbdc plan`: what a training will cost, before it is begun."""

import json
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rbdc.commands.console import make_console, show
from rbdc.commands.options import Parser, comma_separated_numbers, given_settings
from rbdc.errors import RbdcError
from rbdc.settings import PLAN, SPEND, Request

if TYPE_CHECKING:
    from rbdc.cluster.allocation import ClusterPlan
    from rbdc.plan import Plan

IMAGENET_IMAGES = 1_281_167


def plan_parser() -> Parser:
    """Return the parser of `rbdc plan`."""
    parser = Parser(
        description="Plan an RBDC training: models, epochs and FLOPs of every level.",
        epilog="rbdc plan deit_base_patch16_224 --steps 2 --budget 0.7",
    )
    add = parser.add
    add("model", help="timm name of the target, the wide model")
    add("--images", type=int, default=IMAGENET_IMAGES,
        help="number of training images, by default those of ImageNet-1K")  # fmt: skip
    add("--warmup-epochs", type=float, brief=False,
        help="epochs of warm-up (default 5 for ViTs, 2 for ResNets)")  # fmt: skip
    add("--json", action="store_true", help="print the plan as JSON")
    add("--plot", type=Path, metavar="FILE", help="draw the FLOPs of each level (.png, .svg, .pdf)")
    parser.add_settings("How much to spend (exactly one)", Request, only=SPEND, brief=SPEND)
    of_plan = {*PLAN, "width", "img_size", "model_kwargs"} - {*SPEND}
    brief = ("steps", "ratio", "baseline_epochs", "counter", "rounding")
    parser.add_settings("What to train", Request, only=of_plan, brief=brief)
    _add_cluster(parser)
    return parser


def _add_cluster(parser: Parser) -> None:
    add = partial(parser.add, group=parser.add_argument_group("On a cluster"))
    add("--devices", type=int, help="number of devices: print how long the plan takes on them")
    add("--simulate", action="store_true", help="print which model trains when, as a Gantt chart")
    add("--gantt", type=Path, metavar="FILE", brief=False,
        help="draw which model trains when and where (.png, .svg, .pdf)")  # fmt: skip
    add("--images-per-second", nargs="+", default=[], metavar="N",
        help="training speed of one device: the target's, or each level's, target first (default: "
        "an assumption for an A100)")  # fmt: skip
    add("--batch-size", type=int, default=1024, brief=False,
        help="images per update of each training, over all its devices")  # fmt: skip
    add("--devices-per-node", type=int, default=8, brief=False,
        help="devices per node, connected by the faster links")  # fmt: skip
    add("--node-bandwidth", type=float, default=200.0, brief=False,
        help="all-reduce bandwidth within a node in GB/s, as busbw of nccl-tests")  # fmt: skip
    add("--network-bandwidth", type=float, default=50.0, brief=False,
        help="all-reduce bandwidth between nodes in GB/s")  # fmt: skip


def plan_command(options: Namespace) -> None:
    """Print the plan, and draw what was asked for."""
    from rbdc.models import ModelSpec
    from rbdc.plan import make_plan
    from rbdc.report.plan import plan_table, save_plan_plot
    from rbdc.report.timetable import gantt, save_timetable_plot, timetable_table

    for picture in (options.plot, options.gantt):
        if picture:
            _check_picture(picture)
    if options.devices is None and (options.simulate or options.gantt):
        raise RbdcError("nothing says how many devices there are", "Give --devices N.")
    request = Request(**given_settings(options, Request))
    arguments = dict(request.model_kwargs)
    if request.img_size is not None:
        if "img_size" in arguments:
            raise RbdcError("the image size was given twice", "Give --img-size once.")
        arguments["img_size"] = request.img_size
    plan = make_plan(
        ModelSpec(name=options.model, width=request.width, arguments=arguments),
        warmup_epochs=options.warmup_epochs,
        images=options.images,
        **{name: getattr(request, name) for name in PLAN},
    )
    cluster = None if options.devices is None else _on_cluster(plan, options)
    if options.plot:
        save_plan_plot(plan, options.plot)
    if cluster and options.gantt:
        save_timetable_plot(cluster, options.gantt)
    if options.json:
        timetable = {"cluster": cluster.to_json()} if cluster else {}
        print(json.dumps(plan.to_json() | timetable, indent=2))
        return
    show(plan_table(plan))
    if cluster:
        show(timetable_table(cluster))
    if cluster and options.simulate:
        show(gantt(cluster, width=min(100, make_console().width)))


def _on_cluster(plan: "Plan", options: Namespace) -> "ClusterPlan":
    from rbdc.cluster.allocation import plan_cluster
    from rbdc.plan import Hardware, scaling_of

    hardware = Hardware(
        devices_per_node=options.devices_per_node,
        node_bytes_per_second=1e9 * options.node_bandwidth,
        network_bytes_per_second=1e9 * options.network_bandwidth,
    )
    speeds = comma_separated_numbers("--images-per-second", options.images_per_second)
    scaling = scaling_of(
        plan, batch_size=options.batch_size, images_per_second=speeds, hardware=hardware
    )
    return plan_cluster(plan, options.devices, scaling)


def _check_picture(path: Path) -> None:
    """Refuse a file that no picture can be written to."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise RbdcError(f"{path} is not a picture's name", "End it in .png, .svg or .pdf.")
    if not path.absolute().parent.is_dir():
        raise RbdcError(f"{path.parent} is not a folder", "Make it first, or choose another.")
