"""Options that say how fast the levels of a plan train."""

from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

from rbdc.commands.options import Parser
from rbdc.errors import RbdcError


def add_speeds(parser: Parser, group: Any = None) -> None:
    """Add the options for speeds: a table, the loader's, and measuring anew."""
    add = partial(parser.add, group=group, brief=False)
    add("--speeds", type=Path, metavar="FILE",
        help="training speeds of one device: a table of timm's benchmark.py (model, "
        "train_samples_per_sec)")  # fmt: skip
    add("--loader", type=float, metavar="N",
        help="images per second that the data loader gives (default: never the limit)")  # fmt: skip
    add("--measure-again", action="store_true",
        help="measure the training speeds, also those that were measured before")  # fmt: skip


def check_speed_options(options: Namespace) -> list[str]:
    """Return the options that say where speeds come from; refuse two of them."""
    sources = {
        "--measure": getattr(options, "measure", False) or options.measure_again,
        "--speeds": options.speeds,
        "--images-per-second": getattr(options, "images_per_second", None),
    }
    given = [name for name, value in sources.items() if value]
    if len(given) > 1:
        raise RbdcError(
            f"the training speeds are given twice: {' and '.join(given)}", "Give one of them."
        )
    if options.loader is not None and not options.loader > 0:
        raise RbdcError(
            f"--loader is {options.loader:g}, expected more than 0",
            "Give the images per second that the data loader gives.",
        )
    return given
