"""Errors that a user can correct.

Each has two lines: the problem (what was found, where, and what was expected), and the remedy. The
command line prints these two lines and exits with code 2. In Python they are ValueErrors.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import TypeVar


class RbdcError(ValueError):
    """An error that the user can correct: `problem` is what is wrong, `remedy` what to do."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem, remedy)
        # the message of a library may have several lines, and a file's name any characters
        self.problem, self.remedy = printable(" ".join(problem.splitlines())), printable(remedy)

    def __str__(self) -> str:
        return f"{self.problem}\n{self.remedy}"


class ModelError(RbdcError):
    """An unknown model, or one that cannot be built with these arguments."""


class WidthError(ModelError):
    """A width at which an architecture cannot be built."""


class CouplingError(RbdcError):
    """Two models that cannot be coupled, or a coupling that failed its verification."""


class PlanError(RbdcError):
    """A plan that cannot be made, for example with too many steps or no budget."""


class CheckpointError(RbdcError):
    """Weights that cannot be read or written."""


class DataError(RbdcError):
    """A data set that does not exist, or images that cannot be read."""


class RecipeError(RbdcError):
    """An unknown setting of a training, or one with an invalid value."""


class RunError(RbdcError):
    """A run that cannot start or resume, or whose folder cannot be read."""


class TrainingError(RbdcError):
    """A training that cannot continue, for example because its loss is not finite."""


E = TypeVar("E", bound=RbdcError)


class Interrupted(Exception):  # noqa: N818 - not an error
    """The training was stopped on request and saved. The same command resumes it."""


def printable(text: str) -> str:
    """Return the text with escape codes, and whatever else a terminal may act on, spelled out."""
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode()
        for char in text
    )


def nearest(name: str, known: Iterable[str], *, most: int = 3) -> str:
    """Return "Did you mean a or b?", or an empty string if no known name is similar."""
    close = get_close_matches(name[:100], list(known), n=most)  # its time grows with the length
    return f"Did you mean {' or '.join(close)}?" if close else ""


def not_installed(package: str, extra: str, kind: type[E]) -> E:
    """Return the error that a package is missing, which the extra of ours would install."""
    return kind(
        f"the package `{package}` is not installed",
        f"Install the extra: pip install 'rbdc[{extra}]'.",
    )
