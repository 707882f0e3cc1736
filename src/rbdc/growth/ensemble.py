"""Ensemble of two narrow models: a reference, not a rival, because no wide model comes out.

It shows what the trainings of RBDC's parents reach alone, with the whole budget.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from rbdc.growth.protocol import Protocol, Setting, Trial
from rbdc.jobs.grow import GrowJob
from rbdc.jobs.method import Grown, GrowthContext, Method, Parent
from rbdc.models import ModelSpec


class MeanOfLogits(nn.Module):
    """Several models that return the mean of their logits."""

    def __init__(self, *models: nn.Module) -> None:
        """Register the models."""
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, images: Tensor) -> Tensor:
        """Return the mean logits of all models."""
        return torch.stack([model(images) for model in self.models]).mean(dim=0)


@dataclass(frozen=True, kw_only=True)
class Ensemble(Protocol, Method):
    """Train two narrow models and average their logits, to be evaluated and not trained on."""

    name: ClassVar[str] = "ensemble"
    summary: ClassVar[str] = "two narrow models, half of the budget each; the mean of their logits"

    def trial(self, setting: Setting, budget: float, seed: int) -> Trial:
        """Return two equal trainings, and the ensemble as the target."""
        # as an ensemble's members are trained: batches of their own make them differ more
        setting = replace(setting, batches="separate")
        epochs = budget * setting.baseline_cost / (2 * setting.forward_flops(0.5))
        members = {
            name: setting.training(name, seed, epochs, model=setting.narrow)
            for name in ("1.0", "1.1")
        }
        target = GrowJob(model=setting.model, parents=tuple(members.values()), method=self)
        return Trial.of({**members, "target": target})

    def grow(self, parents: Sequence[Parent], wide: ModelSpec, context: GrowthContext) -> Grown:  # noqa: ARG002
        """Return both parents in the place of the wide model."""
        return Grown(model=MeanOfLogits(*(parent.model for parent in parents)))
