"""The ensemble of two narrow models: a reference, not a rival, for no wide model comes of it.

What the trainings of RBDC's parents are worth by themselves, if the whole budget goes to them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rbdc.growth.protocol import Protocol, Setting, Trial
from rbdc.jobs.grow import GrowJob
from rbdc.jobs.job import Node
from rbdc.jobs.method import Grown, GrowthContext, Method, Parent
from rbdc.models import ModelSpec, check_steps


class MeanOfLogits(nn.Module):
    """Models side by side; what they give is the mean of their logits."""

    def __init__(self, *models: nn.Module) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, images: Tensor) -> Tensor:
        return torch.stack([model(images) for model in self.models]).mean(dim=0)


@dataclass(frozen=True, kw_only=True)
class Averaging(Method):
    """Both parents as they are, in the wide model's place: to be judged, not to be trained on."""

    name: ClassVar[str] = "ensemble"
    parents: ClassVar[int] = 2

    def grow(self, parents: Sequence[Parent], wide: ModelSpec, context: GrowthContext) -> Grown:  # noqa: ARG002
        return Grown(model=MeanOfLogits(*(parent.model for parent in parents)))


@dataclass(frozen=True, kw_only=True)
class Ensemble(Protocol):
    name: ClassVar[str] = "ensemble"
    summary: ClassVar[str] = "two narrow models, half of the budget each; the mean of their logits"

    def check(self, setting: Setting) -> None:
        check_steps(setting.model, 1)

    def trial(self, setting: Setting, budget: float, seed: int) -> Trial:
        epochs = budget * setting.baseline_cost / (2 * setting.forward_flops(0.5))
        names = ("1.0", "1.1")
        members = tuple(
            setting.training(name, seed, epochs, model=setting.narrow) for name in names
        )
        target = GrowJob(model=setting.model, parents=members, method=Averaging())
        return Trial(
            nodes=(
                *(
                    Node(name=name, level=1, job=job)
                    for name, job in zip(names, members, strict=True)
                ),
                Node(name="target", level=0, job=target),
            )
        )
