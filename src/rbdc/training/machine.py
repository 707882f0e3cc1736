"""The devices and capabilities of this machine."""

import os
import subprocess
import sys
from functools import cache

import torch

from rbdc.errors import RunError
from rbdc.settings import Machine, Optimization


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


def make_deterministic() -> None:
    """Use deterministic algorithms on GPUs; CPUs always do."""
    if torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS starts
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False


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
    if recipe.amp and on_cpu and not _cpu_survives(recipe.amp_dtype):
        raise RunError(
            f"this CPU crashes with {recipe.amp_dtype} (it reports support for instructions that "
            "it does not have)",
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
