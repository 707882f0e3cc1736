"""What is minimised, and what teaches."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch.nn.functional import cross_entropy, log_softmax, softmax

import rbdc
from rbdc.data import DataSet
from rbdc.errors import RbdcError
from rbdc.training import World, initial_weights
from rbdc.training.objective import Objective
from rbdc.training.task import image_format
from rbdc.training.teacher import load_teacher
from tests.support import QUICK, TINY, small_data, small_recipe, small_task, train

pytestmark = pytest.mark.numeric
DISTILLED = "deit_tiny_distilled_patch16_224"


@pytest.fixture(scope="module")
def data() -> DataSet:
    return small_data()


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    model = rbdc.build("resnet18d", 0.5, **TINY["resnet18d"], in_chans=1, num_classes=10)
    return rbdc.export(model, tmp_path_factory.mktemp("teacher") / "model")


def test_smoothing_is_linear_in_the_targets() -> None:
    logits, labels = torch.randn(6, 10), torch.arange(6)
    loss = Objective(small_recipe(smoothing=0.1), None)(logits, logits, labels)
    soft = torch.full((6, 10), 0.01).scatter_(1, labels[:, None], 0.91)
    assert loss == pytest.approx(float(-(soft * log_softmax(logits, 1)).sum(1).mean()), rel=1e-5)


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_distillation_is_deits(kind: str) -> None:
    own, token, taught = (torch.randn(4, 10, generator=_seeded(i)) for i in range(3))
    labels, alpha, tau = torch.tensor([1, 2, 3, 4]), 0.3, 2.0
    recipe = small_recipe(
        smoothing=0.0,
        distillation=kind,
        teacher="x",
        distillation_alpha=alpha,
        distillation_tau=tau,
    )
    loss = Objective(recipe, _Constant(taught))((own, token), own, labels)
    if kind == "hard":
        lesson = cross_entropy(token, taught.argmax(1))
    else:  # DeiT's losses.py: KL summed, times T^2, over the number of elements
        p, log_q = softmax(taught / tau, 1), log_softmax(token / tau, 1)
        lesson = (p * (p.log() - log_q)).sum() * tau**2 / token.numel()
    expected = (1 - alpha) * cross_entropy(own, labels) + alpha * lesson
    assert loss == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("name", [DISTILLED, "resnet18d"])
def test_a_student_learns_from_a_folder(
    name: str, data: DataSet, teacher: Path, tmp_path: Path
) -> None:
    arguments = TINY["deit_tiny_patch16_224"] if name == DISTILLED else TINY[name]
    settings: dict[str, Any] = {"distillation": "hard", "teacher": str(teacher)}
    task = small_task(name, data, arguments=arguments, epochs=1, **settings)
    found = load_teacher(task.recipe, image_format(task.model, task.recipe, data), 10)
    assert found is not None
    before = {k: v.clone() for k, v in found.model.state_dict().items()}
    (tmp_path / "run").mkdir()
    trained = train(
        task,
        data,
        tmp_path / "run",
        start=lambda: initial_weights(task),
        machine=QUICK,
        world=World(),
        teacher=found.model,
    )
    assert all(torch.equal(v, before[k]) for k, v in found.model.state_dict().items())
    if name == DISTILLED:  # both tokens' heads have learnt
        moments = trained.state.saved()[0]
        assert moments["optimizer/head_dist.weight/exp_avg"].abs().sum() > 0
        assert moments["optimizer/head.weight/exp_avg"].abs().sum() > 0


def test_a_teacher_by_name_with_a_weight_file(data: DataSet, tmp_path: Path) -> None:
    model = timm.create_model("test_resnet", num_classes=10, in_chans=1)
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    recipe = small_recipe(
        distillation="soft", teacher="test_resnet", teacher_path=str(tmp_path / "weights.pth")
    )
    spec = small_task("resnet18d", data).model
    found = load_teacher(recipe, image_format(spec, recipe, data), 10)
    assert found is not None
    for name, tensor in found.model.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
    # counted on the student's images, 28 px and gray, not on the teacher's own
    model.pretrained_cfg["input_size"] = (1, 28, 28)
    assert found.forward_flops == rbdc.forward_flops(model)


def test_a_malicious_teacher_is_not_executed(data: DataSet, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "canary"),))

    (tmp_path / "weights.pth").write_bytes(pickle.dumps({"state_dict": Evil()}))
    recipe = small_recipe(
        distillation="hard", teacher="test_resnet", teacher_path=str(tmp_path / "weights.pth")
    )
    spec = small_task("resnet18d", data).model
    with pytest.raises(RbdcError, match="cannot be read as weights"):
        load_teacher(recipe, image_format(spec, recipe, data), 10)
    assert not (tmp_path / "canary").exists()


def test_a_teacher_that_does_not_fit(data: DataSet, teacher: Path, tmp_path: Path) -> None:
    recipe = small_recipe(distillation="hard", teacher=str(teacher))
    spec = small_task("resnet18d", data).model
    with pytest.raises(RbdcError, match="logits and the data has 7 classes"):
        load_teacher(recipe, image_format(spec, recipe, data), 7)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text(json.dumps({"architecture": "resnet19"}))
    broken = small_recipe(distillation="hard", teacher=str(tmp_path / "broken"))
    with pytest.raises(RbdcError):
        load_teacher(broken, image_format(spec, recipe, data), 10)


class _Constant(torch.nn.Module):
    def __init__(self, output: torch.Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self, _images: torch.Tensor) -> torch.Tensor:
        return self.output


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
