"""How many siblings to train side by side on a CPU: a short measurement."""

import time

import torch

from rbdc.data import DataSet, TrainingBatches
from rbdc.recipes import Machine
from rbdc.training import Task, World, image_format, initial_weights
from rbdc.training.state import State

STEPS = 4  # measured, after one to warm up
CONTENTION = 0.9  # processes side by side disturb each other by about this much


def faster_jobs(task: Task, data: DataSet, *, threads: int, siblings: int) -> int:
    """The number of siblings at a time that gives the most images a second in all.

    A narrow model may be too small for all cores: then two of them with half the cores each are
    faster than one after the other. Compared are 1, 2, 4, ... at a time.
    """
    before = torch.get_num_threads()
    best, best_speed = 1, 0.0
    try:
        jobs = 1
        while jobs <= min(siblings, threads):
            torch.set_num_threads(threads // jobs)
            speed = jobs * _steps_per_second(task, data) * (CONTENTION if jobs > 1 else 1.0)
            if speed > best_speed:
                best, best_speed = jobs, speed
            jobs *= 2
    finally:
        torch.set_num_threads(before)
    return best


def _steps_per_second(task: Task, data: DataSet) -> float:
    batches = TrainingBatches(
        data,
        task.recipe,
        image_format(task.model, task.recipe, data),
        seed=task.seed,
        batch_size=task.recipe.batch_size,
    )
    state = State(
        task,
        initial_weights(task),
        torch.device("cpu"),
        Machine(device="cpu"),
        World(),
        None,
        batches.steps_per_epoch,
    )
    last = min(STEPS + 1, batches.steps_per_epoch)
    began = 0.0
    with torch.random.fork_rng(devices=[]):
        for number, micro in enumerate(batches.from_step(0, last)):
            if number == 1:
                began = time.perf_counter()
            state.update(micro)
    return (last - 1) / (time.perf_counter() - began) if last > 1 else 1.0
