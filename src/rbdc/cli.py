"""The command line: `rbdc plan`, `rbdc train`, `rbdc compare` and the others (rbdc.commands).

A user's mistake prints two lines on stderr and exits with code 2.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rbdc import __version__
from rbdc.commands.compare import compare_command, compare_parser
from rbdc.commands.couple import couple_command, couple_parser
from rbdc.commands.look import (
    export_command,
    export_parser,
    report_command,
    report_parser,
    status_command,
    status_parser,
)
from rbdc.commands.options import Parser
from rbdc.commands.plan import plan_command, plan_parser
from rbdc.commands.reproduce import reproduce_command, reproduce_parser
from rbdc.commands.train import train_command, train_parser
from rbdc.commands.transfer import transfer_command, transfer_parser
from rbdc.errors import Interrupted, RbdcError, nearest


@dataclass(frozen=True, slots=True)
class Command:
    """A command: its parser, the function that runs it, and its line in `rbdc --help`."""

    parser: Callable[[], Parser]
    run: Callable[[Namespace], None]
    help: str


COMMANDS = {
    "plan": Command(plan_parser, plan_command, "print what a training will cost, per level"),
    "train": Command(train_parser, train_command, "train a wide model by RBDC"),
    "compare": Command(compare_parser, compare_command, "compare protocols at equal FLOPs"),
    "reproduce": Command(reproduce_parser, reproduce_command, "run the paper's experiments"),
    "transfer": Command(transfer_parser, transfer_command, "train detectors on trained backbones"),
    "status": Command(status_parser, status_command, "show how far a run is"),
    "report": Command(report_parser, report_command, "write a run as a page to look at"),
    "export": Command(export_parser, export_command, "write a run's model with its model card"),
    "couple": Command(
        couple_parser, couple_command, "couple two models into one of twice the width"
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if "RANK" in os.environ:  # DDP warns about find_unused_parameters, which is set on purpose
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        words = list(sys.argv[1:] if arguments is None else arguments)
        _check_command(words)
        parsed = make_parser(words[0]).parse_args(words)
        COMMANDS[parsed.subcommand].run(parsed)
    except Interrupted as interruption:
        if os.environ.get("RANK", "0") == "0":  # under torchrun, one process prints for all
            print(f"{interruption}; saved. The same command goes on from there.", file=sys.stderr)
        return 75  # EX_TEMPFAIL: try again later
    except RbdcError as error:
        print(f"error: {error.problem}\n{error.remedy}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:  # no space, no permission: nothing half-written is left behind
        print(f"error: {error}\nCheck the disk and its permissions.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def make_parser(only: str | None = None) -> Parser:
    """Return the parser of the whole command line, or with the options of one command only."""
    parser = Parser(
        prog="rbdc",
        description="Train wide vision models from scratch for a third less compute.",
        epilog="rbdc train --help",
    )
    parser.add_argument("--version", action="version", version=f"rbdc {__version__}")
    parser.brief |= {"version", "subcommand"}
    named: Any = _named
    commands = parser.add_subparsers(
        title="commands",
        prog="rbdc",
        dest="subcommand",
        metavar="COMMAND",
        required=True,
        parser_class=named,
    )
    for name, command in COMMANDS.items():
        make = command.parser if only in (None, name) else Parser
        commands.add_parser(name, help=command.help, make=make)
    return parser


def _named(*, prog: str, make: Callable[[], Parser], **_texts: Any) -> Parser:
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
        raise RbdcError(
            f"no command is called {words[0]!r}",
            nearest(words[0], COMMANDS) or f"Known are {known}.",
        )


if __name__ == "__main__":
    sys.exit(main())
