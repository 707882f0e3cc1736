"""FLOPs against the paper's figures and against what is known of attention."""

import pytest
import torch

import rbdc
from rbdc.errors import PlanError
from rbdc.models import ModelSpec
from rbdc.plan import FLOPS_PER_MAC


@pytest.mark.parametrize(
    ("width", "flops"),
    [(1.0, 8_705_517_568), (0.5, 2_194_789_376), (0.25, 557_902_336), (0.125, 144_078_080)],
)
def test_resnet50d_costs_what_the_paper_says(width: float, flops: int) -> None:
    assert rbdc.forward_flops(ModelSpec(name="resnet50d", width=width), 224, "fvcore") == flops


@pytest.mark.parametrize(
    ("name", "without", "with_attention"),
    [("tiny", 1.0796, 1.2584), ("small", 4.2507, 4.6083), ("base", 16.867, 17.583)],
)
def test_attention_is_counted_by_default(name: str, without: float, with_attention: float) -> None:
    model = f"deit_{name}_patch16_224"
    paper = rbdc.count_flops(model, counter="fvcore")
    assert paper.forward_flops / FLOPS_PER_MAC / 1e9 == pytest.approx(without, rel=1e-4)
    assert paper.uncounted["aten::scaled_dot_product_attention"] == 12
    ours = rbdc.count_flops(model)
    assert ours.forward_flops / FLOPS_PER_MAC / 1e9 == pytest.approx(with_attention, rel=1e-4)
    assert "aten::scaled_dot_product_attention" not in ours.uncounted
    torchs = rbdc.count_flops(model, counter="torch")
    assert torchs.forward_flops == pytest.approx(ours.forward_flops, rel=0.005)
    assert torchs.uncounted["aten.gelu"] == 12


def test_a_model_and_its_spec_cost_the_same_and_the_model_is_left_alone() -> None:
    model = rbdc.build("resnet18d", 0.25, img_size=32).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert rbdc.forward_flops(model) == rbdc.forward_flops(rbdc.spec_of(model))
    assert rbdc.forward_flops(model, 64) == rbdc.forward_flops(rbdc.spec_of(model), 64)
    assert rbdc.forward_flops(model, 64) == pytest.approx(4 * rbdc.forward_flops(model), rel=0.05)
    assert model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_linear_layer_costs_two_flops_a_weight() -> None:
    small = rbdc.forward_flops(ModelSpec(name="resnet18", arguments={"num_classes": 10}))
    large = rbdc.forward_flops(ModelSpec(name="resnet18", arguments={"num_classes": 110}))
    assert large - small == 100 * 512 * 2


def test_bad_input() -> None:
    with pytest.raises(PlanError, match="not a timm model"):
        rbdc.forward_flops(torch.nn.Linear(2, 2))
    with pytest.raises(PlanError, match="Did you mean fvcore"):
        rbdc.forward_flops("resnet18", counter="fvcor")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="cannot process an image of 8 x 8 px"):
        rbdc.forward_flops("deit_tiny_patch16_224", 8)
    with pytest.raises(PlanError, match="cannot process an image of 100 x 100 px"):
        rbdc.forward_flops(rbdc.build("deit_tiny_patch16_224"), 100)
