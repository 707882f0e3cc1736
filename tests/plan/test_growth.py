"""Stages that grow in width, depth and resolution."""

from typing import Any

import pytest

from rbdc.errors import PlanError, RecipeError
from rbdc.models import ModelSpec, depths, image_side, parameters_of
from rbdc.plan import Growth, Plan, make_plan
from rbdc.settings import Request, StageSettings
from tests.models.small_language import EXACT

DEIT = ModelSpec(
    name="deit_tiny_patch16_224",
    arguments={"img_size": 32, "patch_size": 8, "depth": 4, "embed_dim": 64, "num_heads": 4},
)
RESNET = ModelSpec(
    name="resnet18d", arguments={"img_size": 32, "channels": [8, 16, 16, 32], "stem_width": 8}
)
ALL = Growth(axes=("width", "depth", "resolution"))


def plan(model: ModelSpec, growth: Growth, **options: Any) -> Plan:
    known = {"steps": 2, "budget": 0.5, "rounding": "none", "ratio": 1.0}
    return make_plan(model, growth=growth, **{**known, **options})


def test_every_axis_shrinks_towards_the_leaves() -> None:
    found = plan(DEIT, ALL)
    sizes = [(s.width, depths(s.model)["depth"], image_side(s.model)) for s in found.stages]
    assert sizes == [(0.25, 1, 24), (0.5, 2, 24), (1, 4, 32)]
    assert [(s.models, s.parents) for s in found.stages] == [(4, 0), (2, 2), (1, 2)]
    assert [s.grown for s in found.stages] == [
        (), ("width", "depth"), ("width", "depth", "resolution")
    ]  # fmt: skip
    assert found.normalized_flops == pytest.approx(0.5)
    assert len({s.epochs for s in found.stages}) == 1  # ratio 1
    assert found.leaves.forward_flops < found.target.forward_flops / 40


def test_depths_are_halved_rounded_up() -> None:
    uneven = ModelSpec(name="resnet18d", arguments={**RESNET.arguments, "layers": [3, 4, 6, 1]})
    levels = Growth(axes=("width", "depth")).levels(uneven, 2)
    assert [depths(level)["layers"] for level in levels] == [
        (3, 4, 6, 1), (2, 2, 3, 1), (1, 1, 2, 1)
    ]  # fmt: skip


def test_without_width_one_model_grows() -> None:
    found = plan(RESNET, Growth(axes=("depth", "resolution")), steps=1)
    assert [(s.models, s.parents, s.width) for s in found.stages] == [(1, 0, 1), (1, 1, 1)]
    assert found.stages[1].grown == ("depth", "resolution")


def test_width_alone_is_the_papers_plan() -> None:
    assert make_plan(DEIT, steps=2, budget=0.7) == make_plan(
        DEIT, steps=2, budget=0.7, growth=Growth(axes=("width",))
    )


def test_stages_in_full_with_shares() -> None:
    stages = (
        StageSettings(width=0.5, depth=1, img_size=16, share=0.2),
        StageSettings(width=0.5, img_size=16, share=0.1),  # depth alone: two models grow
        StageSettings(img_size=24, share=0.3),
        StageSettings(share=0.4),
    )
    found = plan(DEIT, Growth(stages=stages))
    assert [s.share for s in found.stages] == pytest.approx([0.2, 0.1, 0.3, 0.4])
    assert [(s.models, s.parents) for s in found.stages] == [(2, 0), (2, 1), (1, 2), (1, 1)]
    grown = [s.grown for s in found.stages[1:]]
    assert grown == [("depth",), ("width", "resolution"), ("resolution",)]
    assert found.normalized_flops == pytest.approx(0.5)


def test_sequences_of_text_are_shorter_before_the_target() -> None:
    pytest.importorskip("transformers")
    gpt = ModelSpec(name="gpt2", arguments={**EXACT["gpt2"], "n_layer": 4, "sequence_length": 64})
    found = plan(gpt, ALL)
    sizes = [(depths(s.model)["n_layer"], image_side(s.model)) for s in found.stages]
    assert sizes == [(1, 40), (2, 48), (4, 64)]
    assert found.normalized_flops == pytest.approx(0.5)
    seen = [found.tokens_per_parameter(stage) for stage in found.stages]
    assert seen[1] == pytest.approx(
        found.stages[1].epochs * found.images * 48 / parameters_of(found.stages[1].model)
    )
    short = Growth(stages=(StageSettings(width=0.5, sequence_length=16), StageSettings()))
    assert [image_side(s.model) for s in plan(gpt, short).stages] == [16, 64]
    with pytest.raises(PlanError, match="a stage has img_size, which gpt2 does not take"):
        plan(gpt, Growth(stages=(StageSettings(img_size=16), StageSettings())))
    with pytest.raises(PlanError, match="has sequence_length, which deit_tiny"):
        plan(DEIT, Growth(stages=(StageSettings(sequence_length=16), StageSettings())))


def test_a_request_gives_stages_as_text_or_records() -> None:
    record = {"width": 0.5, "share": 0.25}
    given = Request(stages=[record, {"share": 0.75}])  # type: ignore[arg-type]
    assert Growth.of(given, DEIT).shares == pytest.approx([0.75, 0.25])
    with pytest.raises(RecipeError, match="no setting is called 'widht'"):
        Growth.of(Request(stages=({"widht": 0.5},)), DEIT)


def test_auto_is_what_the_family_grows_in_and_the_model_can() -> None:
    auto = Request(grow=("auto",))
    assert Growth.of(auto, DEIT).axes == ("width", "resolution")
    assert Growth.of(auto, RESNET).axes == ("width", "depth", "resolution")
    shallow = ModelSpec(name="resnet18d", arguments={**RESNET.arguments, "layers": [1, 1, 1, 1]})
    assert Growth.of(auto, shallow).axes == ("width", "resolution")
    coarse = ModelSpec(name=DEIT.name, arguments={**DEIT.arguments, "patch_size": 16})
    assert Growth.of(auto, coarse).axes == ("width",)
    assert Growth.of(auto, ModelSpec(name="convnext_atto")).axes == ("width",)
    with pytest.raises(RecipeError, match="grow is auto, width"):
        Request(grow=("auto", "width"))


@pytest.mark.parametrize(
    "model, growth, message",
    [
        (ModelSpec(name=DEIT.name, arguments={**DEIT.arguments, "depth": 1}), ALL,
         "has 1 blocks, which cannot be halved"),
        (ModelSpec(name="vgg11"), Growth(axes=("depth",)), "has no blocks that repeat"),
        (DEIT, Growth(axes=("resolution",), narrow_size=0.99), "takes inputs of 32 px, and"),
        (DEIT, Growth(stages=(StageSettings(img_size=20), StageSettings())),
         "images of 20 px cannot be cut into patches of 8 px"),
        (DEIT, Growth(stages=(StageSettings(depth=5), StageSettings())), "never shrink"),
        (DEIT, Growth(stages=(StageSettings(img_size=40), StageSettings())), "never shrink"),
        (DEIT, Growth(stages=(StageSettings(width=0.25), StageSettings())), "stays or doubles"),
        (DEIT, Growth(stages=(StageSettings(), StageSettings(depth=2))), "the last stage is"),
        (DEIT, Growth(stages=(StageSettings(share=0.5), StageSettings())), "the shares"),
        (DEIT, Growth(stages=(StageSettings(share=0.5), StageSettings(share=0.6))), "the shares"),
        (RESNET, Growth(stages=(StageSettings(depth=(1, 1)), StageSettings())), "has depth"),
    ],
)  # fmt: skip
def test_what_cannot_grow_is_refused_with_the_reason(
    model: ModelSpec, growth: Growth, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        plan(model, growth)


def test_a_quarter_of_the_cost_is_half_the_width_alone() -> None:
    with pytest.raises(PlanError, match="costs quarter holds for growth in width alone"):
        plan(DEIT, ALL, costs="quarter")
    assert plan(DEIT, Growth(), costs="quarter").stages


def test_unknown_and_repeated_axes_are_refused() -> None:
    with pytest.raises(RecipeError, match="grow is width, width"):
        Request(grow=("width", "width"))
    with pytest.raises(RecipeError, match="expected a list: one of width, depth, resolution"):
        Request(grow=("widht",))  # type: ignore[arg-type]
