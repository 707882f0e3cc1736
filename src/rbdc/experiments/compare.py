"""Protocols side by side: the same model, data, recipe and FLOPs, over budgets and seeds.

Jobs that several trials need are done once, and counted for each of them.
"""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any

from rbdc.data import DataSet
from rbdc.errors import Interrupted, PlanError, RbdcError, TrainingError
from rbdc.experiments.results import TUNING_SEED, Entry, read_summary, row_of, write_results
from rbdc.experiments.statistics import STANDARD, flops_to_reach, plain, summarize
from rbdc.growth import Protocol, Setting, parse_protocol
from rbdc.jobs.engine import Engine, Event, Watcher
from rbdc.jobs.job import TrainJob
from rbdc.jobs.layout import JOBS
from rbdc.jobs.store import Store
from rbdc.jobs.tree import Node
from rbdc.jobs.workshop import TreeWorkshop, own_flops, subtree_flops
from rbdc.models import family
from rbdc.runs.prepare import open_and_fit
from rbdc.runs.run import check_run, run_nodes
from rbdc.settings import Cluster, Machine, Recipe, Request, read_recipe, split_settings
from rbdc.training import World


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonSpec:
    """What is compared."""

    protocols: tuple[str, ...] = (STANDARD, "rbdc:1", "rbdc:2")
    budgets: tuple[float, ...] = (0.5, 1.0)
    """Relative to standard training for `baseline_epochs`."""
    standard_budgets: tuple[float, ...] = ()
    """More budgets, for standard training alone: what the others are to reach."""
    seeds: int = 3
    tune: tuple[float, ...] = ()
    """Learning rates to try for each protocol, the same for all; none: the recipe's."""
    tune_budget: float | None = None
    """By default the largest budget."""

    def __post_init__(self) -> None:
        repeated = [text for text in self.protocols if self.protocols.count(text) > 1]
        if repeated or not self.protocols:
            raise PlanError(
                f"protocols are {', '.join(self.protocols) or 'none'}", "Name each of them once."
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
        more = self.standard_budgets if protocol == STANDARD else ()
        return tuple(dict.fromkeys((*self.budgets, *more)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A comparison that is ready to start: everything is checked, nothing is written yet."""

    asked: ComparisonSpec
    setting: Setting
    protocols: Mapping[str, Protocol]
    published: Mapping[str, float] = field(default_factory=dict)
    """What others have reported, by 'protocol budget'."""

    def entries(self, rates: Mapping[str, float]) -> list[Entry]:
        """Every protocol, budget and seed, at the learning rate of the protocol."""
        return [
            self._entry(protocol, budget, seed, rates[protocol])
            for budget in dict.fromkeys((*self.asked.budgets, *self.asked.standard_budgets))
            for seed in range(self.asked.seeds)
            for protocol in self.protocols
            if budget in self.asked.budgets_of(protocol)
        ]

    def tuning(self) -> list[Entry]:
        """Every protocol at every learning rate, with a seed that no result has."""
        budget = self.asked.tune_budget or max(self.asked.budgets)
        return [
            self._entry(protocol, budget, TUNING_SEED, rate)
            for rate in self.asked.tune
            for protocol in self.protocols
        ]

    def _entry(self, protocol: str, budget: float, seed: int, lr: float) -> Entry:
        recipe = self.setting.recipe
        if lr != recipe.learning_rate:
            recipe = replace(recipe, lr=lr)
        trial = self.protocols[protocol].trial(replace(self.setting, recipe=recipe), budget, seed)
        return Entry(protocol=protocol, budget=budget, seed=seed, trial=trial, lr=lr)

    def same_rate(self) -> dict[str, float]:
        """The recipe's learning rate for all."""
        return dict.fromkeys(self.protocols, self.setting.recipe.learning_rate)

    def planned(self) -> list[Entry]:
        """All that will run, as far as it is known: tuning may change the rates, not the costs."""
        return self.tuning() + self.entries(self.same_rate())

    def planned_rows(self) -> list[dict[str, Any]]:
        """What one seed's trials are, before anything has run."""
        entries = [e for e in self.entries(self.same_rate()) if e.seed == 0]
        return [row_of(entry, self.setting, Store(Path())) for entry in entries]

    def flops(self, entries: Sequence[Entry]) -> tuple[float, float]:
        """What the entries cost one by one, and what they cost with shared jobs done once."""
        counted = (len(self.setting.data.train), self.setting.counter)
        alone = sum(subtree_flops(entry.trial.target.job, *counted) for entry in entries)
        shared = sum(own_flops(node.job, *counted) for node in unique(entries))
        return alone, shared

    def work(self, nodes: Sequence[Node]) -> dict[str, float]:
        """FLOPs of each job, by its key."""
        shop = self._shop(Path(), Machine(), None)
        return shop.work(node.job for node in nodes)

    def record(self) -> dict[str, Any]:
        """What must be equal when a folder is used again; protocols, budgets and seeds may be
        added to."""
        setting = self.setting
        data = setting.data.to_json()
        content = {
            "setting": {
                "model": setting.model.to_json(),
                "recipe": setting.recipe.to_json(),
                "data_set": {k: v for k, v in data.items() if k not in ("name", "skipped")},
                "baseline_epochs": setting.baseline_epochs,
                "baseline_flops": self.setting.baseline_flops,
                "ratio": setting.ratio,
                "counter": setting.counter,
                "transition": list(setting.transition),
                "carry_warmup_epochs": setting.carry_warmup_epochs,
                "narrow_lr": setting.narrow_lr,
            }
        }
        return dict(json.loads(json.dumps(content)))

    def check(
        self,
        output: Path,
        *,
        machine: Machine,
        jobs: int | None = None,
        cluster: Cluster | None = None,
        world: World | None = None,
    ) -> None:
        """Refuse what cannot work; nothing is written."""
        shop = self._shop(output, machine, world)
        check_run(unique(self.planned()), shop, output, jobs, cluster)

    def _shop(self, output: Path, machine: Machine, world: World | None) -> TreeWorkshop:
        return TreeWorkshop(
            store=Store(output / JOBS),
            data=self.setting.data,
            machine=machine,
            world=world or World(),
            counter=self.setting.counter,
        )

    def run(
        self,
        output: Path,
        *,
        machine: Machine,
        watch: Watcher,
        jobs: int | None = None,
        cluster: Cluster | None = None,
        engine: Engine | None = None,
        world: World | None = None,
        announce: Callable[[Sequence[Node]], None] = lambda _nodes: None,
    ) -> dict[str, Any]:
        """Run it in `output`, or go on with it there; the summary.

        `announce` is told which jobs come: with tuning twice, because rates follow from results.

        Trainings that fail (a loss that is not finite) are missing from the summary, with the
        others done all the same.
        """
        shop = self._shop(output, machine, world)

        def run(entries: Sequence[Entry], watch: Watcher) -> None:
            nodes = unique(entries)
            announce(nodes)
            try:
                run_nodes(
                    nodes,
                    shop,
                    output,
                    request=self.record(),
                    watch=watch,
                    finish=lambda: None,
                    jobs=jobs,
                    cluster=cluster,
                    engine=engine,
                )
            except TrainingError as error:
                warnings.warn(f"a training failed, its result is missing: {error}", stacklevel=2)

        rates, tuned = self.same_rate(), []
        if self.asked.tune:
            tuned = self.tuning()
            run(tuned, watch)
            rates = self._best_rates(tuned, shop.store)
        entries = self.entries(rates)

        def summarized() -> dict[str, Any]:
            summary = self.summary(entries, tuned, shop.store, read_summary(output))
            if shop.world.is_main:
                write_results(output, summary)
            return summary

        targets = {entry.trial.target.job.key for entry in entries}

        def watched(event: Event) -> None:
            watch(event)
            if event.kind == "finished" and event.key in targets:
                summarized()  # of what there is: for those who look on, and for a killed run

        try:
            run([*tuned, *entries], watched)
        except Interrupted:
            summarized()
            raise
        return summarized()

    def _best_rates(self, tuned: Sequence[Entry], store: Store) -> dict[str, float]:
        rates = {}
        for protocol in self.protocols:
            scores = {
                entry.lr: (store.result(entry.trial.target.job) or {}).get("top1")
                for entry in tuned
                if entry.protocol == protocol
            }
            known = {lr: top1 for lr, top1 in scores.items() if top1 is not None}
            if not known:
                raise TrainingError(
                    f"{protocol} failed at every learning rate of {self.asked.tune}",
                    "Try lower ones.",
                )
            rates[protocol] = max(known, key=lambda lr: known[lr])
        return rates

    def summary(
        self,
        entries: Sequence[Entry],
        tuned: Sequence[Entry],
        store: Store,
        before: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Rows, the table, and FLOPs to reach standard training's accuracy.

        What the folder had `before`, and is not asked for now, stays.
        """
        rows = [row_of(entry, self.setting, store) for entry in entries]
        asked = {(row["protocol"], row["budget"], row["seed"]) for row in rows}
        rows += [
            row
            for row in (before or {}).get("rows", [])
            if (row["protocol"], row["budget"], row["seed"]) not in asked
        ]
        reached = {
            name: {key: plain(value) for key, value in found.items()}
            for name, found in flops_to_reach(rows).items()
        }
        alone, shared = self.flops(entries)
        return {
            **self.record()["setting"],
            "rows": rows,
            "lines": summarize(rows),
            "flops_to_reach": reached,
            "published": dict(self.published),
            "tuning": [row_of(entry, self.setting, store) for entry in tuned],
            "tuning_flops": self.flops(tuned)[1] / self.setting.baseline_flops,
            "flops_counted": alone / self.setting.baseline_flops,
            "flops_spent": shared / self.setting.baseline_flops,
        }


def unique(entries: Sequence[Entry]) -> list[Node]:
    """The jobs of all entries, each once, parents first."""
    return list({node.job.key: node for entry in entries for node in entry.nodes}.values())


def compare(
    output: str | Path,
    *,
    recipe: str = "demo",
    machine: Machine | None = None,
    jobs: int | None = None,
    cluster: Cluster | None = None,
    watch: Watcher = lambda _event: None,
    asked: ComparisonSpec | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Compare protocols, as `rbdc compare` does, and return the summary.

    `compare("runs/c", asked=ComparisonSpec(protocols=("standard", "rbdc:2"), seeds=5), lr=0.005)`;
    `settings` override the recipe's. The same call goes on with what was stopped.
    """
    chosen = split_settings(read_recipe(recipe), settings)
    comparison = prepare_comparison(*chosen, asked or ComparisonSpec())
    return comparison.run(
        Path(output), machine=machine or Machine(), watch=watch, jobs=jobs, cluster=cluster
    )


def prepare_comparison(
    request: Request,
    recipe: Recipe,
    asked: ComparisonSpec,
    world: World | None = None,
    data: DataSet | None = None,
) -> Comparison:
    """Open the data and fit the model; whatever does not fit a protocol is said here."""
    data, spec = open_and_fit(request, recipe, world or World(), data)
    setting = Setting(
        model=spec,
        recipe=recipe,
        data=data,
        baseline_epochs=request.baseline_epochs or family(spec).baseline_epochs,
        ratio=request.ratio,
        counter=request.counter,
        transition=request.transition,
        carry_warmup_epochs=request.carry_warmup_epochs,
        narrow_lr=request.narrow_lr,
        allow_inexact=request.allow_inexact,
    )
    protocols = {text: parse_protocol(text) for text in asked.protocols}
    for text, protocol in protocols.items():
        try:
            protocol.check(setting)
        except RbdcError as error:
            raise PlanError(f"{text} does not fit {spec}: {error.problem}", error.remedy) from None
    comparison = Comparison(asked=asked, setting=setting, protocols=protocols)
    for entry in comparison.planned():
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
