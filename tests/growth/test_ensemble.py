"""The ensemble: the mean of two models."""

import torch

from rbdc.growth.ensemble import Ensemble
from rbdc.jobs.method import Parent
from tests.growth.context import CONTEXT, wide_spec
from tests.support import images, logits, parents


def test_it_gives_the_mean_of_both_models_logits() -> None:
    for name in ("resnet18d", "deit_tiny_distilled_patch16_224"):
        first, second = parents(name)
        both = [Parent(model=first), Parent(model=second)]
        model = Ensemble().grow(both, wide_spec(name), CONTEXT).model
        x = images(first)
        expected = (logits(first, x) + logits(second, x)) / 2
        torch.testing.assert_close(logits(model, x), expected)
        assert len(model.state_dict()) == 2 * len(first.state_dict())
