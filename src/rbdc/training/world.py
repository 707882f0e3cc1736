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
    """This process's rank among those that train one model, and their communication."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    _control: Any = None
    _pending: tuple[Tensor, Any] | None = field(default=None, init=False)

    @property
    def is_main(self) -> bool:
        """Return whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Return the sums of `values` over all processes, in float64."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self._control)
        return tensor.tolist()

    def broadcast(self, decide: Callable[[], T]) -> T:
        """Return `decide()` of rank 0 in every process. If it raises, every process raises."""
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
        """Return the values of all processes in rank 0, and an empty list in the others."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(value, values, dst=0, group=self._control)
        return values or []

    def anyone(self, flag: bool) -> bool:
        """Return whether any process gave a true flag in its previous call.

        Every process gets the same answer in the same call. The answer is one call late, so that
        no process waits for it.
        """
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
        """Complete the pending reduction of `anyone`, before another training begins."""
        if self._pending is not None:
            self._pending[1].wait()
            self._pending = None

    def broadcast_buffers(self, model: torch.nn.Module) -> None:
        """Copy the buffers of rank 0, such as batch-norm statistics, to every process."""
        if self.size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)


def join_world(device: str = "auto") -> World:
    """Join the processes that torchrun or Ray Train describe in the environment, if any.

    The process group may be initialised already. Without WORLD_SIZE, the world is this process.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return World()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.is_available() and device in ("auto", "cuda")
    if cuda and local_rank >= torch.cuda.device_count():
        raise RunError(
            f"process {local_rank} of this machine has no GPU: there are "
            f"{torch.cuda.device_count()}",
            "Start as many processes per machine as it has GPUs.",
        )
    if cuda:
        torch.cuda.set_device(local_rank)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo")
    control = dist.new_group(backend="gloo") if cuda else dist.group.WORLD
    return World(rank=dist.get_rank(), size=size, local_rank=local_rank, _control=control)


def leave_world() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
