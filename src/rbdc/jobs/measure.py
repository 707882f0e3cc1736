"""Short measurements of how fast this machine trains, which are remembered."""

import gc
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import ceil, prod
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from torch import nn

from rbdc.data import Batch, TextFormat
from rbdc.jobs.engine import wait_for_server
from rbdc.settings import Machine, Recipe
from rbdc.training import Task, World, initial_weights
from rbdc.training.classification import training_state
from rbdc.training.machine import torch_device

PIXELS, TOKENS = 8 * 224 * 224, 2**12  # of a batch that fits anywhere
ROUND, MEASURED = 0.1, 2.0  # seconds of a round, and of all rounds of a measurement

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """How fast this machine trains a model."""

    images_per_second: float
    batch_size: int
    """Images per step: on a GPU, as many of the recipe's batch as its memory allows."""
    memory_bytes: int | None
    """Peak memory of a step; None where it cannot be measured."""

    def to_json(self) -> dict[str, Any]:
        """Return the measurement as JSON values."""
        return asdict(self)


def measure_training(task: Task, machine: Machine, teacher: nn.Module | None = None) -> Measurement:
    """Measure how fast this machine trains the task's model on noise, without decoding."""
    device = torch_device(machine)
    batch_size = step_images(task, device)
    while True:
        try:
            return _on_noise(task, batch_size, device, machine, teacher)
        except torch.OutOfMemoryError:
            if batch_size < 2:
                raise
            batch_size //= 2


def step_images(task: Task, device: torch.device) -> int:
    """Return the images per step to measure with: the recipe's, or fewer on a CPU."""
    batch_size = task.recipe.batch_size // task.recipe.grad_accum_steps
    if device.type == "cpu":
        most = TOKENS if isinstance(task.image, TextFormat) else PIXELS
        size = prod(task.image.shape[-2:])
        batch_size = min(batch_size, max(8, most // size))
    return batch_size


def _on_noise(
    task: Task,
    batch_size: int,
    device: torch.device,
    machine: Machine,
    teacher: nn.Module | None,
) -> Measurement:
    peak = _peak_memory(device)
    state = training_state(
        task,
        initial_weights(task),
        1,
        device=device,
        machine=machine,
        world=World(),
        teacher=teacher,
    )
    with torch.random.fork_rng(devices=[]):
        batch = noise_batch(task, batch_size, device)
        state.update([batch]).item()  # the first step is slower, and may compile
        # a copy has no outputs of the teacher yet, like the batch of a real step
        seconds = median_seconds(lambda: state.update([replace(batch)]), lambda loss: loss.item())
    return Measurement(
        images_per_second=batch_size / seconds, batch_size=batch_size, memory_bytes=peak()
    )


def noise_batch(task: Task, batch_size: int, device: torch.device) -> Batch:
    """Return a batch of noise for the task's model."""
    image = task.image
    if isinstance(image, TextFormat):
        tokens = torch.randint(image.vocab_size, (batch_size, image.sequence_length)).to(device)
        return Batch(images=tokens, targets=tokens, indices=torch.arange(batch_size))
    return Batch(
        images=torch.randn(batch_size, image.channels, image.height, image.width).to(device),
        targets=torch.zeros(batch_size, dtype=torch.long, device=device),
        indices=torch.arange(batch_size),
    )


def median_seconds(
    run: Callable[[], T], wait: Callable[[T], object], measured: float = MEASURED
) -> float:
    """Return the median seconds of `run`; `wait` on its result waits for a GPU.

    Several runs make a round of at least ROUND seconds, so that waiting costs little. All rounds
    take about `measured` seconds.
    """
    began = time.perf_counter()
    wait(run())
    first = time.perf_counter() - began
    size = max(1, ceil(ROUND / first))
    rounds = [first] if size == 1 else []
    end = began + measured
    while len(rounds) < 2 or (time.perf_counter() < end and len(rounds) < 15):
        began = time.perf_counter()
        for _ in range(size):
            result = run()
        wait(result)
        rounds.append((time.perf_counter() - began) / size)
    return median(rounds)


def measure_peak(device: torch.device, dtype: str) -> float:
    """Measure the FLOP/s of a large matrix product in this data type: the device's peak."""
    side = 1024 if device.type == "cpu" else 8192
    kind = getattr(torch, dtype)
    left, right = (torch.ones(side, side, device=device, dtype=kind) for _ in range(2))
    # the fastest of three: a peak is what nothing disturbs
    rounds = (
        median_seconds(lambda: left @ right, lambda product: product[0, 0].item()) for _ in range(3)
    )
    return float(2 * side**3 / min(rounds))


@contextmanager
def with_threads(machine: Machine, device: torch.device) -> Iterator[int]:
    """Measure with the machine's CPU threads within the block; yield how many, 0 elsewhere."""
    before = torch.get_num_threads()
    wait_for_server()
    try:
        if machine.threads:
            torch.set_num_threads(machine.threads)
        yield torch.get_num_threads() if device.type == "cpu" else 0
    finally:
        torch.set_num_threads(before)


def dtype_name(recipe: Recipe) -> str:
    """Return the data type that a training computes in."""
    return str(recipe.amp_dtype) if recipe.amp else "float32"


def device_name(device: torch.device) -> str:
    """Return the name of the device's model, by which measurements are told apart."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        try:
            lines = Path("/proc/cpuinfo").read_text().splitlines()
        except OSError:
            lines = []
        named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        return next(named, "") or platform.processor() or platform.machine()
    return f"{device.type} of {platform.processor() or platform.machine()}"


def _peak_memory(device: torch.device) -> Callable[[], int | None]:
    """Return a function that returns the peak memory since now; of CPUs, only on Linux."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return lambda: torch.cuda.max_memory_allocated(device)
    if device.type != "cpu":
        return lambda: None
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark (proc(5))
        before = _status("VmRSS")
    except (OSError, StopIteration):
        return lambda: None
    return lambda: max(0, _status("VmHWM") - before)


def _status(key: str) -> int:
    """Return a number of bytes of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))
