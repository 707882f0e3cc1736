"""On what a training runs. Nothing here is part of what is trained."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from rbdc.settings.recipe import check_range, settle_types


@dataclass(frozen=True, kw_only=True)
class Machine:
    """How a training is carried out: its device, its helpers, and when it saves."""

    device: str = "auto"
    """cuda, cpu, mps, ...; auto takes the best there is"""
    threads: int = 0
    """CPU threads of one training; 0 is every core that no worker has"""
    workers: int = 2
    """processes that decode images; images in memory need none"""
    channels_last: bool = True
    """keep images and convolutions with channels last in memory, which most devices like better"""
    deterministic: bool = True
    """on a GPU, use kernels that always give the same bits: what going on bitwise needs"""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """several processes on one model: each has all its weights, or only a part (FSDP2)"""
    compile: bool = False
    """torch.compile the model"""
    checkpoint_minutes: float = 10.0
    """save at least this often, also within an epoch"""
    checkpoint_epochs: int = 1
    """save at the end of every so many epochs"""
    checkpoint_share: float = 0.005
    """save at an epoch's end only once saving takes less than this share of the time"""
    keep: int = 2
    """checkpoints kept of a model in training"""
    tensorboard: bool = True
    """write TensorBoard's event files"""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __post_init__(self) -> None:
        settle_types(self)
        check_range(self, ("keep", "checkpoint_epochs"), at_least=1)
        check_range(
            self, ("threads", "workers", "checkpoint_minutes", "checkpoint_share"), at_least=0
        )
