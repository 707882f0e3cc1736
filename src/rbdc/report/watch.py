"""Implement `rbdc status --watch`: print the state of a run until it is over."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import groupby
from math import isfinite
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from rbdc.errors import RunError
from rbdc.jobs.layout import JOBS, LOCK, RUN
from rbdc.report.run import run_status, status_table

PATIENCE = 3  # reads that may fail in a row: a network disk can be slow to show a new file

Status = dict[str, Any]


def watch_run(
    folder: Path,
    console: Console,
    *,
    every: float = 2.0,
    as_json: bool = False,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Print a run's state every so many seconds until it has finished or failed.

    A run that was stopped is waited for, and so is one that has not started yet. On a terminal the
    table is kept up to date; elsewhere it is printed again when it has changed. With `as_json`, a
    line is printed for each change. Ctrl-C ends the watch, and not the run.
    """
    if not (isfinite(every) and every > 0):
        raise RunError(f"every is {every:g}, expected more than 0 seconds", "2 is the default.")
    _check_folder(folder)
    seen = looks(folder, every, pause)
    with suppress(KeyboardInterrupt):
        if as_json:
            _tell_json(seen)
        elif console.is_terminal:
            _show(seen, folder, console, every)
        else:
            _tell(seen, folder, console)


def looks(folder: Path, every: float, pause: Callable[[float], None]) -> Iterator[Status | None]:
    """Yield a run's status again and again until it is over; None while it has not started.

    Between the parts of a comparison no process runs for a moment, so the run counts as over only
    when two reads in a row find it so.
    """
    over = troubles = 0
    while True:
        try:
            status = run_status(folder) if (folder / RUN).exists() else None
            troubles = 0
        except (RunError, OSError):
            troubles += 1
            if troubles == PATIENCE:
                raise
        else:
            yield status
            over = over + 1 if status and _is_over(status) else 0
            if status and over and (status["result"] or over > 1):
                return
        pause(every)


def _is_over(status: Status) -> bool:
    states = {node["state"] for node in status["nodes"]}
    if states == {"done"} and status["result"]:
        return True
    return not status["running"] and (states == {"done"} or "failed" in states)


def _check_folder(folder: Path) -> None:
    """Refuse a folder that holds neither a run nor the start of one."""
    if (folder / RUN).exists():
        return
    if not folder.is_dir():
        raise RunError(f"{folder} holds no run", f"A run's folder has a {RUN}.")
    for path in folder.iterdir():
        if path.name not in (LOCK, JOBS) and RUN not in path.name:
            raise RunError(
                f"{folder} holds something ({path.name}), but no run",
                f"A run's folder has a {RUN}; an empty folder is watched until it has one.",
            )


def _tell_json(seen: Iterator[Status | None]) -> None:
    last = None
    for status in seen:
        if status != last:
            print(json.dumps(status), flush=True)
        last = status


def _tell(seen: Iterator[Status | None], folder: Path, console: Console) -> None:
    def text_of(status: Status | None) -> str:
        with console.capture() as captured:
            console.print(status_table(status) if status else _waiting(folder))
        return captured.get()

    for text, _ in groupby(map(text_of, seen)):  # printed again when it has changed
        console.out(text, highlight=False)


def _show(seen: Iterator[Status | None], folder: Path, console: Console, every: float) -> None:
    last: Status | None = None
    note = Text(f"every {every:g} s; Ctrl-C ends the watch, not the run", style="dim")
    try:
        with Live(console=console, transient=True, auto_refresh=False) as live:
            for last in seen:
                table = fitted_table(last, console.height - 1) if last else _waiting(folder)
                live.update(Group(table, note), refresh=True)
    finally:
        if last:  # whole, however low the window
            console.print(status_table(last))


def _waiting(folder: Path) -> Text:
    return Text(f"{folder} holds no run yet: waiting for it to begin")


def fitted_table(status: Mapping[str, Any], height: int) -> RenderableType:
    """Return the table cut to `height` lines: failed and running jobs stay, others are counted."""
    failed = sum(node["state"] == "failed" for node in status["nodes"])
    room = max(1, height - 8 - failed)  # the table's head and feet, and what is said below it
    return status_table(status, room)
