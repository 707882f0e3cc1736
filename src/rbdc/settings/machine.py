"""What a training runs on. Nothing here changes what is trained.

None is automatic: `rbdc.training.choices` chooses by the device.
"""

from typing import Literal

from rbdc.settings.schema import Amount, Count, Settings, Several, Whole, settings


@settings
class Machine(Settings):
    """How a training is carried out: device, worker processes, and when it saves."""

    device: str = "auto"
    """cuda, cpu, mps, ...; auto: the best device available"""
    threads: Whole = 0
    """CPU threads per training; 0 uses all cores not taken by data workers"""
    workers: Whole | None = None
    """data workers per training; by default the cores that each process may use, 2 on a CPU; images
    in memory need none"""
    channels_last: bool | None = None
    """use the channels-last memory format; by default on, except on mps"""
    deterministic: bool | None = None
    """use deterministic kernels, which a bitwise identical resume needs; by default only on a CPU,
    where they cost nothing"""
    tf32: bool | None = None
    """round float32 matrix products to TF32; by default on where the GPU has it"""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """how several processes train one model: full weights in each (ddp) or sharded (FSDP2)"""
    compile: bool | None = None
    """compile the model with torch.compile; by default on CUDA, for trainings long enough to pay
    for it"""
    recompute: bool = False
    """recompute activations in the backward pass instead of keeping them (activation
    checkpointing): less memory for about a third more time, and the same bits"""
    checkpoint_minutes: Amount = 10.0
    """largest time between checkpoints, in minutes"""
    checkpoint_epochs: Count = 1
    """epochs between the checkpoints that are written at the end of an epoch"""
    checkpoint_share: Amount = 0.005
    """skip a checkpoint at an epoch's end while saving takes more than this share of the time"""
    keep: Count = 2
    """number of checkpoints to keep per model in training"""
    tensorboard: bool = True
    """write TensorBoard event files"""
    log: Several[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = ("tensorboard",)
    """trackers to log to, such as wandb,mlflow: one run per model, grouped by the run's folder"""
