"""The sizes of a wide weight's blocks."""

import pytest
import torch

import rbdc
from rbdc.coupling import block_sizes
from rbdc.models import halves_layout, spec_of
from tests.support import SMALL, parents

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "resnet50d"])
def test_a_coupled_weight_is_its_parents_on_the_diagonal_and_zero_beside(name: str) -> None:
    first, second = parents(name)
    wide = rbdc.couple(first, second, into=rbdc.build(name, **SMALL[name]))
    layout = halves_layout(spec_of(wide))
    sizes = block_sizes(wide.state_dict(), layout, 2)
    assert sizes.keys() == {key for key, axes in layout.items() if len(axes.scaled) == 2}
    assert any("qkv" in key or "conv2" in key for key in sizes)
    for key, ((left, right), (below, last)) in sizes.items():
        assert right == below == 0
        for found, parent in ((left, first), (last, second)):
            rms = parent.state_dict()[key].square().mean().sqrt().item()
            assert found == pytest.approx(rms, rel=1e-5)


def test_a_block_is_the_mean_of_its_own_blocks_and_packed_matrices_are_cut_one_by_one() -> None:
    name = "deit_tiny_patch16_224"
    model = rbdc.build(name, **SMALL[name])
    weight = model.state_dict()["blocks.0.attn.qkv.weight"]
    rows, columns = weight.shape
    with torch.no_grad():
        weight.fill_(1.0)
        weight[: rows // 6, columns // 2 :] = 7.0  # q's upper right
    layout = halves_layout(spec_of(model))
    two = block_sizes(model.state_dict(), layout, 2)["blocks.0.attn.qkv.weight"]
    assert two[0][0] == two[1][0] == two[1][1] == 1.0
    assert two[0][1] == pytest.approx(((49 + 1 + 1) / 3) ** 0.5)
    four = torch.tensor(block_sizes(model.state_dict(), layout, 4)["blocks.0.attn.qkv.weight"])
    merged = four.square().reshape(2, 2, 2, 2).mean(dim=(1, 3)).sqrt()
    torch.testing.assert_close(merged, torch.tensor(two))
