"""The command line's parser: argparse, with options made from the fields of settings classes.

Values are read and checked by pydantic, so that an option and the same line of a recipe file mean
the same and are refused alike. Options of a settings class that the user did not give are absent
from the namespace: they must not override a recipe.
"""

import argparse
import json
from argparse import SUPPRESS, BooleanOptionalAction
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from shutil import get_terminal_size
from textwrap import wrap
from typing import Any, NoReturn, get_type_hints

from rbdc.errors import RbdcError, nearest
from rbdc.settings.schema import choices, read_words, schema_of, schemas

WIDTH = 100  # columns of a help text, at most


class Parser(argparse.ArgumentParser):
    """A parser whose mistakes are RbdcErrors and whose help is short, or complete on demand."""

    def __init__(self, **texts: Any) -> None:
        super().__init__(**texts, add_help=False, allow_abbrev=False, formatter_class=_Formatter)
        self.brief: set[str] = set()
        """Names of the options that the short help shows."""
        self.add("-h", "--help", action=_Help, nargs="?", default=SUPPRESS, metavar="all",
                 help="show the common options, or all of them")  # fmt: skip

    def add(
        self, *names: str, type: Any = str, group: Any = None, brief: bool = True, **texts: Any
    ) -> None:
        """Add an option whose words are read as `type`; with nargs, each of them is."""
        if "action" not in texts:
            schema, hint = schema_of(type), list[type] if "nargs" in texts else type
            nargs = {"object": "*", "array": "+"}.get(_main_type(schema))
            texts = {"action": Value, "hint": hint, "nargs": nargs, **texts}
            if names[0].startswith("-"):
                texts.setdefault("metavar", _metavar(schema))
        action = (group or self).add_argument(*names, **texts)
        if brief:
            self.brief.add(action.dest)

    def add_settings(
        self, title: str, settings: type, *, brief: Collection[str] = (), only: Collection[str] = ()
    ) -> None:
        """Add an option for each field, or each of `only`; the short help shows `brief`."""
        group, hints = self.add_argument_group(title), get_type_hints(settings, include_extras=True)
        for name, schema in schemas(settings).items():
            if not only or name in only:
                text = " ".join(schema["description"].split()).replace("%", "%%")
                switch = {"action": BooleanOptionalAction} if hints[name] is bool else {}
                self.add(f"--{name.replace('_', '-')}", type=hints[name], group=group,
                         brief=name in brief, default=SUPPRESS,
                         help=_with_default(text, schema.get("default")), **switch)  # fmt: skip

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and refuse an unknown option with the nearest known one."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            known = [option for action in self._actions for option in action.option_strings]
            wrong = next((word for word in unknown if word.startswith("-")), unknown[0])
            near = nearest(wrong.partition("=")[0], known) if wrong.startswith("-") else ""
            raise RbdcError(f"{self.prog} does not know {wrong}", near or self._remedy)
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Raise what argparse found wrong."""
        raise RbdcError(message, self._remedy)

    @property
    def _remedy(self) -> str:
        return f"`{self.prog} --help all` lists the options."

    def format_help(self, *, complete: bool = False) -> str:
        """Return the help text: the options in `brief`, or every option."""
        needed = [a for a in self._actions if a.required or not a.option_strings]
        said = [" ".join([*a.option_strings, str(a.metavar or a.dest.upper())]) for a in needed]
        shown = {a for a in self._actions if complete or a in needed or a.dest in self.brief}
        formatter = self._get_formatter()
        formatter.add_text(" ".join(["usage:", self.prog, *said, "[options]"]))
        formatter.add_text(self.description)
        for group in self._action_groups:
            formatter.start_section(group.title)
            formatter.add_arguments(a for a in group._group_actions if a in shown)
            formatter.end_section()
        formatter.add_text(f"Example: {self.epilog}")
        left = len(self._actions) - len(shown)
        more = f"`{self.prog} --help all` shows {left} more options.\n" if left else ""
        return formatter.format_help() + more


class _Formatter(argparse.HelpFormatter):
    """Help of one line per option where it fits."""

    def __init__(self, prog: str) -> None:
        columns = get_terminal_size((WIDTH, 0)).columns
        super().__init__(prog, max_help_position=26, width=min(WIDTH, columns) - 2)

    def _get_help_string(self, action: argparse.Action) -> str:
        return _with_default(str(action.help), action.default)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(text, width, break_on_hyphens=False)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        shown = str(action.metavar or default_metavar)
        return f"{shown} ..." if action.nargs in ("*", "+") else super()._format_args(action, shown)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, BooleanOptionalAction):
            return f"--[no-]{action.option_strings[0].removeprefix('--')}"
        return super()._format_action_invocation(action)


class _Help(argparse.Action):
    """Print the short help; after `--help all` the complete one."""

    def __call__(self, parser: Any, _namespace: Any, values: Any, _option: Any = None) -> NoReturn:
        if values not in (None, "all"):
            raise RbdcError(f"--help got {values}, expected all or nothing", "Say --help all.")
        print(parser.format_help(complete=values == "all"), end="")
        raise SystemExit(0)


class Value(argparse.Action):
    """Read the words of an option as `hint`, the type that it was added with."""

    def __init__(self, *, hint: Any, **texts: Any) -> None:
        super().__init__(**texts)
        self.hint = hint

    def __call__(self, _parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        read = _read_keywords if self.nargs == "*" else partial(read_words, self.hint)
        setattr(namespace, self.dest, read(option or self.dest, values))


def _with_default(text: str, default: Any) -> str:
    """Return a help text with the option's default, if it has one."""
    if default in (None, SUPPRESS, "", [], {}) or default is False:
        return text
    listed = default if isinstance(default, list) else [default]
    words = ("on" if x is True else f"{x:.4g}" if isinstance(x, float) else str(x) for x in listed)
    return f"{text} (default {' '.join(words)})"


def _main_type(schema: Mapping[str, Any]) -> str:
    """Return the JSON type of a setting, the first one where it may be null."""
    return str(schema.get("type") or schema["anyOf"][0].get("type"))


def _metavar(schema: Mapping[str, Any]) -> str:
    if named := choices(dict(schema)):
        return "{" + ",".join(named) + "}" if _main_type(schema) != "array" else "NAME"
    kinds = {"number": "X", "array": "X", "integer": "N", "object": "K=V"}
    return kinds.get(_main_type(schema), "TEXT")


def _read_keywords(option: str, pairs: Sequence[str]) -> dict[str, Any]:
    """Read ['depth=6', 'act_layer=gelu'] as timm's --model-kwargs does."""
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


def given_settings(options: argparse.Namespace, settings: type) -> dict[str, Any]:
    """Return the settings of a class that the user gave on the command line, and no others."""
    return {name: getattr(options, name) for name in schemas(settings) if name in options}


def comma_separated(words: Sequence[str]) -> tuple[str, ...]:
    """Split `a,b c` into three."""
    return tuple(word for text in words for word in text.split(",") if word)


def comma_separated_numbers(option: str, words: Sequence[str]) -> tuple[float, ...]:
    """Read `0.5,1 2` as three numbers."""
    try:
        return tuple(float(word) for word in comma_separated(words))
    except ValueError:
        raise RbdcError(
            f"{option} got {' '.join(words)}, expected numbers", f"For example {option} 0.5,1.0"
        ) from None
