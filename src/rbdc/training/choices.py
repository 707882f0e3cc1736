"""What a training does by default on a device: pure functions of a description of the machine.

A setting that the user gave is never changed. Precision is chosen before a run's jobs are made,
because the recipe is part of their keys; whether to compile is chosen per training.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rbdc.settings import Machine, Optimization

R = TypeVar("R", bound=Optimization)

CPU_WORKERS = 2  # a step on a CPU takes longer than decoding its images with two processes
WORKER_BYTES = 1 << 30  # assumption: memory of a data worker with the batches that it prefetches

# Whether compiling pays. Assumptions, not measured here: inductor takes about two minutes for the
# training graph of a ViT or ResNet, and saves 10 to 30 % of a step. So a training of 20 times the
# compile time gains at least as much again.
COMPILE_SECONDS, COMPILE_PAYS = 120.0, 20.0
# Assumed training speed in FLOP/s by the major compute capability. timm's benchmark of an RTX 3090
# (8.6, AMP) is 17e12 for DeiT-Tiny and 41e12 for DeiT-Base. A wrong guess moves the shortest
# training that is compiled, and nothing else.
FLOPS_PER_SECOND = {7: 10e12, 8: 20e12, 9: 60e12}


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineFacts:
    """The device that a process trains on, and its part of the machine."""

    device: str
    """torch's device type: cuda, cpu, mps, ..."""
    name: str = ""
    """The GPU's name; empty on a CPU."""
    capability: tuple[int, int] = (0, 0)
    """Compute capability of a CUDA GPU."""
    gpu_bytes: int = 0
    gpus: int = 0
    bfloat16: bool = False
    """Whether the GPU computes in bfloat16 natively."""
    tf32: bool = False
    compiler: bool = False
    """Whether torch.compile has what it needs: Triton and a C compiler."""
    cores: int = 1
    """CPU cores that this process may use."""
    memory_bytes: int = 0
    """The machine's memory; 0 if unknown."""
    processes: int = 1
    """Training processes on this machine, which divide its cores and memory."""
    platform: str = "linux"

    @property
    def is_cuda(self) -> bool:
        """Return whether the device is a CUDA (or ROCm) GPU."""
        return self.device == "cuda"


def choose_precision(recipe: R, facts: MachineFacts) -> R:
    """Return the recipe with its precision decided.

    GPUs older than compute capability 7.0 have no tensor cores, so float16 gains nothing there.
    """
    amp = recipe.amp
    if amp is None:
        amp = facts.is_cuda and (facts.bfloat16 or facts.capability >= (7, 0))
    emulated = facts.is_cuda and not facts.bfloat16
    dtype = recipe.amp_dtype or ("float16" if amp and emulated else "bfloat16")
    return replace(recipe, amp=amp, amp_dtype=dtype)


def choose_machine(machine: Machine, facts: MachineFacts) -> Machine:
    """Return the settings with everything decided, except whether to compile."""
    defaults: dict[str, Any] = {
        "workers": loader_workers(facts),
        "channels_last": facts.device != "mps",
        "deterministic": facts.device == "cpu",
        "tf32": facts.tf32,
    }
    missing = {k: v for k, v in defaults.items() if getattr(machine, k) is None}
    return replace(machine, **missing) if missing else machine


def loader_workers(facts: MachineFacts) -> int:
    """Return the data workers of a process: its part of the cores but one, which feeds the GPU."""
    cores = facts.cores // facts.processes
    if facts.device == "cpu":
        return max(1, min(CPU_WORKERS, cores))
    room = facts.memory_bytes // facts.processes // WORKER_BYTES or cores
    return max(1, min(cores - 1, room))


def training_seconds(facts: MachineFacts, flops: float, processes: int = 1) -> float:
    """Return a rough estimate of the time that so many FLOPs take on CUDA GPUs."""
    known = max((major for major in FLOPS_PER_SECOND if major <= facts.capability[0]), default=7)
    return flops / FLOPS_PER_SECOND[known] / processes


def choose_compile(
    machine: Machine, facts: MachineFacts, flops: float, processes: int = 1
) -> tuple[bool, str]:
    """Return whether a training of so many FLOPs is compiled, and why, for people."""
    seconds = training_seconds(facts, flops, processes)
    if machine.compile is not None:
        return machine.compile, "as asked"
    if not facts.is_cuda:
        return False, "only on CUDA"
    if machine.deterministic:
        return False, "deterministic"  # autotuning may choose other kernels in another session
    if machine.parallel == "fsdp" and processes > 1:
        return False, "sharded"
    if not facts.compiler:
        return False, "Triton or a C compiler is missing"
    pays = seconds >= COMPILE_PAYS * COMPILE_SECONDS
    return pays, f"est. {readable(seconds)}" + ("" if pays else ", too short")


def choice_lines(
    machine: Machine,
    facts: MachineFacts,
    precision: str,
    compilable: Sequence[float],
    *,
    workers: int,
    processes: int = 1,
) -> list[str]:
    """Return what was chosen and why, for people.

    `compilable` are the FLOPs of the trainings whose batches have one shape. `workers` is the
    number that really decodes: 0 for images in memory.
    """
    compiled = [choose_compile(machine, facts, flops, processes) for flops in sorted(compilable)]
    count, longest = sum(chosen for chosen, _ in compiled), compiled[-1:]
    reason = longest[0][1] if longest else "image sizes vary"
    some = f" {count} of {len(compiled)} models" if count < len(compiled) else ""
    each = f" / {facts.processes} processes" if facts.processes > 1 else ""
    chosen = {
        precision: True,
        "TF32": machine.tf32,
        "channels last": machine.channels_last,
        "deterministic": machine.deterministic,
        f"compiled{some} ({reason})": count,
        f"not compiled ({reason})": facts.is_cuda and not count,
        f"{workers or 'no'} data worker{'' if workers == 1 else 's'}": True,
    }
    head = f"{facts.name or facts.device}, {facts.cores} cores{each}: "
    lines = [head + ", ".join(text for text, shown in chosen.items() if shown)]
    if facts.is_cuda and not machine.deterministic:
        lines.append(
            "--deterministic makes a resume bitwise equal; it costs speed: no compilation, no "
            "choice of the fastest cuDNN kernels"
        )
    return lines


def readable(seconds: float) -> str:
    """Return a rough time in minutes or hours."""
    return f"{seconds / 3600:.0f} h" if seconds >= 7200 else f"{max(1, seconds / 60):.0f} min"
