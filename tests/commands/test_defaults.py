"""A default is said in one place, and where commands differ on purpose, the difference is held."""

import pytest

from rbdc.cli import make_parser
from rbdc.growth import Setting, parse_protocol
from rbdc.jobs.train import TrainJob
from rbdc.models import ModelSpec
from rbdc.plan import make_plan
from rbdc.settings import PLAN, Request
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
