"""`rbdc transfer`: detection and instance segmentation with trained backbones."""

import json
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from rbdc.commands.common import add_run, add_weight_files, joined
from rbdc.commands.console import make_console, say
from rbdc.commands.options import Parser, given_settings
from rbdc.errors import RbdcError
from rbdc.settings import DetectionRecipe, read_detection_recipe, with_unit

if TYPE_CHECKING:
    from rbdc.runs.run import Where
    from rbdc.transfer.prepare import Transfer


def transfer_parser() -> Parser:
    """Return the parser of `rbdc transfer`."""
    parser = Parser(
        description="Train Mask R-CNN on the features of a trained classifier, or of several to "
        "compare them, and score it as COCO does. The same command resumes it.",
        epilog="rbdc transfer --backbone runs/demo --data coco --recipe paper --output runs/coco",
    )
    add = parser.add
    add("--backbone", metavar="DIR", help="run of rbdc train, exported folder, or weight file")
    add("--compare", nargs="+", metavar="DIR", default=[],
        help="several backbones, trained from the same seeds; scratch:DIR trains the same "
        "architecture from random weights, as a baseline")  # fmt: skip
    add("--data", type=Path, metavar="DIR",
        help="folder in COCO's layout: annotations/, train2017/, val2017/")  # fmt: skip
    for split in ("train", "val"):
        add(f"--{split}-json", type=Path, metavar="FILE", brief=False,
            help=f"annotations of the {split} split, instead of --data")  # fmt: skip
        add(f"--{split}-images", type=Path, metavar="DIR", brief=False,
            help=f"image folder of the {split} split, instead of --data")  # fmt: skip
    add("--recipe", metavar="NAME", default="paper",
        help="paper, small, or a YAML file; options override it")  # fmt: skip
    add("--seeds", type=int, default=1, help="trainings per backbone")
    add("--seed", type=int, default=0, help="first seed")
    add("--by-class", action="store_true", help="also print the average precision of each class")
    add("--json", action="store_true", help="print the result as JSON")
    brief = ("epochs", "batch_size", "lr", "min_size", "max_size", "warmup_steps", "amp")
    parser.add_settings("How to train (recipe)", DetectionRecipe, brief=brief)
    add_weight_files(parser, brief=False)
    add_run(parser, "transfer-RECIPE")
    return parser


def transfer_command(options: Namespace) -> None:
    """Train the detectors, or continue them."""
    from rbdc.report.live import LiveRun
    from rbdc.report.page import REPORT, write_report
    from rbdc.report.transfer import transfer_table
    from rbdc.runs.run import check, chosen_lines, execute

    output = options.output or Path("runs") / f"transfer-{Path(options.recipe).stem}"
    with joined(options) as where:
        transfer = _prepare(options, where)
        run = transfer.run()
        check(run, output, where)
        console = make_console(quiet=not where.world.is_main or options.json)
        if not console.quiet:
            _introduce(transfer, options.recipe, output, chosen_lines(run, where))
        if options.dry_run:
            return
        with LiveRun(run.nodes, console) as live:
            result = execute(run, output, where, live)
        if where.world.is_main and result:
            if options.json:
                say(json.dumps(result, indent=2))
            console.print(transfer_table(result, by_class=options.by_class))
            console.print(f"open {write_report([output], output / REPORT)}", highlight=False)


def _prepare(options: Namespace, where: "Where") -> "Transfer":
    from rbdc.transfer.coco import open_splits
    from rbdc.transfer.jobs import find_backbone
    from rbdc.transfer.prepare import prepare_transfer

    if bool(options.backbone) == bool(options.compare):
        problem = "--backbone and --compare are both given"
        raise RbdcError(
            problem if options.compare else "no backbone is named",
            "Give --backbone DIR for one, or --compare A B ... for several.",
        )
    places = options.compare or [options.backbone]
    recipe = read_detection_recipe(options.recipe, given_settings(options, DetectionRecipe))
    names = ("train_json", "train_images", "val_json", "val_images")
    files = [getattr(options, name) for name in names if getattr(options, name)]
    if bool(options.data) == bool(files) or 0 < len(files) < len(names):
        raise RbdcError(
            "the data is not said in one way",
            "Give --data DIR, or all of --train-json, --train-images, --val-json, --val-images.",
        )
    files = files or [options.data]
    how = {"arguments": options.model_kwargs or None, "use_ema": not options.no_ema}
    seeds = {"seed": options.seed, "seeds": options.seeds}
    data = {"backbones": places, "data": [str(path) for path in files]}
    return prepare_transfer(
        [find_backbone(place, model=options.model, **how) for place in places],
        open_splits(*files),
        recipe,
        **seeds,
        where=where,
        request={**data, **seeds},
    )


def _introduce(transfer: "Transfer", name: str, output: Path, chosen: list[str]) -> None:
    from rbdc.report.units import readable_flops

    recipe, splits = transfer.recipe, transfer.splits
    for title, split in (("train", splits.train), ("val", splits.val)):
        dropped = ", ".join(f"{count} x {why}" for why, count in split.dropped.items())
        say(
            f"{title}: {len(split.pictures):,} images, {split.objects:,} objects of "
            f"{len(split.class_names)} classes" + (f"; dropped: {dropped}" if dropped else "")
        )
    for backbone, job in {job.backbone.name: job for job in transfer.jobs.values()}.items():
        cost = job.cost
        say(
            f"{backbone}: {job.backbone.spec}, with the heads {cost.total_parameters / 1e6:.1f} M "
            f"parameters, {readable_flops(cost.total_flops)} an image of "
            f"{cost.height} x {cost.width}"
        )
    say(
        f"recipe {name}: {recipe.opt}, learning rate {recipe.lr:.3g} at a batch of "
        f"{recipe.batch_size}, {with_unit(recipe.epochs)}, short side {recipe.min_size} px\n"
        + "".join(f"{line}\n" for line in chosen)
        + f"output {output}\n"
    )
