"""The loss: cross-entropy, and DeiT's distillation if there is a teacher."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from rbdc.settings import Recipe


class Objective:
    """The loss of a batch.

    A model with a distillation token returns two outputs in training. The class token's output
    learns from the labels, the distillation token's output from the teacher.
    """

    def __init__(self, recipe: Recipe, teacher: nn.Module | None) -> None:
        self.recipe, self.teacher = recipe, teacher

    def __call__(
        self, output: Tensor | tuple[Tensor, Tensor], images: Tensor, targets: Tensor
    ) -> Tensor:
        own, distilled = output if isinstance(output, tuple) else (output, output)
        loss = cross_entropy(own.float(), targets, label_smoothing=self.recipe.smoothing)
        if self.teacher is None:
            return loss
        with torch.no_grad():
            taught = self.teacher(images).float()
        alpha, tau = self.recipe.distillation_alpha, self.recipe.distillation_tau
        if self.recipe.distillation == "hard":
            distillation = cross_entropy(distilled.float(), taught.argmax(dim=1))
        else:  # as in DeiT: the mean over batch and classes of tau^2 KL
            distillation = (
                kl_div(
                    log_softmax(distilled.float() / tau, dim=1),
                    log_softmax(taught / tau, dim=1),
                    reduction="sum",
                    log_target=True,
                )
                * tau**2
                / distilled.numel()
            )
        return (1 - alpha) * loss + alpha * distillation
