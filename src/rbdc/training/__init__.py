"""Train one model.

`task` defines what is trained. `loop` gives batches to a `session` of a training, or to several.
A session trains any `problem`: `classification`, `language`, or detection (in `transfer`). `state`
holds the weights and the optimizer, and `checkpoint` saves them.
"""

from rbdc.training.classification import Start, initial_weights
from rbdc.training.evaluation import evaluate
from rbdc.training.loop import train, train_together
from rbdc.training.progress import Observer, Progress, Trained
from rbdc.training.session import Session
from rbdc.training.task import Task, fit_to_data, image_format, images_for, input_format
from rbdc.training.world import World, join_world
