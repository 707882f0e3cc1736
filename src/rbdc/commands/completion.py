"""`rbdc --completion SHELL`: a script with which a shell completes commands, options and values."""

import argparse
from pathlib import Path
from typing import Any, NoReturn, get_args

from rbdc.commands.options import Value
from rbdc.errors import RbdcError, nearest
from rbdc.settings.schema import choices, schema_of

SHELLS = ("bash", "zsh", "fish")


class PrintCompletion(argparse.Action):
    """Print the script for the shell that is named."""

    def __call__(self, parser: Any, _namespace: Any, values: Any, _option: Any = None) -> NoReturn:
        if values not in SHELLS:
            expected = f"--completion got {values}, expected one of {', '.join(SHELLS)}"
            raise RbdcError(expected, nearest(values, SHELLS) or "Say --completion bash.")
        import shtab

        _tell_values(parser)
        print(shtab.complete(parser, values))
        raise SystemExit(0)


def _tell_values(parser: argparse.ArgumentParser) -> None:
    """Give each option what shtab completes it with: the names that it may have, or files.

    Pydantic checks values in our parser, so argparse, and with it shtab, does not know them.
    """
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _tell_values(command)
        elif isinstance(action, Value):
            if action.hint is Path or Path in get_args(action.hint):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            else:
                action.choices = choices(schema_of(action.hint)) or None
