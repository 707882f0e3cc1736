"""The reference, generated from the code while the site is built.

A page in docs/reference is a title and a few words. As Sphinx reads it, this extension appends what
the code says: the commands, the settings, the shipped files, the public names.
"""

import inspect
import re
from argparse import SUPPRESS, Action, _SubParsersAction
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from textwrap import fill
from typing import Any, get_args, get_origin

from sphinx.application import Sphinx

import rbdc
from rbdc.cli import make_parser
from rbdc.settings import (
    Augmentation,
    Cluster,
    DetectionRecipe,
    Machine,
    Optimization,
    Recipe,
    Request,
    shipped_recipes,
)
from rbdc.settings.files import RECIPES
from rbdc.settings.schema import kind, limits, nullable, schema_of, schemas

HEAD = ("setting", "type", "default", "meaning")
SETTINGS: dict[type, str] = {
    Request: "What to train",
    Augmentation: "What happens to an image",
    Recipe: "How a model is trained",
    Optimization: "How weights are updated",
    DetectionRecipe: "How a detector is trained",
    Machine: "On what it runs",
    Cluster: "On a cluster",
}


def commands() -> str:
    """Return every command: what it does, and its options."""
    parser = make_parser()
    (found,) = [action for action in parser._actions if isinstance(action, _SubParsersAction)]
    return "\n".join(_command(name, command) for name, command in found.choices.items())


def _command(name: str, parser: Any) -> str:
    actions = [action for action in parser._actions if action.dest != "help"]
    needed = [_said(action) for action in actions if action.required]
    parts = [
        f"## rbdc {name}",
        parser.description,
        _fenced("text", " ".join(["rbdc", name, *needed, "[options]"])),
        f"For example `{parser.epilog}`",
    ]
    arguments, plain, *groups = parser._action_groups
    first = [a for a in (*arguments._group_actions, *plain._group_actions) if a in actions]
    parts.append(_table(("option", *HEAD[1:]), map(_row, first)))
    for group in groups:
        own = group._group_actions
        settings = own and all(action.default == SUPPRESS for action in own)
        parts += [f"**{group.title}**"] if own else []
        parts += [_settings(own) if settings else _table(("option", *HEAD[1:]), map(_row, own))]
    return "\n\n".join(parts) + "\n"


def _settings(actions: Sequence[Action]) -> str:
    """Return the names of options that are settings, with links to where they are explained."""
    names = {action.dest for action in actions}
    whole = next(settings for settings in SETTINGS if names <= set(schemas(settings)))
    homes = [
        f"[{title}](options.md#{title.lower().replace(' ', '-')})"
        for settings, title in SETTINGS.items()
        if issubclass(whole, settings) and names & set(_own_fields(settings))
    ]
    words = fill(" ".join(action.option_strings[0] for action in actions), 80,
                 break_on_hyphens=False)  # fmt: skip
    return f"{_fenced('text', words)}\n\nEach is explained in Settings: {' and '.join(homes)}."


def _said(action: Action) -> str:
    """Return how a required argument is given."""
    name = action.dest.upper()
    return f"{action.option_strings[0]} {name}" if action.option_strings else name


def _row(action: Action) -> tuple[str, ...]:
    hint = getattr(action, "hint", None)
    each = get_args(hint)[0] if get_origin(hint) is list else hint
    type_ = "a path" if each is Path else kind(schema_of(each)) if each else "a switch"
    type_ += ", several" if action.nargs in ("*", "+") else ""
    given = " ".join(action.default) if isinstance(action.default, list) else action.default
    default = f"`{given}`" if given not in (None, False, "", {}) else ""
    name = action.option_strings[0] if action.option_strings else action.dest.upper()
    return f"`{name}`", type_, "required" if action.required else default, str(action.help)


def options() -> str:
    """Return every setting: type, range, default and help."""
    parts = []
    for settings, title in SETTINGS.items():
        rows = [
            (f"`{name}`", *_type_and_default(schema), schema["description"])
            for name, schema in schemas(settings).items()
            if name in _own_fields(settings)
        ]
        parts += [f"## {title}", inspect.getdoc(settings) or "", _table(HEAD, rows)]
    return "\n\n".join(parts) + "\n"


def _own_fields(settings: type) -> list[str]:
    """Return the names of the fields that the class declares itself."""
    return list(inspect.get_annotations(settings))


def _type_and_default(schema: dict[str, Any]) -> tuple[str, str]:
    default = schema.get("default", {})
    words = kind(schema, nothing="null")
    words = words.removesuffix(" or null") if nullable(schema) and default is None else words
    return words + (f", {limits(schema)}" if limits(schema) else ""), f"`{_yaml(default)}`"


def _yaml(value: Any) -> str:
    """Return a value as a recipe file gives it."""
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"{value:.3g}" if isinstance(value, float) and round(value, 6) != value else str(value)


def recipes() -> str:
    """Return the shipped files."""
    folder = files("rbdc.settings")
    parts = []
    for title, place in (("", RECIPES), ("transfer: ", RECIPES / "transfer")):
        for name in shipped_recipes(place):
            text = (place / f"{name}.yaml").read_text()
            parts += [f"## {title}{name}", _fenced("yaml", text)]
    parts.append("## The paper's experiments")
    for path in sorted((folder / "experiments").iterdir(), key=lambda path: path.name):
        parts += [f"### {path.name.removesuffix('.yaml')}", _fenced("yaml", path.read_text())]
    return "\n\n".join(parts) + "\n"


def api() -> str:
    """Return every public name, grouped by package."""
    parts = []
    for room in dict.fromkeys(rbdc._HOME.values()):
        about = inspect.getdoc(import_module(f"rbdc.{room}")) or room
        parts.append(f"## {re.split('[:,.(]', about)[0].strip()}")
        names = [name for name in rbdc.__all__ if rbdc._HOME[name] == room]
        parts.append(_fenced("{eval-rst}", "\n\n".join(map(_autodoc, names))))
    return "\n\n".join(parts) + "\n"


def _autodoc(name: str) -> str:
    thing = getattr(rbdc, name)
    if not isinstance(thing, type):
        return f".. autofunction:: rbdc.{name}"
    kind = "exception" if issubclass(thing, Exception) else "class"
    lines = [f".. auto{kind}:: rbdc.{name}", "   :members:", "   :undoc-members:"]
    if thing in SETTINGS:  # fields are on the page of options
        lines.append(f"   :exclude-members: {', '.join(field.name for field in fields(thing))}")
    return "\n".join(lines)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = (" | ".join(map(_cell, line)) for line in (head, ["---"] * len(head), *rows))
    return "\n".join(f"| {line} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"


PAGES: dict[str, Callable[[], str]] = {
    f"reference/{page.__name__}": page for page in (commands, options, recipes, api)
}


def complete(_app: Sphinx, page: str, source: list[str]) -> None:
    """Append what the code says to a page."""
    if page in PAGES:
        source[0] += "\n" + PAGES[page]()


def as_sphinx_reads_it(
    _app: Sphinx, _what: str, _name: str, thing: Any, _options: Any, lines: list[str]
) -> None:
    """Double the backticks of docstrings: they are Markdown's, and Sphinx wants two."""
    lines[:] = re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", "\n".join(lines)).split("\n")
    if isinstance(thing, type) and thing in SETTINGS:
        lines += ["", "Its fields are :doc:`settings <options>`."]


def shorter_signature(
    _app: Sphinx, _what: str, _name: str, thing: Any, _options: Any, signature: str, returns: str
) -> tuple[str, str] | None:
    """Hide the signature of settings, and of dataclasses without defaults."""
    if not (isinstance(thing, type) and is_dataclass(thing)):
        return None
    defaults = any(field.default is not MISSING for field in fields(thing))
    if thing in SETTINGS or not defaults:
        return "", ""
    return signature.replace("<factory>", "..."), returns


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("source-read", complete)
    app.connect("env-get-outdated", lambda *_: list(PAGES))
    app.connect("autodoc-process-docstring", as_sphinx_reads_it)
    app.connect("autodoc-process-signature", shorter_signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
