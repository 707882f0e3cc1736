"""One model, from an initialisation to a result.

`task` says what is trained, `machine` on what; `classification` makes it work for the `loop`, which
trains it; `checkpoint` keeps it.
"""

from rbdc.training.classification import Start, initial_weights, train
from rbdc.training.evaluation import Scores, evaluate
from rbdc.training.progress import Observer, Progress, Trained
from rbdc.training.task import Task, fit_to_data, image_format
from rbdc.training.world import World, join_world

__all__ = [
    "Observer",
    "Progress",
    "Scores",
    "Start",
    "Task",
    "Trained",
    "World",
    "evaluate",
    "fit_to_data",
    "image_format",
    "initial_weights",
    "join_world",
    "train",
]
