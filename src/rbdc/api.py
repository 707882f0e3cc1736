"""Run what `rbdc train` and `rbdc compare` do from Python, and show it there.

Progress is shown in a notebook and on a terminal; results print as the commands print them.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text
from torch.utils.data import Dataset

from rbdc.data import DataSet, open_data
from rbdc.experiments.compare import ComparisonSpec, prepare_comparison, run_comparison
from rbdc.experiments.speeds import speeds_of
from rbdc.experiments.train import prepare
from rbdc.jobs.engine import Watcher
from rbdc.jobs.job import Node
from rbdc.report.compare import comparison_table
from rbdc.report.live import LiveRun
from rbdc.report.notebook import NotebookRun, in_notebook
from rbdc.report.run import result_lines
from rbdc.runs.run import Result, Where, check, settle, start
from rbdc.settings import Cluster, Machine, Recipe, Request, read_recipe, split_settings
from rbdc.shown import Shown

Expect = Callable[[Sequence[Node]], None]
Data = str | Dataset[Any] | tuple[Dataset[Any], Dataset[Any]]


class RunResult(Shown, Result):
    """The result of a run: a dict that prints as the command prints it."""

    def __init__(self, result: Result, folder: Path) -> None:
        super().__init__(result)
        self.folder = folder
        """Folder of the run."""


class TrainResult(RunResult):
    """What `rbdc.train` returns: the content of result.json. `model` is the trained model's."""

    @property
    def model(self) -> Path:
        """The folder of the trained model, which timm and `rbdc.load` read."""
        return self.folder / "model"

    def __rich__(self) -> RenderableType:
        return Text("\n".join(result_lines(self, self.folder)))


class CompareResult(RunResult):
    """What `rbdc.compare` returns: the content of result.json."""

    def __rich__(self) -> RenderableType:
        return Group(comparison_table(self))


def train(
    output: str | Path,
    *,
    data: Data | None = None,
    recipe: str = "demo",
    machine: Machine | None = None,
    jobs: int | None = None,
    cluster: Cluster | None = None,
    speeds: str | Path | None = None,
    watch: Watcher | None = None,
    **settings: Any,
) -> TrainResult:
    """Train a wide model by RBDC, as `rbdc train` does, and return the result.

    `recipe` is a shipped one or a YAML file; `settings` override it, by the names of Request and
    Recipe: `train("runs/x", recipe="deit", model="deit_base_patch16_224", data="/data/imagenet",
    steps=2, budget=0.7, lr=5e-4)`. `data` may also be a `torch.utils.data.Dataset` of (image,
    label), or two of them, to train and to test on; models are then trained in this process, unless
    `jobs` says otherwise. `speeds` is a table of training speeds for a budget in hours; by default
    they are measured. `watch` receives events; by default a notebook and a terminal show progress.
    The same call continues a run that was stopped.
    """
    output = Path(output)
    request, chosen, where, opened = _asked(data, recipe, machine, jobs, cluster, settings)
    table = Path(speeds) if speeds else None
    find = speeds_of(where.machine, output=output, table=table)
    training = prepare(request, chosen, where, find, output, opened)
    run = training.run()
    with _watching(watch, run.nodes) as (told, _):
        result = start(run, output, where, told)
    assert result is not None
    return TrainResult(result, output)


def compare(
    output: str | Path,
    *,
    data: Data | None = None,
    recipe: str = "demo",
    machine: Machine | None = None,
    jobs: int | None = None,
    cluster: Cluster | None = None,
    watch: Watcher | None = None,
    spec: ComparisonSpec | None = None,
    **settings: Any,
) -> CompareResult:
    """Compare protocols, as `rbdc compare` does, and return the result.

    `compare("runs/c", spec=ComparisonSpec(protocols=("standard", "rbdc:2"), seeds=5), lr=0.005)`;
    `settings` override the recipe's, `data` and `watch` are as in `train`. The same call continues
    what was stopped.
    """
    output = Path(output)
    request, chosen, where, opened = _asked(data, recipe, machine, jobs, cluster, settings)
    comparison = prepare_comparison(request, chosen, spec or ComparisonSpec(), where, opened)
    run = comparison.run()
    check(run, output, where)
    with _watching(watch, run.nodes) as (told, expect):
        return CompareResult(run_comparison(comparison, output, where, told, expect), output)


def _asked(
    data: Data | None,
    recipe: str,
    machine: Machine | None,
    jobs: int | None,
    cluster: Cluster | None,
    settings: Mapping[str, Any],
) -> tuple[Request, Recipe, Where, DataSet | None]:
    """Return what is trained, how and where, and the data if it is no name but a Dataset."""
    opened, given = None, dict(settings)
    if isinstance(data, str):
        given["data"] = data
    elif data is not None:
        how = {name: given[name] for name in ("in_memory", "skip_bad") if name in given}
        opened = open_data(data, **how)
        given["data"] = opened.name
        if cluster is None or cluster.engine == "local":
            jobs = jobs or 1  # what a notebook defines cannot be loaded by other processes
    where = Where(machine=machine or Machine(), cluster=cluster or Cluster(), jobs=jobs)
    return *split_settings(read_recipe(recipe), given), settle(where), opened


@contextmanager
def _watching(watch: Watcher | None, nodes: Sequence[Node]) -> Iterator[tuple[Watcher, Expect]]:
    """Yield what receives events and what is told of further jobs; show progress if nobody does."""
    if watch is not None or not (in_notebook() or sys.stdout.isatty()):
        yield watch or _ignore, _ignore
        return
    with NotebookRun(nodes) if in_notebook() else LiveRun(nodes, Console()) as live:
        yield live, live.expect


def _ignore(_told: Any) -> None:
    pass
