"""Check the types of what the public functions are called with.

A wrong type ends with two lines, as every other mistake does, and not with an AttributeError from
somewhere inside. `rbdc/__init__.py` puts `checked` around each public function; calls inside of the
package are not checked.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from rbdc.errors import RbdcError

_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "True or False",
          type(None): "None", Path: "a path"}  # fmt: skip


class ArgumentError(RbdcError, TypeError):
    """A public function was called with an argument too many or too few, or of a wrong type."""


def checked(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the function with its arguments checked; `name` is its public name in `rbdc`."""
    signature, hints = inspect.signature(function), get_type_hints(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ArgumentError(f"rbdc.{name}: {error}", _how(name, signature)) from None
        for argument, value in bound.arguments.items():
            if signature.parameters[argument].kind is not inspect.Parameter.VAR_KEYWORD:
                _check(f"rbdc.{name}: {argument}", value, hints[argument], _how(name, signature))
        return function(*args, **kwargs)

    call.__module__, call.__qualname__ = "rbdc", name  # where pickle finds it
    return call


def check_fields(value: Any) -> None:
    """Refuse a field of a dataclass that does not have its type; call it from `__post_init__`."""
    name, hints = type(value).__name__, get_type_hints(type(value))
    for field in fields(value):
        remedy = f"help(rbdc.{name}) explains its fields."
        _check(f"{field.name} of {name}", getattr(value, field.name), hints[field.name], remedy)


def _check(what: str, value: Any, hint: Any, remedy: str) -> None:
    if not _fits(value, hint):
        raise ArgumentError(f"{what} is {_shown(value)}, expected {_said(hint)}", remedy)


def _shown(value: Any) -> str:
    """Return a value if it is short, else its type, and its length if it is a tuple."""
    text, kind = repr(value), type(value).__name__
    if len(text) <= 40 and "\n" not in text:
        return text
    article = "an" if kind[0] in "AEIOUaeiou" else "a"
    return f"{article} {kind}" + (f" of {len(value)}" if isinstance(value, tuple) else "")


def _how(name: str, signature: inspect.Signature) -> str:
    """Return how a function is called: the names of its parameters."""
    empty = inspect.Parameter.empty
    plain = [p.replace(annotation=empty, default=empty) for p in signature.parameters.values()]
    text = signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)
    return f"Call rbdc.{name}{text}."


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value has a type. Which of several names is meant, functions check."""
    origin, members = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if isinstance(hint, TypeVar):
        return hint.__bound__ is None or _fits(value, hint.__bound__)
    if origin in (Union, UnionType):
        return any(_fits(value, member) for member in members)
    if origin is Literal:
        return any(type(value) is type(member) for member in members)
    if origin is tuple:
        if not isinstance(value, tuple) or (members[-1] is not ... and len(members) != len(value)):
            return False
        each = members[:1] * len(value) if members[-1] is ... else members
        return all(map(_fits, value, each))
    if origin in (Sequence, frozenset):
        return isinstance(value, origin) and not isinstance(value, str)
    if origin is Callable:
        return callable(value)
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    if getattr(hint, "_is_protocol", False):
        return True
    return isinstance(value, origin or hint)


def _said(hint: Any) -> str:
    """Return the name of a type in words."""
    origin, members = get_origin(hint), get_args(hint)
    if isinstance(hint, TypeVar):
        return _said(hint.__bound__)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_said, members)))
    if origin is Literal:
        return " or ".join(map(repr, members))
    if origin is tuple and members[-1] is not ...:
        return f"a tuple of {len(members)}"
    if origin in (tuple, Sequence):
        return f"a {origin.__name__.lower()} of {_said(members[0]).removeprefix('a ')}s"
    if origin is Callable:
        return "a function"
    if origin is Mapping:
        return "a dict"
    name = getattr(origin or hint, "__name__", str(hint))
    name = {"Module": "nn.Module"}.get(name, name)
    return _WORDS.get(hint, f"{'an' if name[0] in 'AEIOUn' else 'a'} {name}")
