"""Measure the training speed of every level on this machine, and remember it.

A measurement is stored under what it depends on: device, torch, model, batch, data type, and how
the machine trains. So a cached speed is never that of another device or version.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rbdc.disk import remembered
from rbdc.jobs.measure import (
    device_name,
    dtype_name,
    measure_peak,
    measure_training,
    step_images,
    with_threads,
)
from rbdc.plan import LevelSpeed, Speeds
from rbdc.plan.speeds import CACHED
from rbdc.settings import Machine
from rbdc.training import Task
from rbdc.training.machine import check_machine, torch_device
from rbdc.training.teacher import Teacher

FOLDER = Path("~/.cache/rbdc/speeds")
FORMAT = 1


def measured_speeds(
    tasks: Sequence[Task],
    machine: Machine,
    *,
    teacher: Teacher | None = None,
    again: bool = False,
    loader: float | None = None,
    folder: Path = FOLDER,
) -> Speeds:
    """Return the speeds of the tasks' models, target first, measured here on noise.

    What was measured before is read from `folder`, unless it is to be measured `again`. Narrow
    models are measured first, so that memory a wide one leaves allocated is not counted as theirs.
    """
    first = tasks[0]
    device = torch_device(machine)
    check_machine(machine, first.recipe)
    folder, name = folder.expanduser(), device_name(device)
    with with_threads(machine, device) as threads:
        about = {"device": name, "threads": threads, "torch": torch.__version__, "format": FORMAT}
        dtype = dtype_name(first.recipe)
        peak, _ = remembered(
            folder,
            {**about, "matmul": dtype},
            lambda: {"flops_per_second": measure_peak(device, dtype)},
            again=again,
        )
        about |= {"dtype": dtype, "teacher": teacher.sha256 if teacher else None}
        levels = [_level(task, machine, teacher, about, folder, again) for task in reversed(tasks)]
    where = (
        f"{name}, {threads} thread{'s' if threads != 1 else ''}" if device.type == "cpu" else name
    )
    return Speeds(
        device=where,
        levels=tuple(reversed(levels)),
        loader=loader,
        peak_flops_per_second=float(peak["flops_per_second"]),
        dtype=dtype,
    )


def _level(
    task: Task,
    machine: Machine,
    teacher: Teacher | None,
    about: Mapping[str, Any],
    folder: Path,
    again: bool,
) -> LevelSpeed:
    known = {
        **about,
        "model": task.model.to_json(),
        "image": list(task.image.shape),
        "batch_size": step_images(task, torch_device(machine)),
        "optimizer": [task.recipe.opt, task.recipe.model_ema],
        "machine": [machine.channels_last, machine.compile, machine.deterministic],
    }
    network = teacher.model if teacher else None
    found, cached = remembered(
        folder, known, lambda: measure_training(task, machine, network).to_json(), again=again
    )
    return LevelSpeed(
        model=task.model,
        source="measured",
        detail=CACHED if cached else "",
        images_per_second=float(found["images_per_second"]),
        batch_size=int(found["batch_size"]),
        memory_bytes=found["memory_bytes"],
    )
