"""The command line: `rbdc plan`, `rbdc train`, `rbdc compare` and the others (rbdc.commands).

A user's mistake prints two lines on stderr and exits with code 2.
"""

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rbdc import __version__
from rbdc.errors import Interrupted, RbdcError, nearest, printable
from rbdc.stops import EXIT_CODE, Stopped, stopping

if TYPE_CHECKING:
    from rbdc.commands.options import Parser

COMMANDS = {
    "plan": ("plan", "print what a training will cost, per level"),
    "train": ("train", "train a wide model by RBDC"),
    "compare": ("compare", "compare protocols at equal FLOPs"),
    "reproduce": ("reproduce", "run the paper's experiments"),
    "transfer": ("transfer", "train detectors on trained backbones"),
    "status": ("look", "show how far a run is"),
    "report": ("look", "write a run as a page to look at"),
    "doctor": ("look", "verify a run's checksums, and repair it"),
    "export": ("look", "write a run's model with its model card"),
    "couple": ("couple", "couple two models into one of twice the width"),
    "explain": ("explain", "print how a model couples, and how exactly"),
}
"""The module of each command (in rbdc.commands: NAME_parser and NAME_command), and its help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. A stop signal ends it at any moment."""
    usual, warnings.formatwarning = warnings.formatwarning, _warning_line
    try:
        with stopping():
            return _run(list(sys.argv[1:] if arguments is None else arguments))
    except Stopped as stop:
        _say_once(f"{stop}; nothing is left half-written. Give the same command again to go on.")
        return EXIT_CODE
    finally:
        warnings.formatwarning = usual


def _run(words: Sequence[str]) -> int:
    if "RANK" in os.environ:  # DDP warns about find_unused_parameters, which is set on purpose
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        _check_command(words)
        whole = words[0].startswith("--completion")
        parsed = make_parser(None if whole else words[0]).parse_args(words)
        _imported(parsed.subcommand, "command")(parsed)
    except Interrupted as interruption:
        _say_once(f"{interruption}; saved. The same command goes on from there.")
        return EXIT_CODE
    except RbdcError as error:
        print(f"error: {error.problem}\n{error.remedy}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:  # no space, no permission: nothing half-written is left behind
        reason = printable(f"error: {error}")
        print(f"{reason}\nCheck the disk and its permissions.", file=sys.stderr)
        return 2
    return 0


def _say_once(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # under torchrun, one process prints for all
        print(line, file=sys.stderr)


def _warning_line(message: Warning | str, *_place: Any, **_more: Any) -> str:
    """Return a warning as a line, with the escape codes of file names spelled out."""
    return f"warning: {printable(' '.join(str(message).split()))}\n"


def _imported(command: str, end: str) -> Any:
    """Import a command's module: that of one command only, which takes the least time."""
    module = import_module(f"rbdc.commands.{COMMANDS[command][0]}")
    return getattr(module, f"{command}_{end}")


def make_parser(only: str | None = None) -> "Parser":
    """Return the parser of the whole command line, or with the options of one command only."""
    from rbdc.commands.completion import SHELLS, PrintCompletion
    from rbdc.commands.options import Parser

    parser = Parser(
        prog="rbdc",
        description="Train wide vision models from scratch for a third less compute.",
        epilog="rbdc train --help",
    )
    parser.add("--version", action="version", version=f"rbdc {__version__}")
    text = f"print a script that completes commands: {', '.join(SHELLS)}"
    parser.add("--completion", action=PrintCompletion, metavar="SHELL", help=text)
    named: Any = _named
    texts = {"title": "commands", "metavar": "COMMAND", "dest": "subcommand"}
    commands = parser.add_subparsers(**texts, prog="rbdc", required=True, parser_class=named)
    for name, (_, text) in COMMANDS.items():
        make = _imported(name, "parser") if only in (None, name) else Parser
        commands.add_parser(name, help=text, make=make)
    return parser


def _named(*, prog: str, make: Callable[[], "Parser"], **_texts: Any) -> "Parser":
    """Return a command's own parser, under the name that argparse gives it."""
    parser = make()
    parser.prog = prog
    return parser


def _check_command(words: Sequence[str]) -> None:
    """Refuse a command that does not exist with the nearest one that does."""
    known = ", ".join(COMMANDS)
    if not words:
        raise RbdcError("no command was given", f"Say rbdc and one of {known}.")
    if not words[0].startswith("-") and words[0] not in COMMANDS:
        remedy = nearest(words[0], COMMANDS) or f"Known are {known}."
        raise RbdcError(f"no command is called {words[0]!r}", remedy)


if __name__ == "__main__":
    sys.exit(main())
