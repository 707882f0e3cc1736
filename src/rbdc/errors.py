"""The mistakes a user can make.

Each is two lines: what was found, where, against what was expected; and what to do about it. The
command line prints exactly these two lines and exits with code 2; in Python they are ValueErrors.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class RbdcError(ValueError):
    """Something the user can put right. `problem` says what is wrong, `remedy` what to do."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem, remedy)
        self.problem = " ".join(problem.splitlines())  # a library's words may have many lines
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.problem}\n{self.remedy}"


class ModelError(RbdcError):
    """A model that is not known, or cannot be built as asked."""


class WidthError(ModelError):
    """A width that an architecture cannot have."""


class CouplingError(RbdcError):
    """Two models that cannot be coupled, or a coupling that proved wrong."""


class PlanError(RbdcError):
    """A plan that cannot be made: too many steps, no budget, no images."""


class CheckpointError(RbdcError):
    """A file or folder of weights that cannot be read or written."""


class DataError(RbdcError):
    """A data set that is not there, or images that cannot be read."""


class RecipeError(RbdcError):
    """A setting of a training that is not known, or cannot be what it was given."""


class RunError(RbdcError):
    """A run that cannot start, go on, or be read."""


class TrainingError(RbdcError):
    """A training that cannot go on: its loss is not finite."""


class Interrupted(Exception):  # noqa: N818 - nothing went wrong
    """Stopped on request, and saved: the same command goes on."""


def nearest(name: str, known: Iterable[str], *, most: int = 3) -> str:
    """'Did you mean a, b or c?', or an empty string where nothing is near."""
    close = get_close_matches(name, list(known), n=most, cutoff=0.6)
    if not close:
        return ""
    head, last = close[:-1], close[-1]
    return f"Did you mean {', '.join(head) + ' or ' if head else ''}{last}?"
