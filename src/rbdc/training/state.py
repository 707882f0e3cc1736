"""The state of a training: weights, EMA weights, optimizer and step."""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from timm.layers import convert_sync_batchnorm
from timm.models import model_parameters
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3, dispatch_clip_grad
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from rbdc.data.randomness import seed_torch
from rbdc.settings import Machine, Optimization
from rbdc.training.optimizer import optimizer_state, restore_optimizer
from rbdc.training.sharding import full_tensor, load_full, shard
from rbdc.training.world import World

Moments = tuple[Mapping[str, Tensor], Mapping[str, Any]]
"""An optimizer's state: tensors, and values for JSON."""


class State:
    """A model in training."""

    def __init__(
        self,
        model: nn.Module,
        recipe: Optimization,
        *,
        seed: int,
        loss: Callable[[Any, Any], Tensor],
        make_optimizer: Callable[[nn.Module], Optimizer],
        make_schedule: Callable[[Optimizer], Scheduler],
        device: torch.device,
        machine: Machine,
        world: World,
        moments: Moments | None = None,
    ) -> None:
        """Prepare the model. `loss(forward, batch)` calls the model through `forward`."""
        self.recipe, self.seed, self.loss = recipe, seed, loss
        self.device, self.world, self.step = device, world, 0
        self.sharded = machine.parallel == "fsdp" and world.size > 1
        self.model = model.to(device)
        if machine.channels_last and not self.sharded:  # FSDP supports no other layout
            self.model = self.model.to(memory_format=torch.channels_last)
        if recipe.sync_bn and world.size > 1:
            self.model = convert_sync_batchnorm(self.model)
        if self.sharded:
            self.full_model = copy.deepcopy(self.model).cpu()  # unsharded, for export
            self.model = shard(self.model, device, world.size)
        self.ema = (
            ModelEmaV3(self.model, decay=recipe.model_ema_decay, use_warmup=recipe.model_ema_warmup)
            if recipe.model_ema
            else None
        )
        self.optimizer = make_optimizer(self.model)
        if moments is not None:
            restore_optimizer(self.model, self.optimizer, *moments)
        self.schedule = make_schedule(self.optimizer)
        self.scaler = torch.amp.GradScaler(
            device.type, enabled=bool(recipe.amp) and recipe.amp_dtype == "float16"
        )
        self.forward: Any = self.model
        if machine.compile:
            # Batches have one shape. Siblings have one graph, so they share one compilation through
            # inductor's cache on disk, which is on by default.
            self.forward = torch.compile(self.forward, dynamic=False)
        if world.size > 1 and not self.sharded:
            # Without find_unused_parameters, DDP would rebuild its gradient buckets after the first
            # step of every session, and sums over three or more processes round by bucket order.
            warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
            self.forward = DistributedDataParallel(self.forward, find_unused_parameters=True)

    def models(self) -> list[nn.Module]:
        """Return every copy of the model: in training, EMA, and unsharded."""
        ema, full = [self.ema.module] if self.ema else [], [self.full_model] if self.sharded else []
        return [self.model, *ema, *full]

    @property
    def ema_model(self) -> nn.Module | None:
        """The model with EMA weights; None if the recipe has no EMA."""
        return self.ema.module if self.ema else None

    def best_model(self) -> nn.Module:
        """Return the model to use: the one with EMA weights, if there is one."""
        return self.ema_model or self.model

    @property
    def learning_rate(self) -> float:
        """The learning rate of the last update."""
        return float(max(group["lr"] for group in self.optimizer.param_groups))

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the recipe's autocast context."""
        if not self.recipe.amp:
            return nullcontext()
        return torch.autocast(self.device.type, getattr(torch, self.recipe.amp_dtype or "bfloat16"))

    def update(self, micro: Sequence[Any]) -> Tensor:
        """Take an optimizer step on this process's micro-batches. Return the loss on the device."""
        # dropout and drop path depend on the seed and the step only, so no generator state is saved
        seed_torch(self.device, self.seed, "step", self.step, self.world.rank)
        self.begin_step()
        losses = []
        for number, batch in enumerate(micro):
            last = number == len(micro) - 1
            if self.sharded:
                self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
            syncs = last or self.sharded or self.world.size == 1
            with nullcontext() if syncs else self.forward.no_sync():
                with self.autocast():
                    loss = self.loss(self.forward, batch)
                self.scaler.scale(loss / len(micro)).backward()
            losses.append(loss.detach())
        return self.end_step(losses)

    def begin_step(self) -> None:
        """Set the learning rate of the next step, and the model to training."""
        if not self.model.training:  # a walk over all modules, which narrow models would notice
            self.model.train()
        self.schedule.step(self.step)

    def end_step(self, losses: Sequence[Tensor]) -> Tensor:
        """Update the weights from their gradients; return the mean of the micro-batches' losses."""
        recipe = self.recipe
        if recipe.clip_grad is not None:
            self.scaler.unscale_(self.optimizer)
            clipped = model_parameters(self.model, exclude_head=recipe.clip_mode == "agc")
            dispatch_clip_grad(clipped, recipe.clip_grad, mode=recipe.clip_mode)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.step += 1
        if self.ema:
            self.ema.update(self.model, step=self.step)
        return torch.stack(list(losses)).mean()

    def is_finite(self) -> bool:
        """Return whether every weight is finite."""
        norms = torch._foreach_norm([parameter.detach() for parameter in self.model.parameters()])
        return bool(torch.stack([full_tensor(norm).float() for norm in norms]).isfinite().all())

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the full weights. Collective if sharded: every process must call this."""
        return {name: full_tensor(tensor) for name, tensor in model.state_dict().items()}

    def unsharded(self, model: nn.Module, weights: Mapping[str, Tensor] | None = None) -> nn.Module:
        """Return an unsharded model, with `weights` if given. Collective: every process must call.

        The result may be the model itself, or be overwritten by the next call: use it before the
        next step.
        """
        if weights is None and not self.sharded:
            return model
        full = self.full_model if self.sharded else copy.deepcopy(model)
        given = weights or model.state_dict()
        full.load_state_dict({name: full_tensor(tensor) for name, tensor in given.items()})
        return full

    def saved(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return everything that a later session needs: full tensors, and values for JSON.

        Collective if sharded: every process must call this.
        """
        moments, facts = optimizer_state(self.model, self.optimizer)
        tensors = {f"model/{name}": tensor for name, tensor in self.weights(self.model).items()}
        tensors |= {f"optimizer/{name}": full_tensor(tensor) for name, tensor in moments.items()}
        if self.ema:
            tensors |= {f"ema/{name}": t for name, t in self.ema.module.state_dict().items()}
        return tensors, {"optimizer": facts, "scaler": self.scaler.state_dict()}

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Restore what `saved` returned."""
        self.step = facts["step"]
        load_full(self.model, select_prefix(tensors, "model/"))
        if self.ema:
            self.ema.module.load_state_dict(select_prefix(tensors, "ema/"))
        moments = select_prefix(tensors, "optimizer/")
        restore_optimizer(self.model, self.optimizer, moments, facts["optimizer"])
        if facts["scaler"]:
            self.scaler.load_state_dict(facts["scaler"])


def select_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix`, by the rest of their names."""
    return {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
