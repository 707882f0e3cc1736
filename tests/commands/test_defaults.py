"""A default is said in one place, and where commands differ on purpose, the difference is held."""

from typing import Literal

import pytest

from rbdc.cli import make_parser
from rbdc.commands.common import chosen_settings
from rbdc.experiments.reproduce import read_experiment
from rbdc.growth import Setting, parse_protocol
from rbdc.jobs.train import TrainJob
from rbdc.models import ModelSpec
from rbdc.plan import make_plan
from rbdc.settings import PLAN, Request, read_recipe, split_settings
from rbdc.training import fit_to_data
from tests.support import TINY, small_data, small_recipe


def test_train_and_plan_round_epochs_and_compare_never_does() -> None:
    """The reasons stand beside `Request.rounding`."""
    understood = make_parser().parse_args(["train", "--rounding", "none"])
    assert understood.rounding == "none"
    assert make_parser().parse_args(["plan", "resnet18", "--rounding", "none"]).rounding == "none"
    with pytest.raises(ValueError, match="does not know --rounding"):
        make_parser().parse_args(["compare", "--rounding", "none"])

    name = "resnet18d"
    data, recipe = small_data(), small_recipe()
    model = fit_to_data(ModelSpec(name=name, arguments=TINY[name]), data, recipe)
    request = Request(budget=0.61, baseline_epochs=9)
    planned = make_plan(
        model, images=len(data.train), **{key: getattr(request, key) for key in PLAN}
    )
    assert all(stage.epochs == round(stage.epochs) for stage in planned.stages)
    setting = Setting(model=model, recipe=recipe, data=data, baseline_epochs=9.0)
    trial = parse_protocol("rbdc:1").trial(setting, 0.61, 0)
    assert isinstance(trial.target.job, TrainJob)
    target = trial.target.job.task.epochs
    exact = make_plan(model, budget=0.61, baseline_epochs=9, rounding="none").target.epochs
    assert target == pytest.approx(exact, rel=1e-12)
    assert target != round(target)


@pytest.mark.parametrize(
    ("words", "grow", "ratio"),
    [
        (["--model=deit_base_patch16_224"], ("auto",), 1.0),
        (["--model=resnet50d"], ("auto",), 1.0),
        (["--model=convnext_tiny"], ("auto",), 2.0),  # nothing was measured
        (["--model=deit_base_patch16_224", "--grow=width", "--ratio=2"], ("width",), 2.0),
        (["--model=deit_base_patch16_224", "--recipe=deit"], ("width",), 2.0),
    ],
)
def test_a_family_grows_as_was_measured_best_unless_told_otherwise(
    words: list[str], grow: tuple[str, ...], ratio: float
) -> None:
    _, request, _ = chosen_settings(make_parser().parse_args(["train", *words]))
    assert (request.grow, request.ratio) == (grow, ratio)
    assert not hasattr(make_parser().parse_args(["plan", "deit_base_patch16_224"]), "grow")
    assert Request.grow == ("width",) and Request.ratio == 2  # a plan's are the paper's


@pytest.mark.parametrize("name", ["efficiency", "ratio", "padding", "growth"])
@pytest.mark.parametrize("scale", ["paper", "small"])
def test_the_papers_experiments_are_the_papers(name: str, scale: Literal["paper", "small"]) -> None:
    """Growth in width alone, with a restart at every coupling."""
    for case in read_experiment(name, scale).cases:
        request, _ = split_settings(read_recipe(case.recipe), case.settings)
        assert request.grow == ("width",) and request.transition == ("restart",)
        assert request.ratio == 2 or name in ("ratio", "padding")
