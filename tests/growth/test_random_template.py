"""Random template: the parent's block, and a fresh wide model around it."""

import pytest
import torch

from rbdc.coupling import Axes
from rbdc.growth.random_template import RandomTemplate, fill
from rbdc.models import ModelSpec
from rbdc.training import Task, image_format, initial_weights
from tests.growth.context import SEED, grown, wide_spec
from tests.support import SMALL, small_data, small_recipe


@pytest.mark.parametrize("name", list(SMALL))
def test_the_parent_s_block_and_a_fresh_model_around_it(name: str) -> None:
    model, parent = grown(RandomTemplate(), name)
    spec, recipe = wide_spec(name), small_recipe()
    image = image_format(spec, recipe, small_data())
    task = Task(
        model=spec, recipe=recipe, image=image, epochs=1, seed=SEED, data_seed=SEED, warmup_epochs=0
    )
    fresh = initial_weights(task).model.state_dict()
    narrow = parent.state_dict()
    for key, tensor in model.state_dict().items():
        block, around = narrow[key], fresh[key].clone()
        if ".qkv." in key:  # where q, k and v are is said here once more, by shape
            packed = around.view(3, -1, *around.shape[1:])
            inner = block.view(3, -1, *block.shape[1:])
            packed[tuple(slice(n) for n in inner.shape)] = inner
        else:
            around[tuple(slice(n) for n in block.shape)] = block
        assert torch.equal(tensor, around), key


def test_norm_statistics_outside_of_the_block_are_fresh() -> None:
    model, parent = grown(RandomTemplate(), "resnet50d")
    state, narrow = model.state_dict(), parent.state_dict()
    for key in narrow:
        for end, fresh in (("running_mean", 0), ("running_var", 1)):
            if key.endswith(end):
                old, new = state[key].chunk(2)
                assert torch.equal(old, narrow[key]) and (new == fresh).all()


def test_packed_parts_need_not_be_equal() -> None:
    wide, narrow = torch.zeros(6, 2), torch.tensor([[1.0], [2.0], [3.0]])
    fill(wide, narrow, Axes(scaled=(0, 1), input_axis=1, packed=(1, 2)))
    assert wide[:, 0].tolist() == [1, 0, 2, 3, 0, 0] and not wide[:, 1].any()


def test_it_takes_what_rbdc_takes() -> None:
    for name, arguments in (
        ("seresnet50", {}),
        ("vit_giant_patch14_dinov2", {"depth": 2}),
        ("deit_base_distilled_patch16_224", {}),
    ):
        RandomTemplate().check_model(ModelSpec(name=name, arguments=arguments))
