"""What can be said on the command line. The settings' own fields become options."""

import json
import re
from argparse import SUPPRESS
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, NoReturn, get_type_hints

import yaml
from jsonargparse import ActionYesNo, ArgumentParser, Namespace

from rbdc.errors import RbdcError, nearest
from rbdc.recipes import PLAN, SPEND, Machine, Recipe, Request, field_help

PLAN_OPTIONS = (*PLAN, "warmup_epochs", "images")
_MODEL_KWARGS = "timm's arguments of the full-width model, as timm takes them: depth=6 embed_dim=64"


class _Parser(ArgumentParser):
    def error(self, message: str, _error: Exception | None = None) -> NoReturn:
        message = _plainly(message)
        known = [option for action in self._actions for option in action.option_strings]
        wrong = next((word for word in message.split() if word.startswith("--")), "")
        program = self.prog.replace(" [options]", "")
        raise RbdcError(
            " ".join(message.split()),
            (nearest(wrong, known) if wrong not in known else "")
            or f"`{program} --help` lists what can be said.",
        )


def _plainly(message: str) -> str:
    """jsonargparse's words in ours."""
    key = re.search(r'Parser key "([\w.]+)"', message)
    given = re.search(r"(?:Given value|Got value): (.*)", message)
    kinds = list(dict.fromkeys(re.findall(r"[Ee]xpected an? <class '(\w+)'>", message)))
    if key and given and kinds:
        words = {"float": "a number", "int": "a whole number", "NoneType": "null"}
        expected = " or ".join(words.get(kind, kind) for kind in kinds)
        option = key[1].rpartition(".")[2].replace("_", "-")
        return f"--{option} got {given[1].strip()}, expected {expected}"
    if missing := re.search(r"arguments are required: ([\w.]+)", message):
        command, _, name = missing[1].rpartition(".")
        return f"rbdc {command}: {name} is not given"
    if message.startswith('expected "subcommand"'):
        return (
            "no command was given: say rbdc plan, train, compare, reproduce, status, report, "
            "export or couple"
        )
    return message


def make_parser(version: str) -> ArgumentParser:
    parser = _Parser(
        prog="rbdc",
        version=version,
        description="Train wide vision models from scratch for a third less compute.",
    )
    commands = parser.add_subcommands(required=True)
    commands.add_subcommand("plan", plan_parser(), help="what a training will cost, by level")
    commands.add_subcommand("train", _train_parser(), help="a wide model by RBDC, resumable")
    commands.add_subcommand("compare", _compare_parser(), help="protocols at equal FLOPs")
    commands.add_subcommand("reproduce", _reproduce_parser(), help="the paper's experiments")
    commands.add_subcommand("status", _status_parser(), help="how far a run is")
    commands.add_subcommand("report", _report_parser(), help="a run as a page to look at")
    commands.add_subcommand("export", _export_parser(), help="a run's model with its model card")
    commands.add_subcommand("couple", _couple_parser(), help="two models into one twice as wide")
    return parser


def plan_parser() -> ArgumentParser:
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


def _compare_parser() -> ArgumentParser:
    parser = _Parser(
        description="Put protocols side by side at the same FLOPs, with all parents paid for. Give "
        "the same command again to go on; add protocols, budgets or seeds to it.",
        epilog="rbdc compare --protocols standard,rbdc:2,net2net --budgets 0.5,1.0 --seeds 3",
    )
    add = parser.add_argument
    add("--protocols", type=str, nargs="+", metavar="P", default=["standard,rbdc:1,rbdc:2"],
        help="names, with options after colons (rbdc:2:carry); `list` lists them")  # fmt: skip
    add("--budgets", type=str, nargs="+", metavar="B", default=["0.5,1.0"],
        help="FLOPs of everything, relative to standard training")  # fmt: skip
    add("--seeds", type=int, default=3, help="how many")
    add("--standard-budgets", type=str, nargs="+", metavar="B", default=[],
        help="more budgets for standard training alone: what the others are to reach")  # fmt: skip
    add("--tune", type=str, nargs="+", metavar="LR", default=[],
        help="learning rates to try for each protocol, the same for all")  # fmt: skip
    add("--tune-budget", type=float, help="by default the largest budget")
    add("--recipe", type=str, help="a shipped recipe or a YAML file; options override it")
    add("--output", type=Path, help="the comparison's folder; by default runs/compare-RECIPE")
    add("--jobs", type=int, help="trainings side by side; by default 1, on a CPU what is faster")
    add("--dry-run", action="store_true", help="check and print what it costs, train nothing")
    add("--json", action="store_true", help="print the summary as JSON")
    budgets = {*SPEND, "steps", "schedule", "costs", "rounding", "seed", "with_baseline"}
    _add_settings(parser.add_argument_group("What to compare"), Request, without=budgets)
    _add_settings(parser.add_argument_group("How to train (the recipe)"), Recipe)
    _add_settings(parser.add_argument_group("On what"), Machine)
    return parser


def _reproduce_parser() -> ArgumentParser:
    parser = _Parser(
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
    _add_settings(parser.add_argument_group("On what"), Machine)
    return parser


def _add_settings(group: Any, settings: type, without: Iterable[str] = ()) -> None:
    """An option for each field; without a default, so that what is not said is not there.

    The help names the field's own default, which a recipe may change.
    """
    hints, texts = get_type_hints(settings), field_help(settings)
    for field in fields(settings):
        if field.name in without:
            continue
        name, hint = f"--{field.name.replace('_', '-')}", hints[field.name]
        known = field.default if field.default is not MISSING else None
        default = f" (default {known})" if known not in (None, "", ()) else ""
        text = (texts[field.name] + default).replace("%", "%%")
        common = {"default": SUPPRESS, "help": text}
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
    add = parser.add_argument
    add("run", type=Path, help="the run's folder")
    add("--watch", action="store_true", help="show it live until the run is over; Ctrl-C ends it")
    add("--every", type=float, metavar="SECONDS", help="with --watch, how often; by default 2")
    add("--json", action="store_true", help="print it as JSON; with --watch, a line a change")
    return parser


def _report_parser() -> ArgumentParser:
    parser = _Parser(
        description="Runs and comparisons as one self-contained page: the tree, the budget, "
        "learning curves, tables, weights, and how to repeat it.",
        epilog="rbdc report runs/demo",
    )
    add = parser.add_argument
    add("runs", type=Path, nargs="+", help="folders of runs or of comparisons")
    add("--output", type=Path, help="the page; by default report.html in the first run's folder")
    add("--figures", type=Path, help="folder for figures as PNG, SVG and PDF files")
    add("--serve", action="store_true",
        help="show it at 127.0.0.1 and keep it up to date instead of writing it")  # fmt: skip
    add("--port", type=int, default=0, help="for --serve; by default a free one")
    return parser


def _export_parser() -> ArgumentParser:
    parser = _Parser(
        description="The model of a finished run as a folder for a model hub: weights as timm "
        "loads them, a model card, figures, and the settings to repeat it with.",
        epilog="rbdc export runs/demo --output demo-model",
    )
    add = parser.add_argument
    add("run", type=Path, help="the run's folder")
    add("--output", type=Path, required=True, help="the folder to write")
    add("--license", type=str, help="of the model, by Hugging Face's name; by default none is said")
    add("--force", action="store_true", help="replace an earlier export at --output")
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


def keyword_arguments(pairs: Sequence[str], option: str = "--model-kwargs") -> dict[str, Any]:
    """['depth=6', 'act_layer=gelu'] as timm's --model-kwargs reads them."""
    arguments: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals or key in arguments:
            raise RbdcError(
                f"{option} got {pair!r}, expected KEY=VALUE, each key once",
                "For example depth=6 channels=[16,32,64,128].",
            )
        try:
            arguments[key] = json.loads(value)
        except ValueError:
            arguments[key] = value
    return arguments


def given_settings(options: Namespace, settings: type) -> dict[str, Any]:
    """What the command line says of a settings dataclass; what it does not say is not there."""
    said = {field.name: options[field.name] for field in fields(settings) if field.name in options}
    for name, value in said.items():
        if name == "model_kwargs":
            said[name] = keyword_arguments(value)
        elif isinstance(value, list):
            said[name] = _sequence(value)
    return said


def comma_separated(words: Sequence[str]) -> tuple[str, ...]:
    """`a,b c` as three."""
    return tuple(word for text in words for word in text.split(",") if word)


def comma_separated_numbers(option: str, words: Sequence[str]) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in comma_separated(words))
    except ValueError:
        raise RbdcError(
            f"{option} got {' '.join(words)}, expected numbers", f"For example {option} 0.5,1.0"
        ) from None


def _sequence(words: Sequence[str]) -> tuple[Any, ...] | None:
    """`0.08 1.0`, `0.08,1.0` or `[0.08, 1.0]` as numbers; `null` as none at all."""
    values = yaml.safe_load("[" + ",".join(words).strip("[]") + "]")
    return None if values == [None] else tuple(values)
