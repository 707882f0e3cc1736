"""The devices and capabilities of this machine, and torch's switches for them."""

import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

import torch

from rbdc.errors import RunError
from rbdc.settings import Machine, Optimization
from rbdc.training.choices import MachineFacts, choose_compile, choose_machine

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of this container: microseconds, per how many


def torch_device(machine: Machine, local_rank: int = 0) -> torch.device:
    """Return the chosen device, or raise a RunError if it cannot be used."""
    name = machine.device
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator()
        name = accelerator.type if accelerator and torch.accelerator.is_available() else "cpu"
    try:
        device = torch.device(f"cuda:{local_rank}" if name == "cuda" else name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = (str(error).strip().splitlines() or ["unknown"])[0]
        raise RunError(
            f"the device {machine.device!r} cannot be used: {reason}", "Use another --device."
        ) from None
    return device


def default_threads(workers: int) -> int:
    """Return the CPU threads of a training with `workers` data workers, one core for each.

    If threads and workers shared cores, a training would take twice as long.
    """
    return max(1, torch.get_num_threads() - workers)


@cache
def read_facts(device: str = "auto") -> MachineFacts:
    """Describe this machine and its device, as torch sees it."""
    found = torch_device(Machine(device=device), int(os.environ.get("LOCAL_RANK", "0")))
    of_device: dict[str, Any] = {}
    if found.type == "cuda":
        gpu = torch.cuda.get_device_properties(found)
        of_device = {
            "name": gpu.name,
            "capability": (gpu.major, gpu.minor),
            "gpu_bytes": gpu.total_memory,
            "gpus": torch.cuda.device_count(),
            "bfloat16": torch.cuda.is_bf16_supported(including_emulation=False),
            "tf32": torch.cuda.is_tf32_supported(),
        }
    compilers = any(map(shutil.which, ("cc", "gcc", "clang")))
    return MachineFacts(
        device=found.type,
        **of_device,
        compiler=compilers and importlib.util.find_spec("triton") is not None,
        cores=usable_cores(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        processes=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        platform=sys.platform,
    )


def usable_cores() -> int:
    """Return the CPU cores that this process may use: its affinity, and its container's quota."""
    cores = os.cpu_count() or 1
    if sys.platform == "linux":
        cores = len(os.sched_getaffinity(0))
    try:
        quota, period = CPU_QUOTA.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else min(cores, ceil(int(quota) / int(period)))


def settled(machine: Machine, flops: float | None = None, processes: int = 1) -> Machine:
    """Return the settings with everything chosen for this process's device.

    Whether to compile depends on the FLOPs of the training; without them it is not decided.
    """
    facts = read_facts(machine.device)
    chosen = choose_machine(machine, facts)
    if flops is None:
        return chosen
    return replace(chosen, compile=choose_compile(chosen, facts, flops, processes)[0])


def set_backends(machine: Machine, device: str, *, fixed_shapes: bool = True) -> None:
    """Set torch's switches for a training on this type of device. CPUs have none of them.

    cuDNN's benchmark tries the kernels for each new shape, so it costs where shapes vary.
    """
    if device != "cuda":
        return
    deterministic = bool(machine.deterministic)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS starts
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    torch.backends.cudnn.benchmark = fixed_shapes and not deterministic
    # Not the newer fp32_precision: inductor still reads allow_tf32 (_inductor/kernel/bmm.py), which
    # then raises (pytorch issue 166387). These two can be read by either name.
    torch.set_float32_matmul_precision("high" if machine.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = bool(machine.tf32)


def check_machine(machine: Machine, recipe: Optimization, local_rank: int = 0) -> None:
    """Refuse settings that this machine does not support, before it crashes."""
    on_cpu = torch_device(machine, local_rank).type == "cpu"
    if recipe.sync_bn and on_cpu:
        raise RunError("sync-bn needs GPUs: torch supports no other device", "Leave it out.")
    if machine.parallel == "fsdp" and (recipe.model_ema or recipe.clip_mode != "norm"):
        raise RunError(
            "with sharded weights (--parallel fsdp) EMA weights are not supported, and gradients "
            "can only be clipped by their norm",
            "Use --parallel ddp, or leave --model-ema and --clip-mode out.",
        )
    dtype = recipe.amp_dtype or "bfloat16"
    if recipe.amp and on_cpu and not _cpu_survives(dtype):
        raise RunError(
            f"this CPU crashes with {dtype} (it reports support for instructions that it does not "
            "have)",
            "Train without --amp, or set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 (it is slower).",
        )


@cache
def _cpu_survives(dtype: str) -> bool:
    """Return whether a small training step in a separate process does not crash it."""
    script = (
        "import torch\n"
        "m = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.Flatten(), "
        "torch.nn.Linear(32 * 36, 64))\n"
        f"with torch.autocast('cpu', torch.{dtype}):\n"
        "    m(torch.randn(32, 3, 8, 8)).sum().backward()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    return done.returncode == 0
