"""Settings are what they are declared to be, or an error that names them; the shipped recipes."""

import json
import os
import subprocess
import sys
from dataclasses import FrozenInstanceError, asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rbdc.errors import RecipeError
from rbdc.settings import (
    Cluster,
    DetectionRecipe,
    Duration,
    Machine,
    Recipe,
    Request,
    read_recipe,
    shipped_recipes,
    split_settings,
)
from rbdc.settings.schema import schemas


def recipe(name: str | Path) -> Recipe:
    return split_settings(read_recipe(str(name)))[1]


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return str(path)


def refused(**settings: Any) -> RecipeError:
    with pytest.raises(RecipeError) as error:
        Recipe(**settings)
    assert str(error.value).count("\n") == 1, "two lines"
    return error.value


# The shipped recipes


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_can_be_used(name: str) -> None:
    request, loaded = split_settings(read_recipe(name))
    assert isinstance(request, Request)
    assert isinstance(loaded, Recipe)
    json.dumps(loaded.to_json())


def test_the_recipes_of_the_paper_and_the_demos_are_shipped() -> None:
    known = ["deit", "demo", "demo-deit", "gpt-demo", "gpt2-124m", "llama-like", "resnet50d"]
    assert shipped_recipes() == known


def test_deit_is_the_official_recipe() -> None:
    expected = {
        "opt": "adamw",
        "opt_eps": 1e-8,
        "weight_decay": 0.05,
        "filter_bias_and_bn": True,
        "clip_grad": None,
        "drop": 0.0,
        "drop_path": 0.1,
        "lr": None,
        "lr_base": 5e-4,
        "lr_base_size": 512,
        "batch_size": 1024,
        "warmup_epochs": 5,
        "warmup_lr": 1e-6,
        "sched": "cosine",
        "min_lr": 1e-5,
        "aa": "rand-m9-mstd0.5-inc1",
        "train_interpolation": "bicubic",
        "scale": (0.08, 1.0),
        "hflip": 0.5,
        "reprob": 0.25,
        "remode": "pixel",
        "mixup": 0.8,
        "cutmix": 1.0,
        "mixup_prob": 1.0,
        "mixup_switch_prob": 0.5,
        "smoothing": 0.1,
        "aug_repeats": 3,
        "crop_pct": 0.875,
        "distillation": "none",
        "distillation_alpha": 0.5,
    }
    found = asdict(recipe("deit"))
    assert {name: found[name] for name in expected} == expected
    assert recipe("deit").learning_rate == pytest.approx(1e-3, rel=1e-12)


def test_resnet50d_is_the_papers_recipe() -> None:
    expected = {
        "opt": "sgd",
        "momentum": 0.9,
        "weight_decay": 1e-4,
        "batch_size": 512,
        "lr": 0.1,
        "sched": "cosine",
        "warmup_epochs": 2,
        "warmup_lr": 1e-5,
        "scale": (0.08, 1.0),
        "color_jitter": 0.4,
        "aa": None,
        "hflip": 0.5,
        "smoothing": 0.0,
        "mixup": 0.0,
        "cutmix": 0.0,
        "reprob": 0.0,
        "aug_repeats": 0,
        "crop_pct": 224 / 256,
    }
    found = asdict(recipe("resnet50d"))
    assert {name: found[name] for name in expected} == expected
    assert recipe("resnet50d").learning_rate == 0.1


def test_the_learning_rate_scales_with_the_batch_unless_it_is_given() -> None:
    assert Recipe(batch_size=1024).learning_rate == pytest.approx(1e-3, rel=1e-12)
    assert Recipe(batch_size=256, lr_base=0.1, lr_base_size=128).learning_rate == 0.2
    assert Recipe(batch_size=1024, lr=0.3).learning_rate == 0.3


def test_whole_batches_can_be_augmented_if_nothing_needs_single_images() -> None:
    plain: dict[str, Any] = {"scale": None, "color_jitter": 0.0}
    assert Recipe(**plain, crop_padding=4, reprob=0.3, mixup=0.8).batched
    for other in ({"scale": (0.5, 1.0)}, {"color_jitter": 0.1}, {"aa": "rand-m9"}):
        assert not Recipe(**{**plain, **other}).batched
    assert Recipe(cutmix=1.0).mixes
    assert Recipe(mixup=1.0).mixes
    assert not Recipe().mixes


# Files


def test_files_may_have_dashes_and_underscores(tmp_path: Path) -> None:
    path = written(tmp_path, "batch-size: 64\nwarmup_epochs: 3\nmean: [0.1, 0.2]\nstd: [1, 2]\n")
    loaded = recipe(path)
    assert (loaded.batch_size, loaded.warmup_epochs) == (64, 3.0)
    assert (loaded.mean, loaded.std) == ((0.1, 0.2), (1.0, 2.0))
    assert read_recipe(written(tmp_path, "# nothing\n")) == {}
    with pytest.raises(RecipeError, match="a setting twice"):
        read_recipe(written(tmp_path, "batch-size: 64\nbatch_size: 32\n"))


def test_settings_that_mean_the_same_are_the_same(tmp_path: Path) -> None:
    """YAML's whole numbers and lists are Python's floats and tuples: a job's key is of them."""
    text = "warmup_epochs: 5\nlr: 1\nscale: [1, 1]\n"
    one = recipe(written(tmp_path, text))
    other = Recipe(warmup_epochs=5.0, lr=1.0, scale=(1.0, 1.0))
    assert json.dumps(one.to_json()) == json.dumps(other.to_json())
    assert '"lr": 1.0' in json.dumps(one.to_json())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("lr: [1, 2", "is not YAML"),
        ("a: b: c", "is not YAML"),
        ("lr: 2001-99-99", "is not YAML"),
        ("- lr\n- opt\n", "holds no settings"),
        ("[]", "holds no settings"),
        ("0.1", "holds no settings"),
        ("lr", "holds no settings"),
        ("1: 2", "holds no settings"),
    ],
)
def test_files_that_are_no_recipes(text: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=problem) as error:
        read_recipe(written(tmp_path, text))
    assert str(error.value).count("\n") == 1, "two lines"
    assert str(tmp_path) in error.value.problem


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "binary.yml").write_bytes(b"\x89PNG\xff\xfe\x00")
    for name in ("missing.yaml", "folder.yaml", "binary.yml"):
        with pytest.raises(RecipeError, match=f"{name} cannot be read"):
            read_recipe(str(tmp_path / name))


HOSTILE = {
    "aliases": "a0: &a0 [x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
    ),
    "levels": "lr: " + "[" * 100_000,
    "mappings": "lr: " + "{a: " * 100_000,
    "digits": "batch_size: " + "9" * 400,
    "many digits": "batch_size: " + "9" * 100_000,
}  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_file_cannot_take_all_time_or_memory(text: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as error:
        Recipe(**read_recipe(written(tmp_path, text)))
    assert len(error.value.problem) < 1000


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(RecipeError, match=r"pipe\.yaml cannot be read: it is not a file"):
        read_recipe(str(tmp_path / "pipe.yaml"))


def test_a_file_cannot_run_code(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    text = f"lr: !!python/object/apply:os.system ['touch {canary}']"
    with pytest.raises(RecipeError, match="is not YAML"):
        read_recipe(written(tmp_path, text))
    assert not canary.exists()
    yaml.unsafe_load(text)
    assert canary.exists()  # it would have sung


def test_an_unknown_recipe_is_answered_with_the_nearest() -> None:
    for name, remedy in (
        ("diet", "Did you mean deit"),
        ("x", "Known are deit, demo, demo-deit, gpt-demo, gpt2-124m, llama-like, resnet50d, and"),
    ):
        with pytest.raises(RecipeError, match=f"no recipe is called '{name}'") as error:
            read_recipe(name)
        assert remedy in error.value.remedy


# Types and ranges


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("lr", "fast", "a number or nothing"),
        ("lr", "1e-3", "a number or nothing"),
        ("lr", True, "a number or nothing"),
        ("lr", float("nan"), "a number or nothing"),
        ("lr", [0.1], "a number or nothing"),
        ("weight_decay", None, "a number"),
        ("weight_decay", float("inf"), "a number"),
        ("weight_decay", 10**400, "a number"),
        ("warmup_epochs", None, "a number or a length such as '500 steps' or '10%'"),
        ("warmup_epochs", float("inf"), "a number or a length such as '500 steps' or '10%'"),
        ("warmup_epochs", 10**400, "a number or a length such as '500 steps' or '10%'"),
        ("warmup_epochs", [5], "a number or a length such as '500 steps' or '10%'"),
        ("batch_size", 64.0, "a whole number"),
        ("batch_size", True, "a whole number"),
        ("batch_size", "64", "a whole number"),
        ("model_ema", 1, "true or false"),
        ("amp", "yes", "true or false or nothing"),
        ("opt", 3, "text"),
        ("sched", "cosin", "one of cosine, linear, 1-sqrt, poly, step, tanh"),
        ("scale", [0.1], "a list: 2 of a number or nothing"),
        ("scale", [0.1, 0.2, 0.3], "a list: 2 of a number or nothing"),
        ("scale", 0.5, "a list: 2 of a number or nothing"),
        ("scale", "ab", "a list: 2 of a number or nothing"),
        ("mean", ["a"], "a list: a number or nothing"),
        ("mean", [float("nan")], "a list: a number or nothing"),
    ],
)
def test_values_of_a_wrong_type_are_named(name: str, value: Any, expected: str) -> None:
    assert refused(**{name: value}).problem == f"{name} is {value!r}, expected {expected}"


def test_what_to_do_about_a_wrong_type() -> None:
    assert "1.0e-3" in refused(lr="1e-3").remedy  # YAML 1.1 reads 1e-3 as text
    assert "1.0e-3" not in refused(lr="fast").remedy
    assert refused(sched="cosin").remedy == "Did you mean cosine?"
    assert "1.0e-3" not in refused(sched="x").remedy


@pytest.mark.parametrize(
    ("name", "bad", "good", "limits"),
    [
        ("batch_size", [0, -1], [1], "at least 1"),
        ("grad_accum_steps", [0], [1], "at least 1"),
        ("lr_base_size", [0], [1], "at least 1"),
        ("eval_epochs", [0], [1], "at least 1"),
        ("recount", [0], [1], "at least 1"),
        ("smoothing", [-0.1, 1.1], [0, 1], "at least 0 and at most 1"),
        ("hflip", [-0.1, 1.1], [0, 1], "at least 0 and at most 1"),
        ("reprob", [-0.1, 1.1], [0, 1], "at least 0 and at most 1"),
        ("drop_path", [-0.1, 1.1], [0, 1], "at least 0 and at most 1"),
        ("momentum", [-0.1, 1.1], [0, 1], "at least 0 and at most 1"),
        ("opt_betas", [(0.9, 1.1), (-0.1, 0.9)], [(0.9, 0.999)], "at least 0 and at most 1"),
        ("weight_decay", [-1], [0], "at least 0"),
        ("warmup_epochs", [-1], [0], "at least 0"),
        ("min_lr", [-1e-9], [0], "at least 0"),
        ("mixup", [-1], [0], "at least 0"),
        ("crop_padding", [-1], [0], "at least 0"),
        ("aug_repeats", [-1], [0], "at least 0"),
        ("lr", [0, -1], [1e-9], "more than 0"),
        ("lr_base", [0], [1e-9], "more than 0"),
        ("clip_grad", [0], [1], "more than 0"),
        ("crop_pct", [0, 1.01], [1], "more than 0 and at most 1"),
        ("scale", [(0, 1), (0.5, 1.5)], [(0.5, 0.5), None], "more than 0 and at most 1"),
        ("aspect_ratio", [(0, 1)], [(1, 1), (0.5, 2)], "more than 0"),
    ],
)
def test_values_out_of_range_are_named(
    name: str, bad: list[Any], good: list[Any], limits: str
) -> None:
    for value in bad:
        error = refused(**{name: value})
        assert error.problem.startswith(f"{name} is ")
        assert error.problem.endswith(f", expected {limits}")
    for value in good:
        assert Recipe(**{name: value}) == Recipe(**{name: value})


def test_a_length_may_have_another_unit() -> None:
    for given, expected in (
        (5, 5.0),
        ("5", 5.0),
        ("5 epochs", 5.0),
        ("500 steps", Duration(500, "steps")),
        ("10%", Duration(10, "%")),
        (Duration(10, "%"), Duration(10, "%")),
    ):
        found = Recipe(warmup_epochs=given)  # type: ignore[arg-type]
        assert found.warmup_epochs == expected
        assert Recipe(**found.to_json()) == found
        assert Recipe(**json.loads(json.dumps(found.to_json()))) == found
    error = refused(warmup_epochs="5 epocs")
    assert error.problem.startswith("warmup_epochs: '5 epocs' is not a length")
    assert error.remedy == "Did you mean epochs?"
    steps = DetectionRecipe(warmup_steps="100").warmup_steps  # type: ignore[arg-type]
    assert (repr(steps), repr(Recipe(warmup_epochs=5).warmup_epochs)) == ("100", "5.0")


def test_a_name_that_no_setting_has() -> None:
    error = refused(warmup_epoch=5)
    assert error.problem == "no setting is called 'warmup_epoch'"
    assert "warmup_epochs" in error.remedy


def test_settings_are_values() -> None:
    assert len({Recipe(), Recipe(lr=None), Recipe(lr=0.1)}) == 2
    assert replace(Recipe(lr=0.1), opt="sgd") == Recipe(lr=0.1, opt="sgd")
    with pytest.raises(RecipeError, match="lr is -1, expected more than 0"):
        replace(Recipe(), lr=-1.0)
    with pytest.raises(FrozenInstanceError):
        Recipe().lr = 0.1  # type: ignore[misc]


def test_settings_that_do_not_go_together() -> None:
    assert refused(distillation="hard").problem == "distillation needs a teacher"
    assert Recipe(distillation="hard", teacher="regnety_160").teacher == "regnety_160"
    assert "only one is given" in refused(mean=(0.5,)).problem
    assert "only one is given" in refused(std=(0.5,)).problem
    assert "std is 0, expected more than 0" in refused(mean=(0.5,), std=(0.0,)).problem
    assert "smaller number first" in refused(scale=(0.9, 0.1)).remedy


def test_the_machine_is_checked_too() -> None:
    assert Machine(checkpoint_minutes=1).checkpoint_minutes == 1.0
    for settings, problem in (
        ({"keep": 0}, "keep is 0, expected at least 1"),
        ({"workers": -1}, "workers is -1, expected at least 0"),
        ({"threads": "two"}, "threads is 'two', expected a whole number"),
        ({"checkpoint_epochs": 0}, "checkpoint_epochs is 0, expected at least 1"),
        ({"checkpoint_minutes": -1}, "checkpoint_minutes is -1, expected at least 0"),
    ):
        with pytest.raises(RecipeError) as error:
            Machine(**settings)
        assert error.value.problem == problem
    json.dumps(Machine().to_json())


# The room


@pytest.mark.parametrize("settings", [Request, Recipe, Machine, Cluster, DetectionRecipe])
def test_every_option_has_help(settings: Any) -> None:
    help_ = {name: schema["description"] for name, schema in schemas(settings).items()}
    assert [*help_] == [field.name for field in fields(settings)]
    for name, text in help_.items():
        assert len(text) > 5, name
        assert text.strip() == text, name


def test_recipes_can_be_read_without_torch() -> None:
    code = "import rbdc.settings as r, sys; r.read_recipe('deit'); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
