"""Lengths of a training, or of a part of it: epochs, steps, images, or a share of the whole.

A setting keeps a plain number where it is in the unit that the setting's name says
(`warmup_epochs: 5`, as in timm), and a `Duration` otherwise (`warmup_epochs: 500 steps`).
As with big_vision's `steps()`, one function turns all of them into updates: `Extent.updates`.
"""

from dataclasses import dataclass
from math import isfinite
from typing import Literal, TypeAlias, get_args

from rbdc.errors import RecipeError, nearest

Unit = Literal["epochs", "steps", "images", "%"]


@dataclass(frozen=True, slots=True)
class Duration:
    """A length with its unit; `%` is a share of the training that the length is part of."""

    amount: float
    unit: Unit

    def __str__(self) -> str:
        """Return the length as `parse_duration` reads it."""
        return f"{self.amount:.15g}{'' if self.unit == '%' else ' '}{self.unit}"


Length: TypeAlias = float | Duration
"""A number in the unit that the setting's name says, or a length with its own unit."""


def with_unit(length: Length, unit: Unit = "epochs") -> Duration:
    """Return a length with its unit; a plain number is in `unit`."""
    return length if isinstance(length, Duration) else Duration(length, unit)


def plain(length: Length) -> float | str:
    """Return a length as a recipe file gives it: a plain number, or text with the unit."""
    return str(length) if isinstance(length, Duration) else length


def parse_duration(text: str, unit: Unit = "epochs") -> Duration:
    """Read `5`, `5 epochs`, `500 steps`, `1e6 images` or `10%`; a bare number is in `unit`."""
    number, _, word = text.replace("%", " %").strip().partition(" ")
    known, word = get_args(Unit), word.strip()
    named = next((one for one in known if word in (one, one.removesuffix("s"))), None)
    try:
        amount = float(number)
    except ValueError:
        amount = float("nan")
    if not isfinite(amount) or amount < 0 or (word and not named):
        raise RecipeError(
            f"{text!r} is not a length, expected a number and one of {', '.join(known)}",
            (nearest(word, known, most=1) if not named else "") or "For example 500 steps, or 10%.",
        )
    return Duration(amount, named or unit)


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """The size of the training that a length is part of."""

    steps_per_epoch: int
    batch_size: int
    total: float = 0
    """Updates of the whole training, for shares of it."""

    def updates(self, length: Length, unit: Unit = "epochs") -> int:
        """Return a length in updates of the optimizer, rounded; a plain number is in `unit`."""
        given = with_unit(length, unit)
        match given.unit:
            case "epochs":
                return round(given.amount * self.steps_per_epoch)
            case "steps":
                return round(given.amount)
            case "images":
                return round(given.amount / self.batch_size)
            case "%":
                return round(given.amount / 100 * self.total)

    def shorter(self, first: Length, second: Length) -> Length:
        """Return the shorter of two lengths; plain numbers are epochs."""
        if isinstance(first, Duration) or isinstance(second, Duration):
            return first if self.updates(first) <= self.updates(second) else second
        return min(first, second)
