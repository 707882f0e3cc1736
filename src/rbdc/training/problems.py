"""Choose the training problem for a task and its data."""

from collections.abc import Callable

from torch import nn

from rbdc.data import DataSet, TextData
from rbdc.settings import Machine
from rbdc.training.classification import Classification, Start
from rbdc.training.language import Language
from rbdc.training.problem import Problem
from rbdc.training.task import Task
from rbdc.training.world import World


def make_problem(
    task: Task,
    data: DataSet,
    start: Callable[[], Start],
    machine: Machine,
    world: World,
    *,
    teacher: nn.Module | None = None,
    blocks: int = 1,
) -> Problem:
    """Return the problem that the data poses: the next token of a text, or the class of an image.

    `start` returns the initial weights, if there is no checkpoint.
    """
    if isinstance(data, TextData):
        return Language(task, data, start, machine, world, blocks=blocks)
    return Classification(task, data, start, machine, world, teacher=teacher, blocks=blocks)
