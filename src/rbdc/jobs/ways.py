"""Measure how the models of a level train fastest on this machine.

They can train in one process, in turn on each batch; in several processes side by side; or fused,
as one model with batched weights. Narrow models are often too small for all cores of a CPU, and
for a GPU.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rbdc.data import TextFormat
from rbdc.disk import remembered
from rbdc.jobs.measure import (
    device_name,
    dtype_name,
    median_seconds,
    noise_batch,
    step_images,
    with_threads,
)
from rbdc.jobs.speeds import FOLDER
from rbdc.settings import Machine
from rbdc.training import Task, World, initial_weights
from rbdc.training.classification import training_state
from rbdc.training.fused import FusedStates, can_fuse
from rbdc.training.machine import torch_device

CONTENTION = 0.9  # processes side by side on a CPU disturb each other by about this much
SECONDS = 0.4  # of the measurement of one way
WORTH_MEASURING = 200  # updates: fewer take no longer than a measurement
MARGIN = 1.1  # fused models must be faster by this much: apart, they have the bits of a model alone


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How the models of a level are trained."""

    processes: int
    """Trainings side by side."""
    fused: int
    """Models that are trained as one; 1: each for itself."""
    images_per_second: float
    """Of all models together."""
    what: str = "images"
    """What the data consists of, for people: images or sequences."""

    def __str__(self) -> str:
        """Return the way for people."""
        many = f"{self.processes} processes" if self.processes > 1 else "one process"
        how = f"{self.fused} models as one" if self.fused > 1 else "models in turn"
        return f"{many}, {how}: {self.images_per_second:,.0f} {self.what}/s"


def measure_speed(task: Task, machine: Machine, folder: Path = FOLDER) -> float:
    """Return images per second of one training of the task's model, remembered."""

    def measure() -> dict[str, Any]:
        return {"images_per_second": _speed(task, machine, 1)}

    about = {**_about(task, machine), "threads": machine.threads, "one": True}
    found, _ = remembered(folder.expanduser(), about, measure)
    return float(found["images_per_second"])


def measure_ways(
    task: Task,
    machine: Machine,
    *,
    siblings: int,
    threads: int,
    processes: int | None = None,
    folder: Path = FOLDER,
) -> list[Way]:
    """Return the ways to train `siblings` such models, the one to use first.

    `processes` is the number of processes, if it is decided. A measurement is remembered.
    """
    about = {
        **_about(task, machine),
        "siblings": siblings,
        "processes": processes,
        "threads": threads,
        "gpus": torch.cuda.device_count() if torch_device(machine).type == "cuda" else 0,
    }
    found, _ = remembered(folder.expanduser(), about, lambda: _measure(task, machine, about))
    return choose_way([Way(**way) for way in found["ways"]])


def choose_way(ways: list[Way]) -> list[Way]:
    """Return the ways, the fastest first; fused models only where they are clearly faster."""
    return sorted(ways, key=lambda way: -way.images_per_second / (MARGIN if way.fused > 1 else 1.0))


def _about(task: Task, machine: Machine) -> dict[str, Any]:
    """Return what the speed of a training depends on."""
    device = torch_device(machine)
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "dtype": dtype_name(task.recipe),
        "model": task.model.to_json(),
        "image": list(task.image.shape),
        "batch_size": step_images(task, device),
        "optimizer": [task.recipe.opt, task.recipe.model_ema],
        "machine": [machine.channels_last, machine.compile, machine.deterministic],
    }


def _measure(task: Task, machine: Machine, about: Mapping[str, Any]) -> dict[str, Any]:
    """Measure one model, and as many as one process has fused, for each number of processes."""
    siblings, gpus, given = about["siblings"], about["gpus"], about["processes"]
    most = min(siblings, gpus or about["threads"])
    what = "sequences" if isinstance(task.image, TextFormat) else "images"
    counts = [given] if given else [gpus and most] if gpus else _powers(most)
    ways = []
    for count in counts:
        threads = max(1, about["threads"] // count)
        for fused in sorted({1, -(-siblings // count)} if can_fuse(task) else {1}):
            speed = _speed(task, replace(machine, threads=threads), fused)
            if speed is not None:
                lost = CONTENTION if count > 1 and not gpus else 1.0
                total = count * speed * lost
                ways.append(Way(processes=count, fused=fused, images_per_second=total, what=what))
    return {"ways": [asdict(way) for way in ways]}


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def _speed(task: Task, machine: Machine, models: int) -> float | None:
    """Return images per second of so many fused models together; None if they cannot be fused."""
    device = torch_device(machine)
    with with_threads(machine, device), torch.random.fork_rng(devices=[]):
        states = [
            training_state(
                task, initial_weights(task), 1, device=device, machine=machine, world=World()
            )
            for _ in range(models)
        ]
        batch = noise_batch(task, step_images(task, device), device)
        take = FusedStates(states).update if models > 1 else lambda m: [states[0].update(m)]
        try:
            take([batch])  # the first step is slower, and may compile
        except RuntimeError:  # no memory for all, or vmap has no rule for an operation
            if models == 1:
                raise
            return None
        seconds = median_seconds(lambda: take([batch]), lambda losses: losses[0].item(), SECONDS)
    return models * len(batch.targets) / seconds
