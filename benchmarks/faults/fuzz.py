"""Command lines: every option of every command, with values of its type and with others."""

import argparse
import os
import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.faults.child import LIMIT, Running
from benchmarks.faults.matrix import Kind, Outcome, failed, refused, same
from benchmarks.faults.small import finished, fresh
from benchmarks.faults.small import words as small_run
from rbdc.cli import COMMANDS, make_parser
from rbdc.commands.options import Value
from rbdc.settings.schema import choices, schema_of
from rbdc.training.state import State

MOST_SECONDS = 10.0  # of a command that does not train
TRAINING = ("train", "compare", "transfer", "reproduce")  # tried with --dry-run
ENDLESS = {"--serve", "--watch", "--measure", "--measure-again"}  # they end when told, or measure
MODELS = ("resnet18d", "deit_tiny_patch16_224", "convnext_atto", "no_such_model", "vit_tiny", "")
EXPERIMENTS = ("efficiency", "ratio", "padding", "growth") * 5
NUMBERS = ("0", "1", "2", "-1", "0.5", "1e-3", "1e308", "nan", "inf", "9" * 400, "0x10", "1_000")
TEXTS = ("", "x", "null", "true", "a,b", "[1,2]", "{", "é", "\x1b[2J", "\n", "--", "=", "../..",
         "/", "a" * 5000, "%s", "${HOME}", "*", "\udcff", "5 steps", "10%", "1 hour")  # fmt: skip


def kinds() -> list[Kind]:
    """Return the kind of this file."""
    text = "command lines: every option with values of its type and others"
    return [Kind(name="fuzz", text=text, cases=1000, attempt=_attempt)]


def _attempt(number: int, draw: random.Random) -> Outcome:
    folder = fresh("fuzz")
    words = command_line(number, draw, folder)
    trained = folder / "trained"
    ended = Running(words, folder / "said", partial(_begin, folder, trained)).wait(LIMIT)
    said = " ".join(words)[:300]
    if ended.seconds > (LIMIT if trained.exists() else MOST_SECONDS):
        return failed(f"{ended.seconds:.1f} s: {said!r}")
    if ended.code not in (0, 2) or (ended.code == 2 and not ended.refusal):
        return failed(f"{said!r}: {ended.story}")
    if "\x1b" in ended.text:
        return failed(f"{said!r}: an escape code is printed")
    shutil.rmtree(folder)
    seconds = round(ended.seconds, 1)
    return refused(ended.refusal, seconds=seconds) if ended.code else same(seconds=seconds)


def _begin(folder: Path, trained: Path) -> None:
    """Go to a folder, as an output may be any name, and mark it when a step is taken.

    `--dry-run` also trains where speed must be measured: hours are asked for, or a budget of them.
    """
    os.chdir(folder)
    update = State.update

    def marked(state: State, micro: Any) -> Any:
        trained.touch()
        return update(state, micro)

    State.update = marked  # type: ignore[assignment, method-assign]


def command_line(number: int, draw: random.Random, folder: Path) -> list[str]:
    """Return a command line: each command, and each of its options, has its turn."""
    name = list(COMMANDS)[number % len(COMMANDS)]
    parser = make_parser(name)._subparsers._group_actions[0].choices[name]  # type: ignore[union-attr, index]
    options = [action for action in parser._actions if action.dest != "help"]
    named = [action for action in options if action.option_strings]
    turn = named[number // len(COMMANDS) % len(named)]
    chosen = [turn, *(draw.choice(named) for _ in range(draw.choice((0, 0, 1, 2))))]
    small = name == "train" and draw.random() < 0.8
    words = small_run("memory", folder / "output") if small else [name]
    for action in options:
        if not action.option_strings and draw.random() < 0.95:
            words += _place(action, draw)
    for action in dict.fromkeys(chosen):
        if ENDLESS.isdisjoint(action.option_strings):
            words += _option(action, draw)
    needed = {"--output": str(folder / "output"), "--device": "cpu", "--jobs": "1"}
    known = {text for action in named for text in action.option_strings}
    if name in TRAINING:
        words += ["--dry-run"]
    return words + [word for option, value in needed.items() if option in known
                    and option not in words for word in (option, value)]  # fmt: skip


def _place(action: argparse.Action, draw: random.Random) -> list[str]:
    """Return the words of an argument without a name."""
    if action.dest in ("run", "runs"):
        return [draw.choice((str(finished("memory")), str(finished("memory")), "x", "/", ""))]
    if action.dest in ("first", "second"):
        run = finished("memory")
        models = [str(path) for path in run.glob("jobs/*/model")]
        return [draw.choice([*models, str(run), "x"])]
    if action.dest == "model":
        return [draw.choice(MODELS)]
    return [draw.choice((*TEXTS, *EXPERIMENTS))]


def _option(action: argparse.Action, draw: random.Random) -> list[str]:
    """Return an option with a value: mostly of its type, sometimes of another, or none."""
    option = draw.choice(action.option_strings)
    if not isinstance(action, Value):
        return [option] if draw.random() < 0.95 else [option, draw.choice(TEXTS)]
    if draw.random() < 0.05:
        return [option]
    value = _value(action, draw) if draw.random() < 0.75 else draw.choice((*TEXTS, *NUMBERS))
    return [f"{option}={value}"] if draw.random() < 0.2 else [option, value]


def _value(action: Value, draw: random.Random) -> str:
    schema: dict[str, Any] = schema_of(action.hint)
    if named := choices(schema):
        return draw.choice(named)
    if action.dest == "model":
        return draw.choice(MODELS)
    text = str(schema)
    if "number" in text or "integer" in text:
        if draw.random() < 0.4:
            return draw.choice(NUMBERS)
        return draw.choice((str(draw.randrange(1, 4)), f"{draw.uniform(0.1, 1):.3f}"))
    return draw.choice(TEXTS)
