"""Train one wide model by RBDC: a comparison with one trial, and standard training beside it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rbdc.data import DataSet
from rbdc.experiments.results import Entry, summary_of
from rbdc.experiments.setting import choose_fused, make_setting
from rbdc.experiments.speeds import SpeedsOf, levels_to_time, speeds_of
from rbdc.growth import Setting, Trial
from rbdc.growth.rbdc import Rbdc
from rbdc.growth.standard import Standard
from rbdc.jobs.job import Node
from rbdc.jobs.layout import AVERAGE, JOBS, MODEL
from rbdc.jobs.store import Store
from rbdc.models import copy_model, timm_builds
from rbdc.plan import Hours, Plan, Rounding, Speeds, fewest_hours, hours_by_steps
from rbdc.runs.run import Result, Run, Where, settle
from rbdc.settings import Recipe, Request

_PLANNING = ("total_flops", "epochs", "total_epochs", "budget_hours", "budget_time", "schedule",
             "costs", "rounding")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training that is ready to start: everything is checked, nothing is written yet."""

    request: Request
    setting: Setting
    plan: Plan
    entries: tuple[Entry, ...]
    """RBDC's trial, and standard training's if it was asked for."""
    hours: Hours | None = None
    """The plan in hours, if it was asked for in hours or by `steps` auto."""
    by_steps: tuple[Hours, ...] = ()
    """What `steps` auto chose from."""

    @property
    def tree(self) -> Trial:
        """RBDC's own jobs."""
        return self.entries[0].trial

    @property
    def nodes(self) -> list[Node]:
        """List all jobs: the tree's, leaves first, and standard training's."""
        beside = [replace(e.trial.target, name=e.protocol) for e in self.entries[1:]]
        return [*self.tree.nodes, *beside]

    def run(self) -> Run:
        """Return what is run."""
        return Run(
            kind="train",
            nodes=self.nodes,
            request=self.request.to_json() | self.setting.recipe.to_json(),
            identity={
                "setting": self.setting.to_json(),
                "plan": self.plan.to_json(),
                "seed": self.request.seed,
                **({"speeds": self.hours.speeds.to_json()} if self.hours else {}),
            },
            data=self.setting.data.to_json(),
            result=self._result,
            finish=self._finish,
        )

    def _result(self, output: Path) -> Result:
        """Return the trials' summary, and every job's result by its node's name."""
        store = Store(output / JOBS)
        results = {node.name: store.result(node.job) or {} for node in self.nodes}
        mine = [results[node.name] for node in self.tree.nodes]
        target = results[self.tree.target.name]
        spent = _sum(mine, "training_flops")
        summary = summary_of(self.setting, self.entries, output)
        return {
            **summary,
            **{name: target.get(name) for name in ("metrics", "best")},
            "training_flops": spent,
            "teacher_flops": _sum(mine, "teacher_flops"),
            "images": int(_sum(mine, "images")),
            "images_decoded": int(_sum(mine, "decoded")),
            "planned_flops": self.plan.training_flops,
            "normalized_flops": spent / self.plan.baseline_flops,
            "seconds": _sum(mine, "device_seconds"),
            **_relative(results.get(Standard.name), spent, _sum(mine, "device_seconds")),
            "timm_loads": timm_builds(self.setting.model),
            "nodes": results,
            **{entry.protocol: results[entry.protocol] for entry in self.entries[1:]},
        }

    def _finish(self, output: Path, result: Result) -> None:
        """Copy the target to where the user looks for it."""
        folder = Store(output / JOBS).folder(self.tree.target.job)
        trained = folder / (AVERAGE if (folder / AVERAGE).exists() else MODEL)
        copy_model(trained, output / MODEL, record={"run": result})


def _relative(standard: Result | None, flops: float, seconds: float) -> dict[str, float | None]:
    """Return the tree's cost over that of standard training beside it; None without one."""
    costs = {"flops": (flops, "training_flops"), "time": (seconds, "device_seconds")}
    return {
        f"relative_{name}": own / standard[key] if standard and standard.get(key) else None
        for name, (own, key) in costs.items()
    }


def _sum(results: Iterable[Mapping[str, Any]], name: str) -> float:
    return sum(float(result.get(name, 0)) for result in results)


def prepare(
    request: Request,
    recipe: Recipe,
    where: Where | None = None,
    speeds_by: SpeedsOf | None = None,
    output: Path | None = None,
    data: DataSet | None = None,
) -> Training:
    """Open the data, make the plan and the jobs; refuse what does not fit together.

    The device in `where`, by default this machine's, decides the precision. A plan in hours, or of
    `steps` auto, needs training speeds: `speeds_by` finds them, by default by measuring. A run that
    has begun in `output` keeps what was chosen for it. `data` is what `request.data` names, if it
    is open already.
    """
    where = settle(where or Where())
    setting = make_setting(request, recipe, where, data)
    speeds: Speeds | None = None
    by_steps: tuple[Hours, ...] = ()
    steps = request.steps
    levels = levels_to_time(request, setting)
    if levels is not None:
        find = speeds_by or speeds_of()
        speeds = where.world.broadcast(lambda: find(setting, levels))
    if steps == "auto":
        assert speeds is not None
        by_steps = _by_steps(request, setting, speeds)
        steps = fewest_hours(by_steps)
    protocol = _protocol(request, setting, steps, request.rounding, speeds)
    protocol.check(setting)
    plan = protocol.plan(setting, request.budget)
    setting = choose_fused(setting, request, plan.stages, where, output)
    trials = {protocol.name: protocol.tree(setting, plan, request.seed)}
    budgets = {protocol.name: plan.normalized_flops}
    if request.with_baseline:  # by default for exactly the FLOPs of the whole tree
        budgets[Standard.name] = request.baseline_budget or plan.normalized_flops
        trials[Standard.name] = Standard().trial(setting, budgets[Standard.name], request.seed)
    entries = tuple(
        Entry(
            protocol=name,
            budget=budgets[name],
            seed=request.seed,
            trial=trial,
            lr=recipe.learning_rate,
            decay_start=recipe.decay_start,
        )
        for name, trial in trials.items()
    )
    return Training(
        request=request,
        setting=setting,
        plan=plan,
        entries=entries,
        hours=Hours(plan=plan, speeds=speeds) if speeds else None,
        by_steps=by_steps,
    )


def _by_steps(request: Request, setting: Setting, speeds: Speeds) -> tuple[Hours, ...]:
    def plan_of(steps: int, rounding: Rounding) -> Plan:
        return _protocol(request, setting, steps, rounding, speeds).plan(setting, request.budget)

    return hours_by_steps(plan_of, speeds, request.rounding)


def _protocol(
    request: Request, setting: Setting, steps: int, rounding: Rounding, speeds: Speeds | None
) -> Rbdc:
    planning = {name: getattr(request, name) for name in _PLANNING}
    planning |= {"speeds": speeds, "batch_size": setting.recipe.batch_size, "rounding": rounding}
    return Rbdc(steps=steps, planning=planning)
