"""The specification of a model, which can be stored as JSON and built again."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from typing import Any

from rbdc.errors import ModelError, WidthError

MOST, MOST_CLASSES = 2**16, 2**20  # of a number in a model's arguments
_NAME = re.compile(r"[\w.+-]{0,64}", re.ASCII)  # of a layer or a mode: no path, no address
_MEMBERS, _LEVELS = 100, 4  # of lists and mappings
_MOST_OF = {
    **dict.fromkeys(("num_classes", "vocab_size", "max_position_embeddings", "n_positions",
                     "pad_token_id", "bos_token_id", "eos_token_id", "sequence_length",
                     "sliding_window"), MOST_CLASSES),
    "rope_parameters": 10**9, "rope_theta": 10**9,
}  # fmt: skip
"""Largest numbers of arguments that may have larger ones."""
_SIZES, _MOST_SIZE = ("img_size", "patch_size", "in_chans"), 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A timm architecture at a fraction of its width.

    `arguments` are timm's own (img_size, num_classes, depth, embed_dim, channels, ...) and
    describe the model at width 1.0, which `width` then scales.
    """

    name: str
    width: float = 1.0
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:  # a spec read from a file must equal the original
            arguments = json.loads(json.dumps(dict(self.arguments)))
        except (TypeError, ValueError, RecursionError) as error:
            raise ModelError(
                f"the arguments of {self.name} cannot be stored as JSON: {error}",
                "Use JSON values (numbers, text, lists): the model is rebuilt from them.",
            ) from None
        check_arguments(self.name, arguments)
        if not (isfinite(self.width) and self.width > 0):
            raise WidthError(f"width is {self.width:g}", "A width is a positive fraction of 1.0.")
        object.__setattr__(self, "width", float(self.width))
        object.__setattr__(self, "arguments", arguments)

    def __hash__(self) -> int:
        return hash(json.dumps(self.to_json(), sort_keys=True))

    def scaled(self, factor: float) -> "ModelSpec":
        """Return the same architecture at `factor` times its width."""
        return replace(self, width=self.width * factor)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return self.name if self.width == 1 else f"{self.name} at width {self.width:g}"


def check_arguments(name: str, arguments: Mapping[str, Any]) -> None:
    """Refuse values that no architecture has: huge numbers, paths, deep nesting, no pixels."""
    for key, value in arguments.items():
        most = _MOST_OF.get(key, MOST)
        if problem := _problem(value, most) or (_size_problem(value) if key in _SIZES else ""):
            raise ModelError(
                f"{key} of {name} {problem}",
                "The arguments of a model are numbers, names of layers, and short lists of them.",
            )


def _problem(value: Any, most: int, level: int = 0) -> str:
    """Return what is wrong with a value or a member of it; empty if nothing is."""
    match value:
        case None | bool():
            return ""
        case int() | float():
            return "" if abs(value) <= most else f"has a number beyond {most:,}"  # and NaN
        case str():
            return "" if _NAME.fullmatch(value) else f"is {value[:80]!r}, which is no plain name"
        case list() | tuple() | dict() if len(value) > _MEMBERS or level == _LEVELS:
            return f"has more than {_MEMBERS} members, or more than {_LEVELS} levels of them"
        case dict():
            members = [*value, *value.values()]
        case list() | tuple():
            members = list(value)
        case _:
            return f"is {value!r}"
    return next(filter(None, (_problem(member, most, level + 1) for member in members)), "")


def _size_problem(value: Any) -> str:
    """Return what is wrong with a number of pixels or channels, or a pair of them."""
    sizes = value if isinstance(value, list | tuple) and len(value) == 2 else [value]
    sane = all(type(size) is int and 0 < size <= _MOST_SIZE for size in sizes)
    return "" if value is None or sane else f"is {value!r}, expected 1 to {_MOST_SIZE:,}"
