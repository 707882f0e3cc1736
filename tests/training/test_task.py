"""What is trained, and on what."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rbdc
from rbdc.data import Batch, DataSet
from rbdc.errors import DataError, RecipeError, RunError
from rbdc.growth import Setting, parse_protocol
from rbdc.jobs.train import TrainJob
from rbdc.models import ModelSpec, at_size
from rbdc.settings import Duration, Machine
from rbdc.training import Task, World, fit_to_data, image_format, initial_weights, machine
from rbdc.training.classification import Classification, training_state
from rbdc.training.machine import check_machine, torch_device
from rbdc.training.problems import make_problem
from rbdc.training.task import describe_images
from tests.support import QUICK, TINY, small_data, small_recipe, small_task, train

DEIT = "deit_tiny_patch16_224"


@pytest.fixture(scope="module")
def data() -> DataSet:
    return small_data()


def test_a_model_is_fitted_to_its_data(data: DataSet) -> None:
    spec = rbdc.ModelSpec(name="resnet18d")
    fitted = fit_to_data(spec, data, small_recipe(drop_path=0.1, drop=0.2))
    assert fitted.arguments == {
        "num_classes": 10,
        "in_chans": 1,
        "img_size": 28,
        "drop_rate": 0.2,
        "drop_path_rate": 0.1,
    }
    resized = fit_to_data(spec, data, small_recipe(scale=(0.1, 1.0)))
    assert "img_size" not in resized.arguments  # timm's transforms make the model's own size
    with pytest.raises(DataError, match="3 classes and small has 10"):
        fit_to_data(replace(spec, arguments={"num_classes": 3}), data, small_recipe())


def test_how_images_were_prepared_goes_with_the_model(data: DataSet) -> None:
    recipe = small_recipe(mean=(0.25,), std=(0.5,))
    task = small_task("resnet18d", data)
    image = image_format(task.model, recipe, data)
    assert (image.channels, image.height, image.width) == (1, 28, 28)
    assert image.crop_pct == 1.0  # small images are shown whole
    model = rbdc.build(task.model)
    describe_images(model, image)
    assert model.pretrained_cfg["mean"] == (0.25,) and model.pretrained_cfg["crop_pct"] == 1.0  # type: ignore[index]
    for wrong in ((0.1, 0.2), (0.1, 0.2, 0.3)):
        with pytest.raises(DataError, match="values and the model takes 1"):
            image_format(task.model, small_recipe(mean=wrong, std=wrong), data)


@pytest.mark.parametrize("name", [DEIT, "resnet18d"])
def test_the_target_is_tested_at_a_size_of_its_own(
    name: str, data: DataSet, tmp_path: Path
) -> None:
    task = small_task(name, data, epochs=0.2)
    larger = replace(task, recipe=replace(task.recipe, test_size=42))
    scores = []
    for number, each in enumerate((task, larger)):
        folder = tmp_path / str(number)
        folder.mkdir()
        trained = train(each, data, folder, start=partial(initial_weights, each))
        scores.append(trained.history[-1]["loss"])
    assert scores[0] != scores[1]  # of the same weights
    problem = make_problem(larger, data, lambda: initial_weights(larger), QUICK, World())
    model: Any = problem.state(fresh=True).model
    assert model.pretrained_cfg["test_input_size"] == (1, 42, 42)
    assert model.pretrained_cfg["input_size"] == (1, 28, 28)
    wide = at_size(model, task.model, 42)
    assert (wide is model) == (name == "resnet18d")
    assert wide(torch.zeros(1, 1, 42, 42)).shape == (1, 10)


def test_only_the_target_has_a_test_size_and_patches_divide_it(data: DataSet) -> None:
    recipe = small_recipe(test_size=42)
    model = fit_to_data(
        ModelSpec(name=DEIT, arguments={**TINY[DEIT], "patch_size": 7}), data, recipe
    )
    setting = Setting(model=model, recipe=recipe, data=data, baseline_epochs=4.0)
    trial = parse_protocol("rbdc:1:width+resolution").trial(setting, 1.0, 0)
    jobs = [node.job for node in trial.nodes if isinstance(node.job, TrainJob)]
    assert [job.task.recipe.test_size for job in jobs] == [None, None, 42]
    jobs[-1].check(QUICK, 1)
    wrong = replace(jobs[-1].task, recipe=small_recipe(test_size=40))
    with pytest.raises(RecipeError, match="test-size is 40, which cannot be cut into patches of 7"):
        replace(jobs[-1], task=wrong).check(QUICK, 1)


def test_steps_of_a_training(data: DataSet) -> None:
    for epochs, steps in ((3, 15), (2.5, 12), (0.01, 1)):
        assert small_task("resnet18d", data, epochs=epochs).steps(5) == steps


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(RunError, match="the device 'abacus' cannot be used"):
        torch_device(Machine(device="abacus"))
    assert torch_device(Machine(device="cpu")).type == "cpu"


def test_a_precision_that_would_crash_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Machine(device="cpu")
    check_machine(here, small_recipe())
    monkeypatch.setattr(machine, "_cpu_survives", lambda _dtype: False)
    with pytest.raises(RunError, match="this CPU crashes with bfloat16"):
        check_machine(here, small_recipe(amp=True))
    with pytest.raises(RunError, match="sync-bn needs GPUs"):
        check_machine(here, small_recipe(sync_bn=True))


def test_weights_follow_the_seed_and_batches_the_data_seed(data: DataSet) -> None:
    task = small_task("resnet18d", data, mixup=0.2, reprob=0.25)
    assert task.seed == task.data_seed

    def made(task: Task) -> tuple[dict[str, Tensor], list[Tensor]]:
        problem = Classification(
            task, data, lambda: initial_weights(task), QUICK, World(), teacher=None, blocks=1
        )
        state = problem.state(fresh=True)
        weights = {name: value.clone() for name, value in state.model.named_parameters()}
        batches = [batch for micro in problem.batches(0, 2) for batch in micro]
        return weights, [part for b in batches for part in (b.images, b.targets, b.indices)]

    weights, batches = made(task)
    for changed, same_weights in (
        (replace(task, seed=task.seed + 1), False),
        (replace(task, data_seed=task.data_seed + 1), True),
    ):
        other_weights, other_batches = made(changed)
        assert same_weights == all(map(torch.equal, weights.values(), other_weights.values()))
        for found, other in zip(batches, other_batches, strict=True):
            assert torch.equal(found, other) != same_weights


def test_dropout_follows_the_seed_and_not_the_data_seed(data: DataSet) -> None:
    task = small_task("resnet18d", data, drop=0.5)

    def loss(task: Task) -> float:
        start = initial_weights(small_task("resnet18d", data, drop=0.5))  # the same weights for all
        device = torch.device("cpu")
        state = training_state(task, start, 5, device=device, machine=QUICK, world=World())
        batch = Batch(
            images=torch.ones(8, 1, 28, 28),
            targets=torch.zeros(8, dtype=torch.long),
            indices=torch.arange(8),
        )
        return float(state.update([batch]))

    assert loss(task) == loss(replace(task, data_seed=9))
    assert loss(task) != loss(replace(task, seed=9))


def test_a_warmup_may_be_in_steps_or_a_share(data: DataSet) -> None:
    task = small_task("resnet18d", data, epochs=4)
    for warmup, steps in ((1.0, 5), (Duration(3, "steps"), 3), (Duration(25, "%"), 5)):
        warmed = replace(task, warmup_epochs=warmup)
        assert warmed.updates(warmed.warmup_epochs, 5, total=warmed.steps(5)) == steps
    assert task.to_json()["warmup_epochs"] == 1.0
    assert replace(task, warmup_epochs=Duration(3, "steps")).to_json()["warmup_epochs"] == "3 steps"
