"""What commands share of what can be said to them. The settings' own fields become options."""

import json
import re
from argparse import SUPPRESS
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields
from typing import Any, NoReturn, get_type_hints

import yaml
from jsonargparse import ActionYesNo, ArgumentParser, Namespace

from rbdc.errors import RbdcError, nearest
from rbdc.settings import field_help

MODEL_KWARGS = "timm's arguments of the full-width model, as timm takes them: depth=6 embed_dim=64"


class Parser(ArgumentParser):
    """A mistake is an RbdcError, in plain words and with the nearest option."""

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
    if commands := re.match(r'expected "subcommand" to be one of {(.+)}', message):
        return f"no command was given: say rbdc {commands[1].replace(' ', '').replace(',', ', ')}"
    return message


def add_settings(group: Any, settings: type, without: Iterable[str] = ()) -> None:
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


def default_recipe(given: dict[str, Any]) -> str:
    """The demo; or for a model that is named, its family's."""
    if "model" not in given:
        return "demo"
    from rbdc.models import as_spec, family

    return family(as_spec(given["model"])).recipe


def comma_separated(words: Sequence[str]) -> tuple[str, ...]:
    """`a,b c` as three."""
    return tuple(word for text in words for word in text.split(",") if word)


def comma_separated_numbers(option: str, words: Sequence[str]) -> tuple[float, ...]:
    """`0.5,1 2` as three; a word that is none is a mistake in the option."""
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
