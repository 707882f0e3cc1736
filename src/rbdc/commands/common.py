"""Options that several commands have, and what is made of them."""

from argparse import Namespace
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rbdc.commands.options import Parser, given_settings
from rbdc.errors import RbdcError
from rbdc.settings import (
    Augmentation,
    Cluster,
    Machine,
    Recipe,
    Request,
    read_recipe,
    split_settings,
)
from rbdc.settings.schema import schemas

if TYPE_CHECKING:
    from rbdc.runs.run import Where

BRIEF_REQUEST = (
    "model", "data", "data_download", "steps", "budget", "epochs", "baseline_epochs",
    "with_baseline", "seed", "transition",
)  # fmt: skip
BRIEF_RECIPE = ("batch_size", "lr", "opt", "weight_decay", "warmup_epochs", "amp")


def add_training(parser: Parser, *, without: Collection[str] = ()) -> None:
    """Add all settings that are not in `without`, and the recipe: `chosen_settings` reads them."""
    text = "shipped recipe or YAML file (default: the model family's, or demo)"
    parser.add("--recipe", metavar="NAME", help=text)
    request = set(schemas(Request)) - set(without)
    parser.add_settings("What to train", Request, brief=BRIEF_REQUEST, only=request)
    images, names = set(schemas(Augmentation)), "(recipe, timm's names)"
    other = set(schemas(Recipe)) - images
    parser.add_settings(f"How to train {names}", Recipe, brief=BRIEF_RECIPE, only=other)
    parser.add_settings(f"Augmentation {names}", Recipe, only=images)


def add_weight_files(parser: Parser, *, brief: bool = True) -> None:
    """Add the options that say what a weight file holds."""
    add = partial(parser.add, brief=brief)
    add("--model", metavar="NAME", help="timm name of the architecture of weight files")
    add("--model-kwargs", type=dict, default={},
        help="timm arguments of the full-width model, such as depth=6 embed_dim=64")  # fmt: skip
    add("--no-ema", action="store_true",
        help="use the raw weights, not the EMA weights, of a checkpoint that has both")  # fmt: skip


def add_run(parser: Parser, output: str) -> None:
    """Add where files go, and where jobs run: `joined` reads it."""
    add = parser.add
    add("--output", type=Path, metavar="DIR", help=f"folder of the run (default runs/{output})")
    add("--jobs", type=int, help="models trained at once (default 1; classifiers on CPU: measured)")
    add("--dry-run", action="store_true", help="check everything and print the cost, then stop")
    parser.add_settings("Machine", Machine, brief=("device", "workers"))
    parser.add_settings("Cluster", Cluster, brief=("engine",))


def chosen_settings(options: Namespace) -> tuple[str, Request, Recipe]:
    """Return the name of the recipe, and its settings where options do not override them.

    A command that names no recipe uses the one of its model's family, with the family's growth, or
    the demo's.
    """
    given = given_settings(options, Request) | given_settings(options, Recipe)
    name, growth = options.recipe or "demo", {}
    if not options.recipe and "model" in given:
        from rbdc.models import as_spec, family

        known = family(as_spec(given["model"]))
        name, growth = known.recipe, {"grow": ["auto"], "ratio": known.ratio}
    return name, *split_settings({**read_recipe(name), **growth}, given)


@contextmanager
def joined(options: Namespace) -> Iterator["Where"]:
    """Join the processes that torchrun started, if any; yield where jobs run; leave them.

    What is automatic is chosen for the device of the jobs.
    """
    from rbdc.jobs.engine import start_server
    from rbdc.runs.run import Where, settle
    from rbdc.training import join_world
    from rbdc.training.world import leave_world

    machine = Machine(**given_settings(options, Machine))
    cluster = Cluster(**given_settings(options, Cluster))
    try:
        world, node = join_world(machine.device), getattr(options, "node", None)
        where = Where(machine=machine, cluster=cluster, jobs=options.jobs, world=world, node=node)
        if cluster.engine == "local" and world.size == 1 and node is None and options.jobs != 1:
            start_server({"rbdc.jobs.grow", "rbdc.jobs.train"})  # takes seconds: begin early
        yield settle(where)
    finally:
        leave_world()


def check_picture(path: Path) -> None:
    """Refuse a file that no picture can be written to."""
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise RbdcError(f"{path} is not a picture's name", "End it in .png, .svg or .pdf.")
    if not path.absolute().parent.is_dir():
        raise RbdcError(f"{path.parent} is not a folder", "Make it first, or choose another.")
