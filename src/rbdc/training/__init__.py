"""One model, from an initialisation to a result.

`task` says what is trained and `machine` on what. `loop` trains any `problem`; `classification` is
one, detection (in `transfer`) another. `checkpoint` saves a training.
"""

from rbdc.training.classification import Start, initial_weights
from rbdc.training.evaluation import Scores, evaluate
from rbdc.training.loop import Session
from rbdc.training.progress import Observer, Progress, Trained
from rbdc.training.task import Task, fit_to_data, image_format
from rbdc.training.world import World, join_world

__all__ = [
    "Observer",
    "Progress",
    "Scores",
    "Session",
    "Start",
    "Task",
    "Trained",
    "World",
    "evaluate",
    "fit_to_data",
    "image_format",
    "initial_weights",
    "join_world",
]
