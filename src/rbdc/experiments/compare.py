"""Compare protocols with the same model, data, recipe and FLOPs, over budgets and seeds.

Jobs that several trials need run once, and are counted for each of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any

from rbdc.arguments import check_fields
from rbdc.data import DataSet
from rbdc.errors import PlanError, RbdcError, TrainingError
from rbdc.experiments.results import TUNING_SEED, Entry, row_of, summary_of, unique
from rbdc.experiments.setting import fuse_all, make_setting
from rbdc.experiments.statistics import STANDARD, Clock
from rbdc.growth import Protocol, Setting, parse_protocol
from rbdc.jobs.engine import Watcher
from rbdc.jobs.job import Node
from rbdc.jobs.layout import JOBS
from rbdc.jobs.store import Store
from rbdc.jobs.train import TrainJob
from rbdc.metrics import find_metric
from rbdc.runs.run import Result, Run, Where, execute, settle
from rbdc.settings import Recipe, Request


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonSpec:
    """What is compared: protocols, budgets, seeds, learning rates to tune."""

    protocols: tuple[str, ...] = (STANDARD, "rbdc:1", "rbdc:2")
    budgets: tuple[float, ...] = (0.5, 1.0)
    """FLOPs of each trial, relative to standard training for `baseline_epochs`."""
    standard_budgets: tuple[float, ...] = ()
    """More budgets, for standard training alone: the accuracy that others are to reach."""
    seeds: int = 3
    tune: tuple[float, ...] = ()
    """Learning rates to try for each protocol, the same for all; empty: the recipe's rate."""
    tune_decay: tuple[float, ...] = ()
    """Starts of the learning rate's decay to try with each rate; empty: the recipe's."""
    tune_split: float = 0.1
    """Share of the training images that tuning holds out, and tests on."""
    tune_budget: float | None = None
    """Budget of the trials that tune; None: the largest budget."""
    clock: Clock = "elapsed"
    """How the time of a trial is measured."""

    def __post_init__(self) -> None:
        for name in ("protocols", "budgets", "standard_budgets", "tune", "tune_decay"):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))
        check_fields(self)
        repeated = [text for text in self.protocols if self.protocols.count(text) > 1]
        if repeated or not self.protocols:
            raise PlanError(
                f"protocols are {', '.join(self.protocols) or 'none'}", "Name each of them once."
            )
        if not 0 < self.tune_split < 1 or any(not 0 <= start < 1 for start in self.tune_decay):
            raise PlanError(
                f"tuning holds out {self.tune_split:g} of the images and tries decays from "
                f"{', '.join(f'{start:g}' for start in self.tune_decay) or 'the recipe'}",
                "Hold out a share between 0 and 1; decays start from 0 to below 1.",
            )
        numbers = (*self.budgets, *self.standard_budgets, *self.tune, self.tune_budget or 1.0)
        wrong = [number for number in numbers if not (number > 0 and isfinite(number))]
        if wrong or not self.budgets or self.seeds < 1:
            raise PlanError(
                f"budgets are {self.budgets}, seeds {self.seeds}, learning rates {self.tune}"
                + (f": {wrong[0]:g} is none" if wrong else ""),
                "Give at least one budget and one seed, all numbers above 0.",
            )

    def budgets_of(self, protocol: str) -> tuple[float, ...]:
        """Return the budgets of a protocol."""
        more = self.standard_budgets if protocol == STANDARD else ()
        return tuple(dict.fromkeys((*self.budgets, *more)))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A comparison that is ready to start: everything is checked, nothing is written yet."""

    spec: ComparisonSpec
    request: Request
    setting: Setting
    protocols: Mapping[str, Protocol]
    best: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Learning rate and start of its decay that tuning found, by protocol; else the recipe's."""
    published: Mapping[str, float] = field(default_factory=dict)
    """What others have reported, by 'protocol budget'."""

    @cached_property
    def entries(self) -> list[Entry]:
        """Every protocol, budget and seed, at the learning rate of the protocol."""
        spec, recipe = self.spec, self.setting.recipe
        own = recipe.learning_rate, recipe.decay_start
        return [
            self._entry(self.setting, protocol, budget, seed, *self.best.get(protocol, own))
            for budget in dict.fromkeys((*spec.budgets, *spec.standard_budgets))
            for seed in range(spec.seeds)
            for protocol in self.protocols
            if budget in spec.budgets_of(protocol)
        ]

    @cached_property
    def tuning(self) -> list[Entry]:
        """Every protocol at every learning rate and start of its decay, on held-out images.

        They have a seed that no result has.
        """
        spec, recipe = self.spec, self.setting.recipe
        if not self.tunes:
            return []
        setting = replace(self.setting, data=self.setting.data.held_out(spec.tune_split))
        budget = spec.tune_budget or max(spec.budgets)
        return [
            self._entry(setting, protocol, budget, TUNING_SEED, rate, start)
            for rate in spec.tune or (recipe.learning_rate,)
            for start in spec.tune_decay or (recipe.decay_start,)
            for protocol in self.protocols
        ]

    @property
    def tunes(self) -> bool:
        """Return whether anything is tuned."""
        return bool(self.spec.tune or self.spec.tune_decay)

    def _entry(
        self, setting: Setting, protocol: str, budget: float, seed: int, lr: float, start: float
    ) -> Entry:
        recipe = setting.recipe
        if (lr, start) != (recipe.learning_rate, recipe.decay_start):
            recipe = replace(recipe, lr=lr, decay_start=start)
        trial = self.protocols[protocol].trial(replace(setting, recipe=recipe), budget, seed)
        return Entry(
            protocol=protocol, budget=budget, seed=seed, trial=trial, lr=lr, decay_start=start
        )

    @property
    def planned(self) -> list[Entry]:
        """List all that will run: tuning changes its learning rates later, not its costs."""
        return [*self.tuning, *self.entries]

    def planned_rows(self) -> list[dict[str, Any]]:
        """Return what one seed's trials are, before anything has run."""
        entries = [entry for entry in self.entries if entry.seed == 0]
        return [row_of(entry, self.setting, Store(Path(JOBS))) for entry in entries]

    def run(self, entries: Sequence[Entry] | None = None) -> Run:
        """Return what is run: tuning and all entries, or some entries alone."""
        chosen = self.planned if entries is None else entries
        return Run(
            kind="compare",
            nodes=unique([node for entry in chosen for node in entry.named_nodes]),
            request={
                **self.request.to_json(),
                **self.setting.recipe.to_json(),
                "compare": asdict(self.spec),
            },
            identity={"setting": self.setting.to_json()},  # protocols, budgets, seeds may be added
            data=self.setting.data.to_json(),
            result=self._result,
            targets=frozenset(entry.trial.target.job.key for entry in chosen),
            skips_failures=True,
        )

    def _result(self, output: Path) -> Result:
        return summary_of(
            self.setting,
            self.entries,
            output,
            tuned=self.tuning,
            published=self.published,
            clock=self.spec.clock,
        )

    def tuned(self, output: Path) -> "Comparison":
        """Return the comparison with each protocol at the best of what was tried in `output`."""
        store, found = Store(output / JOBS), {}
        for protocol in self.protocols:
            mine = [entry for entry in self.tuning if entry.protocol == protocol]
            rows = [row_of(entry, self.setting, store) for entry in mine]
            known = [row for row in rows if row["score"] is not None]
            if not known:
                raise TrainingError(
                    f"{protocol} failed at every learning rate that was tried",
                    "Try lower ones.",
                )
            best = find_metric(known[0]["metric"]).best(known, lambda row: float(row["score"]))
            found[protocol] = best["lr"], best["decay_start"]
        return replace(self, best=found)


def run_comparison(
    comparison: Comparison,
    output: Path,
    where: Where,
    watch: Watcher = lambda _event: None,
    expect: Callable[[Sequence[Node]], None] = lambda _nodes: None,
) -> Result:
    """Run a checked comparison in `output`, or continue it there, and return its result.

    With tuning there are two rounds, because rates follow from results. `expect` is told which
    nodes come in each. Trainings that fail (a loss that is not finite) are missing in the result.
    """
    if comparison.tunes:
        tuning = comparison.run(comparison.tuning)
        expect(tuning.nodes)
        execute(tuning, output, where, watch)
        comparison = comparison.tuned(output)
    run = comparison.run()
    expect(run.nodes)
    result = execute(run, output, where, watch)
    assert result is not None
    return result


def prepare_comparison(
    request: Request,
    recipe: Recipe,
    spec: ComparisonSpec,
    where: Where | None = None,
    data: DataSet | None = None,
) -> Comparison:
    """Open the data and fit the model; refuse what does not fit a protocol."""
    where = settle(where or Where())
    setting = fuse_all(make_setting(request, recipe, where, data), request, where)
    protocols = {text: parse_protocol(text) for text in spec.protocols}
    for text, protocol in protocols.items():
        try:
            protocol.check(setting)
        except RbdcError as error:
            raise PlanError(
                f"{text} does not fit {setting.model}: {error.problem}", error.remedy
            ) from None
    comparison = Comparison(spec=spec, request=request, setting=setting, protocols=protocols)
    for entry in comparison.planned:
        _check_steps(entry, setting)
    return comparison


def _check_steps(entry: Entry, setting: Setting) -> None:
    for node in entry.trial.nodes:
        if isinstance(node.job, TrainJob):
            steps = node.job.task.epochs * setting.steps_per_epoch
            if steps < 1:
                raise PlanError(
                    f"{entry.protocol} at budget {entry.budget:g} would train its {node.name} for "
                    f"{steps:.2g} steps",
                    "Give a larger budget, more baseline epochs, or fewer recursive steps.",
                )
