"""The command line: `rbdc plan`, `rbdc train`, `rbdc status`, `rbdc couple`.

One thin function a command; what needs torch is imported when the command runs, so that --help
answers at once. A user's mistake ends with two lines on stderr and exit code 2.
"""

import json
import os
import sys
from argparse import SUPPRESS
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, NoReturn, get_type_hints

import yaml
from jsonargparse import ActionYesNo, ArgumentParser, Namespace

from rbdc import __version__
from rbdc.errors import Interrupted, RbdcError, nearest
from rbdc.recipes import PLAN, Machine, Recipe, Request, field_help, read_recipe, split_settings


class _Parser(ArgumentParser):
    def error(self, message: str, _error: Exception | None = None) -> NoReturn:
        known = [option for action in self._actions for option in action.option_strings]
        wrong = next((word for word in message.split() if word.startswith("--")), "")
        program = self.prog.replace(" [options]", "")
        raise RbdcError(
            " ".join(message.split()),
            nearest(wrong, known) or f"`{program} --help` lists what can be said.",
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        parsed = _parser().parse_args(list(sys.argv[1:] if arguments is None else arguments))
        command = {"plan": _plan, "train": _train, "status": _status, "couple": _couple}
        command[parsed.subcommand](parsed[parsed.subcommand])
    except Interrupted as interruption:
        print(f"{interruption}; saved. The same command goes on from there.", file=sys.stderr)
        return 75  # EX_TEMPFAIL: try again later
    except RbdcError as error:
        print(f"error: {error.problem}\n{error.remedy}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:  # no space, no permission: nothing half-written is left behind
        print(f"error: {error}\nCheck the disk and its permissions.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _plan(options: Namespace) -> None:
    from rbdc.budget import make_plan
    from rbdc.models import ModelSpec
    from rbdc.report.plan import plan_table, save_plan_plot

    if options.plot:
        _check_picture(options.plot)
    arguments = _keyword_arguments(options.model_kwargs)
    if options.img_size is not None:
        if "img_size" in arguments:
            raise RbdcError("the image size was given twice", "Give --img-size once.")
        arguments["img_size"] = options.img_size
    plan = make_plan(
        ModelSpec(name=options.model, width=options.width, arguments=arguments),
        **{name: options[name] for name in _PLAN_OPTIONS},
    )
    if options.plot:
        save_plan_plot(plan, options.plot)
    if options.json:
        print(json.dumps(plan.to_json(), indent=2))
    else:
        _print(plan_table(plan))


def _train(options: Namespace) -> None:
    from rbdc.report.live import LiveRun
    from rbdc.report.run import result_lines
    from rbdc.training import join_world
    from rbdc.training.world import leave_world
    from rbdc.tree.prepare import prepare

    given = _given(options, Request) | _given(options, Recipe)
    name = options.recipe or _default_recipe(given)
    request, recipe = split_settings(read_recipe(name), given)
    machine = Machine(**_given(options, Machine))
    output = options.output or Path("runs") / Path(name).stem
    world = join_world(machine.device)
    try:
        prepared = prepare(request, recipe, world)
        prepared.check(output, machine=machine, jobs=options.jobs, world=world)
        if world.is_main:
            _introduce(prepared, name, output)
        if options.dry_run:
            return
        console = _console(quiet=not world.is_main)
        with LiveRun(prepared.tree.all, prepared.work(), console) as live:
            result = prepared.run(
                output, machine=machine, watch=live, jobs=options.jobs, world=world
            )
        if world.is_main:
            print("\n" + "\n".join(result_lines(result, output)))
    finally:
        leave_world()


def _introduce(prepared: Any, name: str, output: Path) -> None:
    from rbdc.report.plan import plan_table

    recipe, data = prepared.recipe, prepared.data
    _print(plan_table(prepared.plan))
    print(
        f"recipe {name}: {recipe.opt}, learning rate {recipe.learning_rate:.3g} at a batch of "
        f"{recipe.batch_size}, transition {', '.join(prepared.request.transition)}\n"
        f"data {data.name}: {len(data.train):,} training and {len(data.test):,} test images, "
        f"{len(data.class_names)} classes\n"
        f"output {output}\n"
    )
    for image in data.skipped:
        print(f"skipped, cannot be decoded: {image}")


def _default_recipe(given: dict[str, Any]) -> str:
    """The demo; or for a model that is named, its family's."""
    if "model" not in given:
        return "demo"
    from rbdc.models import as_spec, family

    return family(as_spec(given["model"])).recipe


def _given(options: Namespace, settings: type) -> dict[str, Any]:
    """What the command line says of a settings dataclass; what it does not say is not there."""
    said = {field.name: options[field.name] for field in fields(settings) if field.name in options}
    for name, value in said.items():
        if name == "model_kwargs":
            said[name] = _keyword_arguments(value)
        elif isinstance(value, list):
            said[name] = _sequence(value)
    return said


def _sequence(words: Sequence[str]) -> tuple[Any, ...] | None:
    """`0.08 1.0`, `0.08,1.0` or `[0.08, 1.0]` as numbers; `null` as none at all."""
    values = yaml.safe_load("[" + ",".join(words).strip("[]") + "]")
    return None if values == [None] else tuple(values)


def _status(options: Namespace) -> None:
    from rbdc.report.run import run_status, status_table

    status = run_status(options.run)
    if options.json:
        print(json.dumps(status, indent=2))
    else:
        _print(status_table(status))


def _couple(options: Namespace) -> None:
    from rbdc.models import couple_folders

    record = couple_folders(
        options.first,
        options.second,
        options.output,
        model=options.model,
        arguments=_keyword_arguments(options.model_kwargs),
        off_diagonal=options.off_diagonal,
        seed=options.seed,
        force=options.force,
        allow_identical=options.allow_identical,
        allow_inexact=options.allow_inexact,
        use_ema=not options.no_ema,
    )
    if options.json:
        print(json.dumps(record, indent=2))
        return
    coupling = record["coupling"]
    error, drift = coupling["proof_error"], coupling["norm_drift"]
    print(f"{options.output}: {record['spec']['name']} at width {record['spec']['width']:g}")
    if options.off_diagonal == "zero" and not coupling["exact"]:
        print(f"inexact: even with norms per branch it is {error:.1e} off its parents' mean")
    elif options.off_diagonal == "zero":
        print(f"proof: with norms per branch it is its parents' mean, to {error:.1e} of the logits")
    else:
        print(f"random off-diagonal blocks: {error:.1e} of the logits from its parents' mean")
    print(f"drift: joint normalisation moves its logits by {drift:.1e}")
    load = 'timm.create_model("local-dir:{}", pretrained=True)' if record["timm_loads"] else None
    print("load it with " + (load or 'rbdc.load("{}")').format(options.output))
    if not coupling["class_names_compared"]:
        print("note: a parent carries no class list, so the order of classes was not compared")


_PLAN_OPTIONS = (*PLAN, "warmup_epochs", "images")
_MODEL_KWARGS = "timm's arguments of the full-width model, as timm takes them: depth=6 embed_dim=64"


def _parser() -> ArgumentParser:
    parser = _Parser(
        prog="rbdc",
        version=__version__,
        description="Train wide vision models from scratch for a third less compute.",
    )
    commands = parser.add_subcommands(required=True)
    commands.add_subcommand("plan", _plan_parser(), help="what a training will cost, by level")
    commands.add_subcommand("train", _train_parser(), help="a wide model by RBDC, resumable")
    commands.add_subcommand("status", _status_parser(), help="how far a run is")
    commands.add_subcommand("couple", _couple_parser(), help="two models into one twice as wide")
    return parser


def _plan_parser() -> ArgumentParser:
    parser = _Parser(
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
    add("--model-kwargs", type=str, nargs="*", default=[], metavar="K=V", help=_MODEL_KWARGS)
    add("--json", action="store_true", help="print the plan as JSON")
    add("--plot", type=Path, help="draw the budget by level (.png, .svg or .pdf)")
    return parser


def _train_parser() -> ArgumentParser:
    parser = _Parser(
        description="Train a wide model by RBDC: leaves, couplings, target. Give the same command "
        "again to go on with a run that was stopped.",
        epilog="rbdc train --model deit_base_patch16_224 --data PATH --steps 2 --budget 0.7",
    )
    add = parser.add_argument
    add("--recipe", type=str, help="a shipped recipe or a YAML file; options override it")
    add("--output", type=Path, help="the run's folder; by default runs/RECIPE")
    add("--jobs", type=int, help="siblings side by side; by default 1, on a CPU what is faster")
    add("--dry-run", action="store_true", help="check and print the plan, train nothing")
    for title, settings in (
        ("What to train", Request),
        ("How to train it (the recipe, by timm's names)", Recipe),
        ("On what", Machine),
    ):
        _add_settings(parser.add_argument_group(title), settings)
    return parser


def _add_settings(group: Any, settings: type) -> None:
    """An option for each field; without a default, so that what is not said is not there."""
    hints, texts = get_type_hints(settings), field_help(settings)
    for field in fields(settings):
        name, hint = f"--{field.name.replace('_', '-')}", hints[field.name]
        common = {"default": SUPPRESS, "help": texts[field.name].replace("%", "%%")}
        if hint is bool:
            group.add_argument(name, action=ActionYesNo(no_prefix="no-"), **common)
        elif field.name == "model_kwargs":
            group.add_argument(name, type=str, nargs="*", metavar="K=V", **common)
        elif "tuple[" in str(hint):
            group.add_argument(name, type=str, nargs="+", metavar="X", **common)
        else:
            group.add_argument(name, type=hint, **common)


def _status_parser() -> ArgumentParser:
    parser = _Parser(description="How far a run is.", epilog="rbdc status runs/demo")
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    return parser


def _couple_parser() -> ArgumentParser:
    parser = _Parser(
        description="Couple two models of one architecture into one twice as wide, and prove it.",
        epilog="rbdc couple runs/a runs/b --output runs/wide",
    )
    add = parser.add_argument
    add("first", type=Path, help="an exported folder, or a weight file (then --model)")
    add("second", type=Path, help="likewise, trained from another seed")
    add("--output", type=Path, required=True, help="folder for the wide model, as timm loads it")
    add("--model", type=str, help="timm name of the parents' architecture, for weight files")
    add("--model-kwargs", type=str, nargs="*", default=[], metavar="K=V", help=_MODEL_KWARGS)
    add(
        "--off-diagonal",
        type=Literal["zero", "random"],
        default="zero",
        help="what joins the halves: zeros, or the wide layer's ordinary initialisation",
    )
    add("--seed", type=int, default=0, help="of random off-diagonal blocks")
    add("--force", action="store_true", help="replace an exported model at --output")
    add("--allow-identical", action="store_true", help="couple a model with itself")
    add("--allow-inexact", action="store_true", help="write it even if the proof fails")
    add("--no-ema", action="store_true", help="of checkpoints with averaged weights, the others")
    add("--json", action="store_true", help="print the record as JSON")
    return parser


def _keyword_arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """['depth=6', 'act_layer=gelu'] as timm's --model-kwargs reads them."""
    arguments: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals or key in arguments:
            raise RbdcError(
                f"--model-kwargs got {pair!r}, expected KEY=VALUE, each key once",
                "For example depth=6 channels=[16,32,64,128].",
            )
        try:
            arguments[key] = json.loads(value)
        except ValueError:
            arguments[key] = value
    return arguments


def _check_picture(path: Path) -> None:
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise RbdcError(f"{path} is not a picture's name", "End it in .png, .svg or .pdf.")
    if not path.absolute().parent.is_dir():
        raise RbdcError(f"{path.parent} is not a folder", "Make it first, or choose another.")


def _print(renderable: Any) -> None:
    _console().print(renderable)


def _console(*, quiet: bool = False) -> Any:
    from rich.console import Console

    console = Console(quiet=quiet)
    # a file or a pipe: nothing to fit into
    return console if console.is_terminal else Console(width=140, quiet=quiet)


if __name__ == "__main__":
    sys.exit(main())
