"""`rbdc plan`: what a training will cost, before it is begun."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jsonargparse import Namespace

from rbdc.commands.console import make_console, show
from rbdc.errors import RbdcError
from rbdc.options import MODEL_KWARGS, Parser, comma_separated_numbers, keyword_arguments
from rbdc.settings import PLAN

if TYPE_CHECKING:
    from rbdc.cluster import ClusterPlan
    from rbdc.plan import Plan

PLAN_OPTIONS = (*PLAN, "warmup_epochs", "images")


def plan_parser() -> Parser:
    parser = Parser(
        description="Plan an RBDC training: models, epochs and FLOPs of every level.",
        epilog="rbdc plan deit_base_patch16_224 --steps 2 --budget 0.7",
    )
    add = parser.add_argument
    add("model", type=str, help="a timm model name: the target")
    add("--steps", type=int, default=1, help="recursive halvings; 0 is standard training")
    add("--ratio", type=float, default=2.0, help="epochs of a wide model over its parents'")
    spend = parser.add_argument_group("How much to spend (exactly one)")
    spend.add_argument("--budget", type=float, help="relative to standard training")
    spend.add_argument("--total-flops", type=float, help="FLOPs of everything")
    spend.add_argument("--epochs", type=float, help="epochs of the target")
    spend.add_argument(
        "--total-epochs", type=float, help="epochs of all models together: passes over the data"
    )
    add(
        "--baseline-epochs",
        type=float,
        help="standard training to compare with; by default 300 for ViTs, 90 for ResNets",
    )
    add("--warmup-epochs", type=float, help="by default 5 for ViTs, 2 for ResNets")
    add("--images", type=int, default=1_281_167, help="training images (default: ImageNet-1K)")
    add("--schedule", type=Literal["appendix", "algorithm-1"], default="appendix", help="of epochs")
    add(
        "--costs",
        type=Literal["exact", "quarter"],
        default="exact",
        help="what epochs are solved with; quarter: half the width costs a quarter",
    )
    add(
        "--counter",
        type=Literal["fvcore", "fvcore+sdpa", "torch"],
        default="fvcore+sdpa",
        help="of FLOPs; fvcore is the paper's and leaves attention out",
    )
    add("--rounding", type=Literal["whole", "none"], default="whole", help="of epochs")
    add("--width", type=float, default=1.0, help="of the target, relative to the named model")
    add("--img-size", type=int, help="by default the model's own")
    add("--model-kwargs", type=str, nargs="*", default=[], metavar="K=V", help=MODEL_KWARGS)
    add("--json", action="store_true", help="print the plan as JSON")
    add("--plot", type=Path, help="draw the budget by level (.png, .svg or .pdf)")
    _add_cluster(parser)
    return parser


def _add_cluster(parser: Parser) -> None:
    add = parser.add_argument_group("On a cluster").add_argument
    add("--devices", type=int, help="how long it takes on so many, beside standard training")
    add("--simulate", action="store_true", help="print who trains when, as a Gantt chart")
    add("--gantt", type=Path, help="draw who trains when and where (.png, .svg or .pdf)")
    add("--images-per-second", type=str, nargs="+", default=[], metavar="N",
        help="in training, on one device: the target's, or every level's, target first; by "
             "default assumed, for an A100")  # fmt: skip
    add("--batch-size", type=int, default=1024, help="of a training, over all its devices")
    add("--devices-per-node", type=int, default=8, help="those that the fast wires connect")
    add("--node-bandwidth", type=float, default=200.0,
        help="of an all-reduce within a node, in GB/s (busbw of nccl-tests)")  # fmt: skip
    add("--network-bandwidth", type=float, default=50.0,
        help="of an all-reduce between nodes, in GB/s")  # fmt: skip


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
    arguments = keyword_arguments(options.model_kwargs)
    if options.img_size is not None:
        if "img_size" in arguments:
            raise RbdcError("the image size was given twice", "Give --img-size once.")
        arguments["img_size"] = options.img_size
    plan = make_plan(
        ModelSpec(name=options.model, width=options.width, arguments=arguments),
        **{name: options[name] for name in PLAN_OPTIONS},
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
    from rbdc.cluster import plan_cluster
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
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise RbdcError(f"{path} is not a picture's name", "End it in .png, .svg or .pdf.")
    if not path.absolute().parent.is_dir():
        raise RbdcError(f"{path.parent} is not a folder", "Make it first, or choose another.")
