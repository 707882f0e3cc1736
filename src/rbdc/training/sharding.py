"""A model whose weights are spread over the processes that train it: torch's FSDP2.

Each process keeps a part of every weight and of the optimizer's state, and has a block whole only
while it computes with it. What is saved is always whole, so that any number of processes, sharing
weights or not, can go on with it.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(model: nn.Module, device: torch.device, processes: int) -> nn.Module:
    """Spread its weights, block by block."""
    mesh = init_device_mesh(device.type, (processes,))
    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """What networks are lists of, outermost first: a transformer's or a ResNet's blocks."""
    for child in module.children():
        if isinstance(child, nn.Sequential | nn.ModuleList):
            yield from (block for block in child if any(True for _ in block.parameters()))
        else:
            yield from _blocks(child)


def full_tensor(tensor: Tensor) -> Tensor:
    """All of it; where it is spread, every process must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor that every process has, spread as `like` is."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(
        tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )


def load_full(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """`load_state_dict` of whole weights, whether the model's are spread or not."""
    spread = {
        name: shard_like(weights[name], tensor)
        for name, tensor in model.state_dict().items()
        if name in weights
    }
    model.load_state_dict({**weights, **spread})
