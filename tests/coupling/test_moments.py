"""The optimizer's moments, coupled as the weights are."""

import pytest
import torch

import rbdc
from rbdc.coupling import check_slots, couple_moments, couple_tensor, layout_of
from rbdc.errors import CouplingError
from tests.support import SMALL, parents


def moments(model: torch.nn.Module, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, parameter in model.named_parameters():
        found[f"{name}/exp_avg"] = torch.randn(parameter.shape, generator=generator)
        found[f"{name}/exp_avg_sq"] = torch.rand(parameter.shape, generator=generator)
        found[f"{name}/step"] = torch.tensor(7.0)
    return found


@pytest.mark.parametrize("name", ["deit_tiny_distilled_patch16_224", "resnet18d"])
def test_each_moment_follows_its_weight(name: str) -> None:
    first, second = parents(name)
    wide = rbdc.build(name, **SMALL[name])
    layout, left, right = layout_of(first, wide), moments(first, 1), moments(second, 2)
    coupled = couple_moments(left, right, layout)
    shapes = dict(wide.named_parameters())
    assert coupled.keys() == {
        f"{parameter}/{slot}" for parameter in shapes for slot in ("exp_avg", "exp_avg_sq", "step")
    }
    for parameter, tensor in shapes.items():
        one, two = (left[f"{parameter}/exp_avg"], right[f"{parameter}/exp_avg"])
        expected = couple_tensor(one, two, layout[parameter])
        assert torch.equal(coupled[f"{parameter}/exp_avg"], expected)
        assert coupled[f"{parameter}/exp_avg_sq"].shape == tensor.shape
        assert coupled[f"{parameter}/step"] == 7


def test_a_halved_heads_second_moment_is_a_quarter() -> None:
    first, second = parents("resnet18d")
    wide = rbdc.build("resnet18d", **SMALL["resnet18d"])
    left, right = moments(first, 1), moments(second, 2)
    coupled = couple_moments(left, right, layout_of(first, wide))
    squares = torch.cat([left["fc.weight/exp_avg_sq"], right["fc.weight/exp_avg_sq"]], dim=1)
    assert torch.allclose(coupled["fc.weight/exp_avg_sq"], squares / 4)
    means = torch.cat([left["fc.weight/exp_avg"], right["fc.weight/exp_avg"]], dim=1)
    assert torch.allclose(coupled["fc.weight/exp_avg"], means / 2)
    # so Adam's step on a halved weight is the parents': m / sqrt(v) is unchanged
    ratio = coupled["fc.weight/exp_avg"] / coupled["fc.weight/exp_avg_sq"].sqrt()
    assert torch.allclose(ratio, means / squares.sqrt())


def test_unknown_state_is_refused() -> None:
    check_slots({"exp_avg", "exp_avg_sq", "step", "momentum_buffer"})
    with pytest.raises(CouplingError, match="keeps exp_avg_diff"):
        check_slots({"exp_avg", "exp_avg_diff"})
