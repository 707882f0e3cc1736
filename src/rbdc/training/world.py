"""The processes that train one model together: usually one, or those that torchrun started."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rbdc.errors import RunError

T = TypeVar("T")


@dataclass(kw_only=True, slots=True)
class World:
    """This process's place among those that train together."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    _control: Any = None
    _pending: tuple[Tensor, Any] | None = field(default=None, init=False)

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and talks to the user."""
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """The sums over all processes, in double precision."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self._control)
        return tensor.tolist()

    def broadcast(self, decide: Callable[[], T]) -> T:
        """What the main process decides, known to all. If it fails, all fail."""
        if self.size == 1:
            return decide()
        message: list[Any] = [None, None]
        if self.is_main:
            try:
                message = [decide(), None]
            except Exception as error:
                message = [None, error]
        dist.broadcast_object_list(message, src=0, group=self._control)
        if message[1] is not None:
            raise message[1]
        return message[0]  # type: ignore[no-any-return]

    def gather(self, value: T) -> list[T]:
        """Everyone's, in the main process; the others get none."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(value, values, dst=0, group=self._control)
        return values or []

    def anyone(self, flag: bool) -> bool:
        """Whether any process raised its flag one call ago: all get the same answer at the same
        call, and nobody waits for it."""
        if self.size == 1:
            return flag
        answer = False
        if self._pending is not None:
            raised, work = self._pending
            work.wait()
            answer = bool(raised.item())
        raised = torch.tensor([int(flag)])
        work = dist.all_reduce(raised, op=dist.ReduceOp.MAX, group=self._control, async_op=True)
        self._pending = (raised, work)
        return answer

    def settle(self) -> None:
        """Forget what `anyone` still has under way, before another training begins."""
        if self._pending is not None:
            self._pending[1].wait()
            self._pending = None

    def broadcast_buffers(self, model: torch.nn.Module) -> None:
        """Every process gets the main one's batch-norm statistics."""
        if self.size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)


def join_world(device: str = "auto") -> World:
    """The world that torchrun, or Ray Train, describes in the environment; without it, a world of
    one. Whoever started the processes may have joined them already."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return World()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.is_available() and device in ("auto", "cuda")
    if cuda and local_rank >= torch.cuda.device_count():
        raise RunError(
            f"process {local_rank} of this machine has no GPU: there are "
            f"{torch.cuda.device_count()}",
            "Start as many processes as there are GPUs.",
        )
    if cuda:
        torch.cuda.set_device(local_rank)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo")
    control = dist.new_group(backend="gloo") if cuda else dist.group.WORLD
    return World(rank=dist.get_rank(), size=size, local_rank=local_rank, _control=control)


def leave_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
