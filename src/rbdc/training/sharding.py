"""Shard a model's weights over the processes that train it, with torch's FSDP2.

Each process has a shard of every weight and of the optimizer's state, and gathers a block's full
weights only while it computes with them. Checkpoints contain full tensors, so that any number of
processes, with FSDP or DDP, can resume from them.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(model: nn.Module, device: torch.device, processes: int) -> nn.Module:
    """Shard the model's weights over the processes, block by block."""
    mesh = init_device_mesh(device.type, (processes,))
    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def is_sharded(model: nn.Module) -> bool:
    """Return whether the model's weights are sharded."""
    return isinstance(model, FSDPModule)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the members of the outermost lists of modules: a transformer's or ResNet's blocks."""
    for child in module.children():
        if isinstance(child, nn.Sequential | nn.ModuleList):
            yield from (block for block in child if any(True for _ in block.parameters()))
        else:
            yield from _blocks(child)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor. Collective if it is sharded: every process must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this process's shard of a full tensor, sharded as `like` is."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(
        tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )


def load_full(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load full weights into a model, sharded or not."""
    set_model_state_dict(model, dict(weights), options=StateDictOptions(full_state_dict=True))
