"""Protocols are found, parsed and documented; another one is another file."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import rbdc
from rbdc.errors import PlanError
from rbdc.growth import OneParent, Setting, parse_protocol, protocols
from rbdc.growth.gradmax import GradMax
from rbdc.growth.mixture_growth import MixtureGrowth
from rbdc.growth.net2net import Net2Net
from rbdc.growth.rbdc import Rbdc
from rbdc.jobs.grow import GrowJob
from rbdc.jobs.job import Context, execute
from rbdc.jobs.store import Store
from rbdc.jobs.train import TrainJob
from rbdc.settings import Duration, parse_duration
from rbdc.training import World, fit_to_data
from tests.support import QUICK, TINY, small_data, small_recipe

PAGE = Path(__file__).parents[2] / "docs" / "compare.md"
NAMES = ["standard", "rbdc", "net2net", "hypercloning", "gradmax", "firefly", "random",
         "mixture-growth", "ensemble", "progressive", "resolution", "stack"]  # fmt: skip


def test_every_file_with_a_protocol_is_found() -> None:
    assert set(protocols()) == set(NAMES)
    assert all(protocol.summary for protocol in protocols().values())


def test_the_page_lists_every_protocol() -> None:
    assert re.findall(r"^\| `([a-z0-9-]+)` \|", PAGE.read_text(), flags=re.MULTILINE) == NAMES


def test_options_follow_a_colon() -> None:
    assert parse_protocol("rbdc:2:carry") == Rbdc(steps=2, transition=("carry",))
    assert parse_protocol("rbdc:lr=1.4") == Rbdc(narrow_lr=1.4)
    assert parse_protocol(" rbdc:random:r=1.5") == Rbdc(off_diagonal="random", ratio=1.5)
    paper, single, own = (
        parse_protocol(f"net2net:{word}") for word in ("paper", "single-parent", "3")
    )
    assert isinstance(paper, OneParent) and isinstance(single, OneParent)
    assert isinstance(own, OneParent) and own.ratio == 3
    assert paper.ratio == pytest.approx(14 / 164) and single.ratio == pytest.approx(32.7 / 90)
    with pytest.raises(PlanError, match="Did you mean net2net"):
        parse_protocol("net2nett")
    for text, problem in (
        ("standard:2", "standard got '2', expected no options"),
        ("net2net:1:2", "net2net got '2', expected the wide model's epochs"),
        ("rbdc:-1", "rbdc got '-1', expected the number of steps"),
        ("rbdc:r", "rbdc got 'r', expected"),
        ("rbdc:r=x", "rbdc got 'r=x', expected"),
    ):
        with pytest.raises(PlanError, match=problem):
            parse_protocol(text)


def small_setting() -> Setting:
    data, recipe = small_data(), small_recipe()
    spec = rbdc.ModelSpec(name="resnet18d", arguments=TINY["resnet18d"])
    model = fit_to_data(spec, data, recipe)
    return Setting(model=model, recipe=recipe, data=data, baseline_epochs=2.0)


def test_equal_growth_has_equal_keys_whatever_option_split_the_budget() -> None:
    """The setting's ratio of 2, given as an option too; another ratio has other parents."""
    setting = small_setting()

    def keys(text: str) -> list[str]:
        nodes = parse_protocol(text).trial(setting, 1.0, seed=0).nodes
        return [node.job.key for node in nodes]

    for name in ("net2net", "gradmax", "firefly", "random"):
        assert keys(name) == keys(f"{name}:2")
        assert not set(keys(name)) & set(keys(f"{name}:1"))
    assert Net2Net(ratio=1).content() == {"name": "net2net", "noise": 0.01}
    assert Net2Net(noise=0).content() != Net2Net().content()
    mixed = MixtureGrowth(ratio=True).content()
    assert mixed == {"name": "mixture-growth", "templates": 2, "head": "mean"}


@pytest.mark.parametrize(
    ("length", "share", "steps"),
    [("0%", 0, 0), ("3 steps", 0, 3), ("0.4 epochs", 0, 2), ("9 images", 0, 1), ("25%", 0.25, 0)],
)
def test_a_search_is_a_length(
    length: str, share: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is taken from the wide model's training, of which an epoch has five batches of 8."""

    def trial() -> tuple[int, float]:
        _, grow, target = (n.job for n in GradMax().trial(small_setting(), 4.0, seed=0).nodes)
        assert isinstance(grow, GrowJob) and isinstance(target, TrainJob)
        return grow.images, 5 * target.task.epochs

    monkeypatch.setattr(GradMax, "search", Duration(0, "%"))
    none, whole = trial()
    monkeypatch.setattr(GradMax, "search", parse_duration(length))
    spent = steps or round(share * whole)
    images, left = trial()
    assert (none, images) == (0, 8 * spent)
    assert left == pytest.approx(whole - spent)


@pytest.fixture
def twins() -> Any:
    """The page's example, as the module it would be."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    module = ModuleType("twins_of_the_page")
    sys.modules[module.__name__] = module
    exec(compile(code, "compare.md", "exec"), module.__dict__)
    yield module
    del sys.modules[module.__name__]


def test_the_pages_example_works(twins: Any, tmp_path: Path) -> None:
    setting = small_setting()
    data = setting.data
    protocol = twins.Twins()
    protocol.check(setting)
    trial = protocol.trial(setting, 1.0, seed=0)
    job_context = Context(store=Store(tmp_path / "jobs"), machine=QUICK, world=World())
    results = [
        execute(node.job, job_context, observe=lambda _p: None, stopped=lambda: False)
        for node in trial.nodes
    ]
    scores = [result["metrics"]["top1"] for result in results]
    assert scores[0] == pytest.approx(scores[1])  # the wide one is its parent
    spent = trial.target.job.total_flops
    whole = 3 * setting.baseline_cost * len(data.train)
    assert spent == pytest.approx(whole, rel=0.1)
