"""On what a training runs. Nothing here is part of what is trained."""

import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch

from rbdc.errors import RunError
from rbdc.recipes import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """How a training is carried out: its device, its helpers, and when it saves."""

    device: str = "auto"
    """cuda, cpu, mps, ...; auto takes the best there is"""
    threads: int = 0
    """CPU threads of one training; 0 leaves torch's choice"""
    workers: int = 2
    """processes that decode images; images in memory need none"""
    channels_last: bool | None = None
    """memory format of convolutional networks; by default on CUDA"""
    compile: bool = False
    """torch.compile the model"""
    checkpoint_minutes: float = 10.0
    """save at least this often, also within an epoch"""
    checkpoint_epochs: int = 1
    """save at the end of every so many epochs"""
    checkpoint_share: float = 0.01
    """save at an epoch's end only once saving takes less than this share of the time"""
    keep: int = 2
    """checkpoints kept of a model in training"""
    tensorboard: bool = True
    """write TensorBoard's event files"""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def torch_device(self, local_rank: int = 0) -> torch.device:
        name = self.device
        if name == "auto":
            accelerator = torch.accelerator.current_accelerator()
            name = accelerator.type if accelerator and torch.accelerator.is_available() else "cpu"
        try:
            device = torch.device(f"cuda:{local_rank}" if name == "cuda" else name)
            torch.empty(1, device=device)
        except (RuntimeError, AssertionError, ValueError) as error:
            reason = (str(error).strip().splitlines() or ["unknown"])[0]
            raise RunError(
                f"the device {self.device!r} cannot be used: {reason}", "Use another --device."
            ) from None
        return device

    def check(self, recipe: Recipe) -> None:
        """Refuse what this machine cannot do, before it crashes on it."""
        for name in ("keep", "checkpoint_epochs"):
            if getattr(self, name) < 1:
                raise RunError(f"{name} is {getattr(self, name)}", "Give it 1 or more.")
        for name in ("threads", "workers"):
            if getattr(self, name) < 0:
                raise RunError(f"{name} is {getattr(self, name)}", "Give it 0 or more.")
        device = self.torch_device()
        if recipe.amp and device.type == "cpu" and not _cpu_survives(recipe.amp_dtype):
            raise RunError(
                f"this CPU ends the process on {recipe.amp_dtype} (it announces instructions it "
                "does not have)",
                "Train without --amp, or set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 (it is slower).",
            )


@cache
def _cpu_survives(dtype: str) -> bool:
    """Try a small training step in a process of its own: a crash there is an answer here."""
    script = (
        "import torch\n"
        "m = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.Flatten(), "
        "torch.nn.Linear(32 * 36, 64))\n"
        f"with torch.autocast('cpu', torch.{dtype}):\n"
        "    m(torch.randn(32, 3, 8, 8)).sum().backward()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, env={**os.environ}, check=False
    )
    return done.returncode == 0
