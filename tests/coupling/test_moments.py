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
        axes = layout[parameter]
        head = axes.scaled in ((), (axes.input_axis,))
        factor = 0.5 if not head else 2.0 if axes.scaled else 1.0  # the rule halves a head's weight
        assert torch.equal(coupled[f"{parameter}/exp_avg"], factor * expected)
        assert coupled[f"{parameter}/exp_avg_sq"].shape == tensor.shape
        assert coupled[f"{parameter}/step"] == 7


def test_the_body_gets_half_the_gradient_and_the_head_all_of_it() -> None:
    first, second = parents("resnet18d")
    wide = rbdc.build("resnet18d", **SMALL["resnet18d"])
    left, right = moments(first, 1), moments(second, 2)
    coupled = couple_moments(left, right, layout_of(first, wide))
    for slot, body in (("exp_avg", 0.5), ("exp_avg_sq", 0.25)):
        for name, factor in (("fc.weight", 1.0), ("bn1.weight", body), ("bn1.bias", body)):
            parts = [moment[f"{name}/{slot}"] for moment in (left, right)]
            expected = factor * torch.cat(parts, dim=parts[0].ndim - 1)
            assert torch.allclose(coupled[f"{name}/{slot}"], expected)
        mean = (left[f"fc.bias/{slot}"] + right[f"fc.bias/{slot}"]) / 2
        assert torch.allclose(coupled[f"fc.bias/{slot}"], mean)


@pytest.mark.parametrize("name", ["deit_tiny_distilled_patch16_224", "resnet18d"])
def test_second_moments_between_branches_are_a_rank_one_estimate(name: str) -> None:
    """Squares of gradients that really are products of two vectors are found exactly."""
    first, _ = parents(name)
    layout = layout_of(first, rbdc.build(name, **SMALL[name]))
    draw = torch.Generator().manual_seed(0)
    seen = 0
    for parameter, weight in first.named_parameters():
        axes = layout[parameter]
        if len(axes.scaled) < 2:
            continue
        seen += 1
        rows, columns = weight.shape[0], weight.shape[1]
        kernel = (1,) * (weight.ndim - 2)
        coming, going = (0.5 + torch.rand(2 * size, generator=draw) for size in (columns, rows))
        whole = going.view(-1, 1, *kernel) * coming.view(1, -1, *kernel)
        parts = axes.unpack(whole, 2)  # q, k and v have blocks of their own
        halves = [
            torch.cat([part.chunk(2, 0)[branch].chunk(2, 1)[branch] for part in parts])
            .expand(weight.shape)
            .contiguous()
            for branch in (0, 1)
        ]
        key = f"{parameter}/exp_avg_sq"
        coupled = couple_moments({key: halves[0]}, {key: halves[1]}, layout)[key]
        for found, part in zip(axes.unpack(coupled, 2), parts, strict=True):
            size = len(part) // 2
            above = found[:size, columns:] / part[:size, columns:]
            # exact up to one factor for the block: two parents cannot tell their common scale
            assert torch.allclose(above, above.flatten()[0].expand_as(above), rtol=1e-4)
            assert 0.1 < above.mean() < 0.5  # a quarter, and the parents' own scales
    assert seen


def test_unknown_state_is_refused() -> None:
    check_slots({"exp_avg", "exp_avg_sq", "step", "momentum_buffer"})
    with pytest.raises(CouplingError, match="keeps exp_avg_diff"):
        check_slots({"exp_avg", "exp_avg_diff"})
