"""The loss: cross-entropy of classes or tokens, and DeiT's distillation if there is a teacher."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from rbdc.data import Batch
from rbdc.settings import Recipe


class Objective:
    """The loss of a batch.

    A model with a distillation token returns two outputs in training. The class token's output
    learns from the labels, the distillation token's output from the teacher.
    """

    def __init__(self, recipe: Recipe, teacher: nn.Module | None) -> None:
        self.recipe, self.teacher = recipe, teacher

    def __call__(
        self,
        output: Tensor | tuple[Tensor, Tensor],
        images: Tensor,
        targets: Tensor,
        taught: dict[nn.Module, Tensor] | None = None,
    ) -> Tensor:
        """Return the loss. The teacher's output is read from `taught`, or added to it."""
        own, distilled = output if isinstance(output, tuple) else (output, output)
        loss = cross_entropy(own.float(), targets, label_smoothing=self.recipe.smoothing)
        if self.teacher is None:
            return loss
        taught = {} if taught is None else taught
        if self.teacher not in taught:
            with torch.no_grad():
                taught[self.teacher] = self.teacher(images).float()
        lesson = taught[self.teacher]
        alpha, tau = self.recipe.distillation_alpha, self.recipe.distillation_tau
        if self.recipe.distillation == "hard":
            distillation = cross_entropy(distilled.float(), lesson.argmax(dim=1))
        else:  # as in DeiT: the mean over batch and classes of tau^2 KL
            distillation = (
                kl_div(
                    log_softmax(distilled.float() / tau, dim=1),
                    log_softmax(lesson / tau, dim=1),
                    reduction="sum",
                    log_target=True,
                )
                * tau**2
                / distilled.numel()
            )
        return (1 - alpha) * loss + alpha * distillation


def token_loss(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """Return the cross-entropy of each sequence's next tokens, in fp32."""
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), **options)


def next_token_loss(forward: Callable[..., Any], batch: Batch) -> Tensor:
    """Return the mean loss of predicting each next token."""
    return token_loss(forward(batch.images, use_cache=False).logits, batch.targets)
