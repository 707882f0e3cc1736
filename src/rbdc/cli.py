"""The command line: `rbdc plan`, `rbdc train`, `rbdc compare` and the others (rbdc.commands).

A user's mistake ends with two lines on stderr and exit code 2.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jsonargparse import Namespace

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
from rbdc.commands.plan import plan_command, plan_parser
from rbdc.commands.reproduce import reproduce_command, reproduce_parser
from rbdc.commands.train import train_command, train_parser
from rbdc.commands.transfer import transfer_command, transfer_parser
from rbdc.errors import Interrupted, RbdcError
from rbdc.options import Parser


@dataclass(frozen=True, slots=True)
class Command:
    """What can be said to a command, what carries it out, and its line in `rbdc --help`."""

    parser: Callable[[], Parser]
    run: Callable[[Namespace], None]
    help: str


COMMANDS = {
    "plan": Command(plan_parser, plan_command, "what a training will cost, by level"),
    "train": Command(train_parser, train_command, "a wide model by RBDC, resumable"),
    "compare": Command(compare_parser, compare_command, "protocols at equal FLOPs"),
    "reproduce": Command(reproduce_parser, reproduce_command, "the paper's experiments"),
    "transfer": Command(transfer_parser, transfer_command, "detection with trained backbones"),
    "status": Command(status_parser, status_command, "how far a run is"),
    "report": Command(report_parser, report_command, "a run as a page to look at"),
    "export": Command(export_parser, export_command, "a run's model with its model card"),
    "couple": Command(couple_parser, couple_command, "two models into one twice as wide"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if "RANK" in os.environ:  # DDP is told to look for unused parameters, and would complain
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        parsed = make_parser().parse_args(list(sys.argv[1:] if arguments is None else arguments))
        COMMANDS[parsed.subcommand].run(parsed[parsed.subcommand])
    except Interrupted as interruption:
        if os.environ.get("RANK", "0") == "0":  # under torchrun one says it for all
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


def make_parser() -> Parser:
    """All that can be said on the command line."""
    parser = Parser(
        prog="rbdc",
        version=__version__,
        description="Train wide vision models from scratch for a third less compute.",
    )
    commands = parser.add_subcommands(required=True)
    for name, command in COMMANDS.items():
        commands.add_subcommand(name, command.parser(), help=command.help)
    return parser


if __name__ == "__main__":
    sys.exit(main())
