"""Train several models of one architecture as one model with a leading axis on every weight.

The forward and the backward pass of all models are one (`torch.func.vmap`): batched matrix products
and grouped convolutions, and one loop in Python. Gradients arrive in the models' own parameters, so
each model keeps its optimizer, its checkpoints and its logs, and is an ordinary model afterwards.

Sums over a batched product round otherwise than those of a model alone. So fused trainings say in
their keys with whom they are fused, and a fused training resumes with the same models.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from rbdc.data import TextFormat
from rbdc.data.randomness import seed_torch
from rbdc.training.state import State
from rbdc.training.task import Task


def can_fuse(task: Task) -> bool:
    """Return whether a task's models can be fused: vmap has no rule for transformers' masks."""
    return not isinstance(task.image, TextFormat)


class FusedStates:
    """States of equal architectures that take their steps together, on the same batches."""

    def __init__(self, states: Sequence[State]) -> None:
        self.states = states
        self.empty = copy.deepcopy(states[0].model).to("meta").train()
        for module in self.empty.modules():
            if isinstance(getattr(module, "fused_attn", None), bool):
                module.fused_attn = False  # type: ignore[assignment]  # vmap has no rule for it
        self.weights, self.buffers = (
            [dict(getattr(state.model, kind)()) for state in states]
            for kind in ("named_parameters", "named_buffers")
        )

    def update(self, micro: Sequence[Any]) -> list[Tensor]:
        """Take a step with every model; return their losses on the device."""
        first = self.states[0]
        seeds = [state.seed for state in self.states]
        seed_torch(first.device, *seeds, "step", first.step, first.world.rank)
        for state in self.states:
            state.begin_step()
        losses = [self._backward(batch, len(micro)) for batch in micro]
        each = zip(self.states, zip(*losses, strict=True), strict=True)
        return [state.end_step(own) for state, own in each]

    def _backward(self, batch: Any, parts: int) -> list[Tensor]:
        """Add the gradients of one micro-batch; return each model's loss."""
        weights, buffers = _stacked(self.weights), _stacked(self.buffers)
        with self.states[0].autocast():
            forward = vmap(self._forward, in_dims=(0, 0, None), randomness="different")
            losses = []
            outputs: Any = None
            for number, state in enumerate(self.states):

                def own(images: Tensor, number: int = number) -> Any:
                    nonlocal outputs
                    if outputs is None:
                        outputs = forward(weights, buffers, images)
                    if isinstance(outputs, tuple):  # with a distillation token
                        return tuple(output[number] for output in outputs)
                    return outputs[number]

                losses.append(state.loss(own, batch))
        scaled = [s.scaler.scale(loss / parts) for s, loss in zip(self.states, losses, strict=True)]
        torch.stack(scaled).sum().backward()
        for number, own_buffers in enumerate(self.buffers):
            for name, buffer in own_buffers.items():
                buffer.copy_(buffers[name][number])
        return [loss.detach() for loss in losses]

    def _forward(
        self, weights: dict[str, Tensor], buffers: dict[str, Tensor], images: Tensor
    ) -> Any:
        return functional_call(self.empty, (weights, buffers), (images,))


def _stacked(tensors: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([own[name] for own in tensors]) for name in tensors[0]}
