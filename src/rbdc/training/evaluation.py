"""Evaluate a classifier on the test images: top-1, top-5 and loss."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from rbdc.coupling import evaluating
from rbdc.data import Batch
from rbdc.training.sharding import is_sharded
from rbdc.training.world import World


@torch.no_grad()
def evaluate(
    models: Sequence[nn.Module],
    batches: Iterable[Batch],
    world: World,
    autocast: AbstractContextManager[Any],
    *,
    idle: int = 0,
) -> list[dict[str, float]]:
    """Return each model's top1, top5 and loss on all test images, in one pass over them.

    Accuracies are fractions from 0 to 1. `idle` is the number of batches that other processes have
    in addition. A forward pass of a sharded model is collective, so this process then runs that
    many more, and ignores the result.
    """
    sums = [[0.0] * 4 for _ in models]  # images, top1, top5, loss
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(evaluating(model))
        for batch in batches:
            for model, total in zip(models, sums, strict=True):
                with autocast:
                    logits = model(batch.images)
                for index, value in enumerate(_counts(logits.float(), batch.targets)):
                    total[index] += value
        for model in models if idle else ():
            for _ in range(idle if is_sharded(model) else 0):
                model(batch.images)
    found = []
    for count, *rest in map(world.sum, sums):
        scores = zip(("top1", "top5", "loss"), rest, strict=True)
        found.append({name: value / count for name, value in scores})
    return found


def _counts(logits: Tensor, targets: Tensor) -> tuple[int, int, int, float]:
    """Return the images of a batch, those right at once and within five, and their loss."""
    best = logits.topk(min(5, logits.shape[1])).indices == targets[:, None]
    loss = float(cross_entropy(logits, targets, reduction="sum"))
    return len(targets), int(best[:, 0].sum()), int(best.any(dim=1).sum()), loss
