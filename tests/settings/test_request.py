"""What a recipe file says and what is given on top of it become a request and a recipe."""

from pathlib import Path
from typing import Any

import pytest

from rbdc.errors import RecipeError
from rbdc.settings import Recipe, Request, read_recipe, split_settings


def refused(settings: dict[str, Any], given: dict[str, Any] | None = None) -> RecipeError:
    with pytest.raises(RecipeError) as error:
        split_settings(settings, given)
    assert str(error.value).count("\n") == 1, "two lines"
    return error.value


def test_settings_go_where_they_belong() -> None:
    request, recipe = split_settings({"model": "resnet18d", "steps": 2, "lr": 0.1, "opt": "sgd"})
    assert request == Request(model="resnet18d", steps=2)
    assert recipe == Recipe(lr=0.1, opt="sgd")
    assert split_settings({}) == (Request(), Recipe())


def test_what_is_given_goes_before_the_file() -> None:
    settings = {"steps": 2, "lr": 0.1, "scale": None}
    request, recipe = split_settings(settings, {"steps": 1, "lr": 0.2})
    assert (request.steps, recipe.lr, recipe.scale) == (1, 0.2, None)
    assert settings == {"steps": 2, "lr": 0.1, "scale": None}


def test_another_model_has_its_own_arguments() -> None:
    file = read_recipe("demo")
    assert split_settings(file)[0].model_kwargs == file["model_kwargs"] != {}
    assert split_settings(file, {"model": "resnet50d"})[0].model_kwargs == {}
    given = {"model": "resnet50d", "model_kwargs": {"stem_width": 16}}
    assert split_settings(file, given)[0].model_kwargs == {"stem_width": 16}
    assert split_settings(file, {"lr": 0.1})[0].model_kwargs


@pytest.mark.parametrize("name", ["budget", "total_flops", "epochs", "total_epochs"])
def test_another_way_to_spend_replaces_the_files(name: str) -> None:
    ways = ("budget", "total_flops", "epochs", "total_epochs")
    for file in ways:
        request, _ = split_settings({file: 3.0, "baseline_epochs": 8}, {name: 5.0})
        assert {way: getattr(request, way) for way in ways if getattr(request, way)} == {name: 5.0}
        assert request.baseline_epochs == 8.0
        request, _ = split_settings({file: 3.0}, {"lr": 0.1})
        assert getattr(request, file) == 3.0


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    for name, nearest in (
        ("bathc_size", "batch_size"),
        ("lerning_rate", ""),
        ("step", "steps"),
        ("mix_up", "mixup"),
        ("modle", "model"),
    ):
        for error in (refused({name: 1}), refused({}, {name: 1})):
            assert error.problem == f"no setting is called {name!r}"
            assert nearest in error.remedy
    assert refused({"zzzzz": 1}).remedy.startswith("Known are model, model_kwargs, width, ")


def test_settings_of_the_machine_and_the_cluster_are_told_from_unknown_ones() -> None:
    error = refused({}, {"log": "wandb"})
    assert error.problem == "log is a setting of the machine, not of what is trained"
    assert "machine=rbdc.Machine(log=...)" in error.remedy and "--log " in error.remedy
    assert "cluster=rbdc.Cluster(retries=...)" in refused({"retries": 3}).remedy


def test_a_number_that_yaml_reads_as_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("lr: 1e-3\n")
    error = refused(read_recipe(str(path)))
    assert error.problem == "lr is '1e-3', expected a number or nothing"
    assert error.remedy == "Numbers are written 0.001 or 1.0e-3: YAML reads 1e-3 as text."
    path.write_text("lr: 1.0e-3\n")
    assert split_settings(read_recipe(str(path)))[1].lr == 0.001


def test_a_transition_is_one_or_one_a_level() -> None:
    for given, expected in (
        ("carry", ("carry",)),
        ("restart,carry", ("restart", "carry")),
        (["restart", "carry"], ("restart", "carry")),
        (("carry",), ("carry",)),
    ):
        assert split_settings({"transition": given})[0].transition == expected
    error = refused({"transition": "cary"})
    assert error.problem == "transition is 'cary', expected a list: one of restart, carry"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, f"seed is {2**63}"),
        ({"seed": 1.5}, "seed is 1.5, expected a whole number"),
        ({"steps": 1.5}, "steps is 1.5, expected a whole number or auto"),
        ({"model": 18}, "model is 18, expected text or nothing"),
        ({"model_kwargs": [1]}, "model_kwargs is [1], expected names with values"),
        ({"img_size": 0}, "img_size is 0, expected at least 1"),
        ({"carry_warmup_epochs": -1}, "carry_warmup_epochs is -1, expected at least 0"),
        ({"with_baseline": "yes"}, "with_baseline is 'yes', expected true or false"),
        ({"counter": "torch2"}, "counter is 'torch2', expected one of fvcore, fvcore+sdpa, torch"),
    ],
)
def test_wrong_requests_are_named(settings: dict[str, Any], problem: str) -> None:
    assert refused(settings).problem == problem


def test_requests_that_mean_the_same_are_the_same() -> None:
    request, _ = split_settings({"epochs": 90, "ratio": 2})
    assert (repr(request.epochs), repr(request.ratio)) == ("90.0", "2.0")
    assert Request(seed=2**63 - 1).seed == 2**63 - 1
