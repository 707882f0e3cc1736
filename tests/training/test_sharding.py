"""Weights spread over processes (FSDP2): what one way of training saved, any other goes on with."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from rbdc.errors import Interrupted, RunError
from rbdc.models import ModelSpec, export
from rbdc.models.folder import WEIGHTS
from rbdc.settings import Machine
from rbdc.training import Task, World, fit_to_data, initial_weights, input_format, join_world
from rbdc.training.machine import check_machine
from rbdc.training.world import leave_world
from tests.runs.test_processes import finish, free_port
from tests.support import (
    LANGUAGE,
    QUICK,
    TINY,
    TINY_TEXT,
    data_for,
    forked,
    made_once,
    small_recipe,
    train,
)

RESNET, DEIT = "resnet18d", "deit_tiny_patch16_224"
EAGER = Machine(**{**QUICK.to_json(), "checkpoint_share": 1e9})
Parallel = Literal["ddp", "fsdp"]
Sitting = tuple[Parallel, int, int]  # ddp or fsdp, processes, steps until it is stopped (0: never)


def a_task(name: str) -> Task:
    own: dict[str, Any] = {"grad_accum_steps": 2}
    data = data_for(name)
    if name == RESNET:
        # Adam would divide the smallest gradients, which are rounding alone, by themselves; and so
        # does a norm over two images.
        own = {"opt": "sgd", "lr": 0.01, "batch_size": 20}
    arguments = {**TINY, **TINY_TEXT}[name]
    if data.class_names:
        own["mixup"] = 0.3
    else:  # what is dropped out depends on the process
        arguments = arguments | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        own["smoothing"] = 0.0
    recipe = small_recipe(clip_grad=1.0, **own)
    spec = fit_to_data(ModelSpec(name=name, arguments=arguments), data, recipe)
    epochs = 15 * recipe.batch_size / len(data.train)  # 15 steps
    image = input_format(spec, recipe, data)
    return Task(
        model=spec,
        recipe=recipe,
        image=image,
        epochs=epochs,
        seed=5,
        data_seed=5,
        warmup_epochs=1.0,
    )


def _rank(
    rank: int, size: int, port: int, parallel: str, name: str, folder: Path, stop: int
) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    world, steps = join_world(), iter(range(stop - 1, -1, -1))
    task = a_task(name)
    try:
        trained = train(
            task,
            data_for(name),
            folder,
            start=lambda: initial_weights(task),
            machine=Machine(**{**EAGER.to_json(), "parallel": parallel}),
            world=world,
            blocks=2,
            stopped=lambda: bool(stop) and next(steps, 0) == 0,
        )
        weights = list(trained.state.model.parameters())
        spread = [weight.to_local().numel() for weight in weights if isinstance(weight, DTensor)]
        expected = parallel == "fsdp" and size > 1
        assert bool(spread) == expected
        assert not expected or sum(spread) < 0.6 * sum(weight.numel() for weight in weights)
        plain = trained.state.unsharded(trained.state.model)
        if world.is_main:
            export(plain, folder / "model")
    except Interrupted:
        os._exit(75)
    finally:
        leave_world()


def sit(name: str, folder: Path, *sittings: Sitting) -> dict[str, torch.Tensor]:
    """The model that these sittings train, one after the other."""
    folder.mkdir()
    for parallel, size, stop in sittings:
        port = free_port()
        ranks = [
            forked(_rank, rank, size, port, parallel, name, folder, stop) for rank in range(size)
        ]
        assert finish(ranks) == [75 if stop else 0] * size
    weights: dict[str, torch.Tensor] = load_file(folder / "model" / WEIGHTS)
    return weights


@pytest.fixture(scope="module", params=[DEIT, RESNET, LANGUAGE])
def alone(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """What two processes that each have all weights train: a ResNet's norms see a half batch."""
    yield request.param, of_two(request.param, "ddp", tmp_path_factory)


def of_two(
    name: str, parallel: Parallel, factory: pytest.TempPathFactory
) -> dict[str, torch.Tensor]:
    """Return the model that two processes train without a stop."""
    folder = made_once(factory, f"{parallel}-{name}", lambda at: sit(name, at, (parallel, 2, 0)))
    weights: dict[str, torch.Tensor] = load_file(folder / "model" / WEIGHTS)
    return weights


def assert_close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(right[name], tensor, rtol=5e-3, atol=5e-5, msg=name)


def test_they_train_the_model_of_those_that_have_all_weights(
    alone: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    name, expected = alone
    assert_close(expected, of_two(name, "fsdp", tmp_path_factory))


def test_any_goes_on_with_what_any_saved(alone: Any, tmp_path: Path) -> None:
    name, expected = alone
    sittings: list[Sitting] = [("ddp", 2, 2), ("fsdp", 2, 2), ("ddp", 2, 2), ("fsdp", 2, 0)]
    if name != RESNET:  # one process may take over, too: without batch norms it sees the same
        sittings.insert(1, ("ddp", 1, 2))
        sittings.insert(3, ("fsdp", 1, 2))
    assert_close(expected, sit(name, tmp_path / "run", *sittings))


def test_stopped_they_end_with_the_same_bits(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    straight = of_two(DEIT, "fsdp", tmp_path_factory)
    stopped = sit(DEIT, tmp_path / "stopped", ("fsdp", 2, 2), ("fsdp", 2, 3), ("fsdp", 2, 0))
    for name, tensor in straight.items():
        assert torch.equal(tensor, stopped[name]), name


@pytest.mark.parametrize("settings", [{"model_ema": True}, {"clip_mode": "agc"}])
def test_what_they_cannot_do_is_said(settings: dict[str, Any]) -> None:
    machine = replace(QUICK, parallel="fsdp")
    with pytest.raises(RunError, match="EMA weights are not supported"):
        check_machine(machine, small_recipe(**settings))
    check_machine(machine, small_recipe())
    assert World().size == 1
