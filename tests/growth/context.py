"""What tests of growth need: methods at work on small models."""

from typing import Any

import torch
from torch import nn

import rbdc
from rbdc.jobs.method import GrowthContext, Method, Parent
from rbdc.models import ModelSpec
from tests.support import SMALL, parents

SEED = 3
CONTEXT = GrowthContext(
    seed=SEED,
    device=torch.device("cpu"),
    batches=lambda: iter(()),
    loss=lambda model, batch: model(batch.images).sum(),
)


def wide_spec(name: str) -> ModelSpec:
    return ModelSpec(name=name, arguments=SMALL[name])


def grown(method: Method, name: str) -> tuple[Any, nn.Module]:
    """The wide model, and its parent: one with telling weights and norm statistics."""
    parent = parents(name)[0]
    before = {key: tensor.clone() for key, tensor in parent.state_dict().items()}
    model = method.grow([Parent(model=parent)], wide_spec(name), CONTEXT).model
    assert rbdc.spec_of(model) == wide_spec(name)
    for key, tensor in parent.state_dict().items():
        assert torch.equal(tensor, before[key]), f"{key} of the parent was changed"
    return model, parent
