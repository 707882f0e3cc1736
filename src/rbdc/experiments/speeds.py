"""The training speeds that a run is planned with, if its budget is in hours."""

from collections.abc import Callable
from pathlib import Path

from rbdc.growth import Setting
from rbdc.jobs.speeds import measured_speeds
from rbdc.plan import Speeds, check_equal_flops, table_speeds
from rbdc.runs.record import read_record
from rbdc.settings import Machine, Request

SpeedsOf = Callable[[Setting, int], Speeds]
"""Return the speeds of a setting's models after 0 to so many halvings."""


def speeds_of(
    machine: Machine | None = None,
    *,
    output: Path | None = None,
    table: Path | None = None,
    loader: float | None = None,
    again: bool = False,
) -> SpeedsOf:
    """Return how speeds are found: as the run in `output` was planned, in a table, or measured.

    A run that goes on keeps the speeds that it began with, so that it keeps its epochs.
    """

    def speeds(setting: Setting, steps: int) -> Speeds:
        record = read_record(output) if output else None
        if record and (known := record["identity"].get("speeds")):
            return Speeds.from_json(known)
        levels = setting.growth.levels(setting.model, steps)
        if table:
            return table_speeds(table, levels, loader=loader)
        tasks = [
            setting.training("target", 0, setting.baseline_epochs, model=model).task
            for model in levels
        ]
        return measured_speeds(
            tasks, machine or Machine(), teacher=setting.teacher, again=again, loader=loader
        )

    return speeds


def levels_to_time(request: Request, setting: Setting) -> int | None:
    """Return how many halvings need a speed; None if the plan needs none."""
    if request.steps == "auto":
        check_equal_flops(request.budget, request.total_flops)
        return setting.growth.most_steps(setting.model)
    in_hours = request.budget_hours is not None or request.budget_time is not None
    return request.steps if in_hours else None
