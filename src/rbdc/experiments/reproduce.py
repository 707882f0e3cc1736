"""The paper's experiments and ours, each a file in settings/experiments that says what it shows.

A file has two scales: `paper` is the real thing, `small` the same on data and models for two CPU
cores. A scale is a list of cases, and a case is a comparison; one whose name an earlier case has
adds protocols and budgets to that comparison.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any, Literal

import yaml

from rbdc.data import DataSet, ImageSource
from rbdc.errors import RecipeError, nearest
from rbdc.experiments.compare import Comparison, ComparisonSpec, prepare_comparison
from rbdc.experiments.statistics import Clock
from rbdc.growth import Setting
from rbdc.plan import IMAGENET_IMAGES
from rbdc.runs.run import Where
from rbdc.settings import read_recipe, split_settings

Scale = Literal["paper", "small"]
_FILES = files("rbdc.settings") / "experiments"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One comparison of an experiment."""

    name: str
    recipe: str
    settings: Mapping[str, Any]
    with_data: Mapping[str, Any] = field(default_factory=dict)
    """Settings for data given by the user: small colour images in folders, such as CIFAR-10."""
    protocols: tuple[str, ...]
    seeds: int
    budgets: tuple[float, ...] = ()
    narrow_epochs: tuple[float, ...] = ()
    """Epochs of the narrow models of one recursive step, instead of budgets."""
    standard_budgets: tuple[float, ...] = ()
    tune: tuple[float, ...] = ()
    tune_budget: float | None = None
    clock: Clock = "elapsed"
    published: Mapping[str, list[float | None]] = field(default_factory=dict)
    """The paper's accuracies in percent, by protocol and budget."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """One of the paper's experiments at a scale."""

    name: str
    head: str
    """What it shows and what the paper got."""
    cases: tuple[Case, ...]


def experiments() -> list[str]:
    """Return the names of the experiments."""
    return sorted(path.name.removesuffix(".yaml") for path in _FILES.iterdir())


def read_experiment(name: str, scale: Scale) -> Experiment:
    """Read an experiment's file at a scale."""
    if name not in experiments():
        raise RecipeError(
            f"no experiment is called {name!r}",
            nearest(name, experiments()) or f"Experiments are {', '.join(experiments())}.",
        )
    text = (_FILES / f"{name}.yaml").read_text()
    head = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ")]
    cases = []
    for content in yaml.safe_load(text)[scale]:
        lists = {key: tuple(value) for key, value in content.items() if isinstance(value, list)}
        cases.append(Case(**{**content, **lists}))
    if not cases:
        raise RecipeError(f"{name} has no scale {scale!r}", "Use --scale small.")
    return Experiment(name=name, head="\n".join(head), cases=tuple(cases))


def prepare_case(
    case: Case,
    given: Mapping[str, Any],
    *,
    seeds: int | None = None,
    where: Where | None = None,
    data: DataSet | None = None,
) -> Comparison:
    """Prepare the comparison of a case; `given` settings override the file's."""
    settings = {**case.settings, **(case.with_data if "data" in given else {}), **given}
    request, recipe = split_settings(read_recipe(case.recipe), settings)
    spec = ComparisonSpec(
        protocols=case.protocols,
        budgets=case.budgets or (1.0,),
        standard_budgets=case.standard_budgets,
        seeds=seeds or case.seeds,
        tune=case.tune,
        tune_budget=case.tune_budget,
        clock=case.clock,
    )
    comparison = prepare_comparison(request, recipe, spec, where, data)
    if case.narrow_epochs:
        budgets = tuple(_budget(comparison.setting, epochs) for epochs in case.narrow_epochs)
        comparison = replace(comparison, spec=replace(spec, budgets=budgets))
    return replace(comparison, published=_published(case, comparison.spec))


def _budget(setting: Setting, narrow_epochs: float) -> float:
    """Return the budget of two narrow models for so many epochs, and `ratio` times for the wide."""
    narrow = 2 * setting.forward_flops(0.5) + setting.ratio * setting.forward_flops()
    return narrow_epochs * narrow / setting.baseline_cost


def _published(case: Case, spec: ComparisonSpec) -> dict[str, float]:
    return {
        f"{protocol} {budget:g}": value / 100
        for protocol, values in case.published.items()
        for budget, value in zip(spec.budgets_of(protocol), values, strict=False)
        if value is not None
    }


@dataclass(frozen=True, slots=True)
class _Outline(ImageSource):
    """A number of images that nobody will read."""

    count: int
    labels: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> Any:
        raise AssertionError(f"image {index} of an outline")

    def name(self, index: int) -> str:
        return str(index)


def imagenet_outline() -> DataSet:
    """Return ImageNet-1K by its numbers, to plan an experiment without the data."""
    return DataSet(
        name="ImageNet-1K, not opened",
        train=_Outline(IMAGENET_IMAGES),
        test=_Outline(50_000),
        class_names=tuple(map(str, range(1000))),
        fingerprint="outline",
    )
