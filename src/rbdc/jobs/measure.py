"""Short measurements: how fast this machine trains, and how many siblings to train at once."""

import time

import torch

from rbdc.data import Batch, DataSet, TrainingBatches
from rbdc.settings import Machine
from rbdc.training import Task, World, initial_weights
from rbdc.training.classification import classifier_state
from rbdc.training.machine import torch_device

STEPS = 4  # measured, after one to warm up
PIXELS = 8 * 224 * 224  # of a batch that fits anywhere
CONTENTION = 0.9  # processes side by side disturb each other by about this much


def faster_jobs(task: Task, data: DataSet, *, threads: int, siblings: int) -> int:
    """Return the number of siblings at a time that gives the most images per second in all.

    A narrow model may be too small for all cores: then two of them with half the cores each are
    faster than one after the other. Compares 1, 2, 4, ... at a time.
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


def images_per_second(task: Task, machine: Machine) -> tuple[float, int]:
    """Measure how fast this machine trains the task's model on noise, without decoding.

    Also return how many images a step had: on a GPU, as many as its memory allows.
    """
    device, image = torch_device(machine), task.image
    batch_size = task.recipe.batch_size // task.recipe.grad_accum_steps
    if device.type == "cpu":
        batch_size = min(batch_size, max(8, PIXELS // (image.height * image.width)))
    while True:
        try:
            return _on_noise(task, batch_size, device, machine), batch_size
        except torch.OutOfMemoryError:
            if batch_size < 2:
                raise
            batch_size //= 2


def _on_noise(task: Task, batch_size: int, device: torch.device, machine: Machine) -> float:
    image = task.image
    state = classifier_state(
        task, initial_weights(task), 1, device=device, machine=machine, world=World()
    )
    with torch.random.fork_rng(devices=[]):
        batch = Batch(
            images=torch.randn(batch_size, image.channels, image.height, image.width).to(device),
            targets=torch.zeros(batch_size, dtype=torch.long, device=device),
            indices=torch.arange(batch_size),
        )
        state.update([batch]).item()
        began = time.perf_counter()
        for _ in range(STEPS):
            loss = state.update([batch])
        loss.item()  # waits for a GPU
    return STEPS * batch_size / (time.perf_counter() - began)


def _steps_per_second(task: Task, data: DataSet) -> float:
    batches = TrainingBatches(
        data,
        task.recipe,
        task.image,
        seed=task.data_seed,
        batch_size=task.recipe.batch_size,
        share=False,  # other processes would wait for this one
    )
    state = classifier_state(
        task,
        initial_weights(task),
        batches.steps_per_epoch,
        device=torch.device("cpu"),
        machine=Machine(device="cpu"),
        world=World(),
    )
    last = min(STEPS + 1, batches.steps_per_epoch)
    began = 0.0
    with torch.random.fork_rng(devices=[]):
        for number, micro in enumerate(batches.from_step(0, last)):
            if number == 1:
                began = time.perf_counter()
            state.update(micro)
    return (last - 1) / (time.perf_counter() - began) if last > 1 else 1.0
