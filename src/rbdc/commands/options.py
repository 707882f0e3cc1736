"""The command line's parser: argparse, with options made from the fields of settings classes.

Values are read and checked by pydantic, so that an option and the same line of a recipe file mean
the same and are refused alike. Options of a settings class that the user did not give are absent
from the namespace: they must not override a recipe.
"""

import json
from argparse import (
    SUPPRESS,
    Action,
    ArgumentParser,
    BooleanOptionalAction,
    HelpFormatter,
    Namespace,
)
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from shutil import get_terminal_size
from textwrap import wrap
from typing import Any, NoReturn

from rbdc.errors import RbdcError, nearest
from rbdc.settings import Augmentation, Cluster, Machine, Recipe
from rbdc.settings.schema import choices, read_value, read_words, schema_of, schemas

WIDTH = 100  # columns of a help text, at most
MODEL_KWARGS = "timm arguments of the full-width model, such as depth=6 embed_dim=64"
BRIEF_REQUEST = (
    "model", "data", "data_download", "steps", "budget", "epochs", "baseline_epochs",
    "with_baseline", "seed", "transition",
)  # fmt: skip
BRIEF_RECIPE = ("batch_size", "lr", "opt", "weight_decay", "warmup_epochs", "amp")


class Parser(ArgumentParser):
    """A parser whose mistakes are RbdcErrors and whose help is short, or complete on demand."""

    def __init__(self, **texts: Any) -> None:
        super().__init__(**texts, add_help=False, allow_abbrev=False, formatter_class=_Formatter)
        self.brief: set[str] = set()
        """Names of the options that the short help shows."""
        self.add_argument("-h", "--help", action=_Help, nargs="?", default=SUPPRESS, metavar="all",
                          help="show the common options, or all of them")  # fmt: skip

    def add(
        self, *names: str, type: Any = str, group: Any = None, brief: bool = True, **texts: Any
    ) -> None:
        """Add an option that is no setting; its value is read as `type`, a list if it has nargs."""
        if texts.get("action") != "store_true":
            texts |= {"action": _Value, "type": None, "hint": type}
            if names[0].startswith("-"):
                texts.setdefault("metavar", _metavar(schema_of(type)))
        action = (group or self).add_argument(*names, **texts)
        if brief:
            self.brief.add(action.dest)

    def add_settings(
        self,
        title: str,
        settings: type,
        *,
        brief: Collection[str] = (),
        only: Collection[str] | None = None,
        without: Collection[str] = (),
    ) -> None:
        """Add an option for each field, or each of `only`; the short help shows `brief`."""
        group = self.add_argument_group(title)
        for name, schema in schemas(settings).items():
            if name in without or (only is not None and name not in only):
                continue
            option = f"--{name.replace('_', '-')}"
            common: dict[str, Any] = {
                "default": SUPPRESS,
                "help": help_of(schema).replace("%", "%%"),
            }
            if _main_type(schema) == "boolean":
                group.add_argument(option, action=BooleanOptionalAction, **common)
            else:
                action: Any = partial(SettingAction, settings=settings)
                nargs = {"object": "*", "array": "+"}.get(_main_type(schema))
                group.add_argument(
                    option, action=action, nargs=nargs, metavar=_metavar(schema), **common
                )
        self.brief.update(brief)

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
        formatter = self._get_formatter()
        needed = [
            " ".join([*action.option_strings, str(action.metavar or action.dest.upper())])
            for action in self._actions
            if action.required or not action.option_strings
        ]
        formatter.add_text(" ".join(["usage:", self.prog, *needed, "[options]"]))
        formatter.add_text(self.description)
        left_out = 0
        for group in self._action_groups:
            shown = [
                action
                for action in group._group_actions
                if complete or action.required or action.dest in {"help", *self.brief}
            ]
            left_out += len(group._group_actions) - len(shown)
            formatter.start_section(group.title)
            formatter.add_arguments(shown)
            formatter.end_section()
        formatter.add_text(f"Example: {self.epilog}")
        more = f"`{self.prog} --help all` shows {left_out} more options.\n" if left_out else ""
        return formatter.format_help() + more


class _Formatter(HelpFormatter):
    """Help of one line per option where it fits."""

    def __init__(self, prog: str) -> None:
        columns = get_terminal_size((WIDTH, 0)).columns
        super().__init__(prog, max_help_position=26, width=min(WIDTH, columns) - 2)

    def _get_help_string(self, action: Action) -> str:
        default = action.default if isinstance(action, _Value) else None
        words = " ".join(map(str, default)) if isinstance(default, list) else default
        return f"{action.help} (default {words})" if words not in (None, "") else str(action.help)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(text, width, break_on_hyphens=False)

    def _format_args(self, action: Action, default_metavar: str) -> str:
        shown = str(action.metavar or default_metavar)
        return f"{shown} ..." if action.nargs in ("*", "+") else super()._format_args(action, shown)

    def _format_action_invocation(self, action: Action) -> str:
        if isinstance(action, BooleanOptionalAction):
            return f"--[no-]{action.option_strings[0].removeprefix('--')}"
        return super()._format_action_invocation(action)


class _Help(Action):
    """Print the short help; after `--help all` the complete one."""

    def __call__(self, parser: Any, _namespace: Any, values: Any, _option: Any = None) -> NoReturn:
        if values not in (None, "all"):
            raise RbdcError(f"--help got {values}, expected all or nothing", "Say --help all.")
        print(parser.format_help(complete=values == "all"), end="")
        raise SystemExit(0)


class _Value(Action):
    """Read an option that is no setting."""

    def __init__(self, *, hint: Any, **texts: Any) -> None:
        super().__init__(**texts)
        self.hint = hint

    def __call__(self, _parser: Any, namespace: Namespace, values: Any, option: Any = None) -> None:
        read = partial(read_value, self.hint, option or self.dest)
        setattr(namespace, self.dest, [*map(read, values)] if self.nargs else read(values))


class SettingAction(Action):
    """Read a setting as its class declares it."""

    def __init__(self, *, settings: type, **texts: Any) -> None:
        super().__init__(**texts)
        self.settings = settings

    def __call__(
        self, _parser: Any, namespace: Namespace, values: Any, _option: Any = None
    ) -> None:
        pairs = self.nargs == "*"
        read = keyword_arguments(values) if pairs else read_words(self.settings, self.dest, values)
        setattr(namespace, self.dest, read)


def add_recipe(parser: Parser) -> None:
    """Add the options of a classifier's recipe."""
    images = list(schemas(Augmentation))
    parser.add_settings(
        "How to train (recipe, timm's names)", Recipe, brief=BRIEF_RECIPE, without=images
    )
    parser.add_settings("Augmentation (recipe, timm's names)", Recipe, only=images)


def add_machine(parser: Parser) -> None:
    """Add the options that say where trainings run."""
    parser.add_settings("Machine", Machine, brief=("device", "workers"))
    parser.add_settings("Cluster", Cluster, brief=("engine",))


def help_of(schema: Mapping[str, Any]) -> str:
    """Return a setting's help with its default, which a recipe may change."""
    text = " ".join(schema.get("description", "").split())
    default = schema.get("default")
    if default is None or default is False or default in ("", []):
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


def keyword_arguments(pairs: Sequence[str], option: str = "--model-kwargs") -> dict[str, Any]:
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


def given_settings(options: Namespace, settings: type) -> dict[str, Any]:
    """Return the settings of a class that the user gave on the command line, and no others."""
    return {name: getattr(options, name) for name in schemas(settings) if name in options}


def default_recipe(given: Mapping[str, Any]) -> str:
    """Return the recipe of a run that names none: its model's family's, or the demo."""
    if "model" not in given:
        return "demo"
    from rbdc.models import as_spec, family

    return family(as_spec(given["model"])).recipe


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
