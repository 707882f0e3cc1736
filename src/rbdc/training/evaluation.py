"""Evaluate a classifier on the test images: top-1, top-5 and loss."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from rbdc.coupling import evaluating
from rbdc.data import Batch
from rbdc.training.sharding import is_sharded
from rbdc.training.world import World


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    world: World,
    autocast: AbstractContextManager[Any],
    *,
    idle: int = 0,
) -> dict[str, float]:
    """Return top1, top5 and loss on all test images. Accuracies are fractions from 0 to 1.

    `idle` is the number of batches that other processes have in addition. A forward pass of a
    sharded model is collective, so this process then runs that many more, and ignores the result.
    """
    count, top1, top5, loss = 0, 0, 0, 0.0
    with evaluating(model):
        for batch in batches:
            with autocast:
                logits = model(batch.images)
            logits = logits.float()
            best = logits.topk(min(5, logits.shape[1])).indices == batch.targets[:, None]
            top1 += int(best[:, 0].sum())
            top5 += int(best.any(dim=1).sum())
            loss += float(cross_entropy(logits, batch.targets, reduction="sum"))
            count += len(batch.targets)
        for _ in range(idle if is_sharded(model) else 0):
            model(batch.images)
    total, *sums = world.sum([count, top1, top5, loss])
    return {name: value / total for name, value in zip(("top1", "top5", "loss"), sums, strict=True)}
