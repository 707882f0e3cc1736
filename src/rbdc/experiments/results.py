"""The result of trials: a row for each of them, the table, and the files they are written to."""

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rbdc.disk import write_text
from rbdc.experiments.statistics import SECONDS, Clock, statistics_of, sum_known
from rbdc.growth import Setting, Trial
from rbdc.jobs.job import Node
from rbdc.jobs.layout import FAILED, JOBS, RESULT
from rbdc.jobs.records import read_run_result
from rbdc.jobs.store import Store
from rbdc.jobs.train import TrainJob

TUNING_SEED = 2**32  # no result has it
ROWS, TABLE = "results.jsonl", "results.csv"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One trial: a protocol at a budget with a seed, a learning rate and a start of its decay."""

    protocol: str
    budget: float
    seed: int
    trial: Trial
    lr: float
    decay_start: float

    @property
    def named_nodes(self) -> Iterator[Node]:
        """The trial's nodes, with names that say which trial they belong to."""
        tried = f"lr {self.lr:g}, decay from {self.decay_start:g}"
        trial = tried if self.seed == TUNING_SEED else f"seed {self.seed}"
        for node in self.trial.nodes:
            yield replace(node, name=f"{self.protocol} {self.budget:.3g} {trial}: {node.name}")


def unique(nodes: Iterator[Node] | Sequence[Node]) -> list[Node]:
    """Return the nodes with each job once, parents first."""
    return list({node.job.key: node for node in nodes}.values())


def flops_of(entries: Sequence[Entry]) -> tuple[float, float]:
    """Return what the entries cost one by one, and with shared jobs computed once."""
    alone = sum(entry.trial.target.job.total_flops for entry in entries)
    nodes = unique([node for entry in entries for node in entry.trial.nodes])
    return alone, sum(node.job.flops for node in nodes)


def row_of(entry: Entry, setting: Setting, store: Store) -> dict[str, Any]:
    """Return the result of a trial; scores are None if it is not finished."""
    levels: dict[int, float] = {}
    epochs: dict[str, list[float]] = {}
    passes = method = 0.0
    failed = False
    times: dict[str, float | None] = {"device_seconds": 0.0, "cpu_seconds": 0.0}
    for node in entry.trial.nodes:
        flops = node.job.flops / setting.baseline_flops
        levels[node.level] = levels.get(node.level, 0.0) + flops
        own = store.result(node.job) or {}
        failed |= not own and (store.folder(node.job) / FAILED).exists()
        for clock, known in times.items():  # None if any of them is unknown
            times[clock] = known + own[clock] if known is not None and clock in own else None
        if isinstance(node.job, TrainJob):
            epochs.setdefault(str(node.level), []).append(node.job.task.epochs)
            passes += node.job.task.epochs
        else:
            method += flops
    result, seconds = store.result(entry.trial.target.job) or {}, times["device_seconds"]
    images = len(setting.data.train)
    metrics, metric = result.get("metrics", {}), entry.trial.target.job.metrics[0]
    score = metrics.get(metric)
    return {
        "protocol": entry.protocol,
        "budget": entry.budget,
        "seed": entry.seed,
        "lr": entry.lr,
        "decay_start": entry.decay_start,
        "metric": metric,
        "score": score,
        "failed": failed,
        "best_score": result.get("best", {}).get(metric, score),
        "metrics": metrics,
        "flops": sum(levels.values()),
        "flops_by_level": {str(level): share for level, share in sorted(levels.items())},
        "method_flops": method,
        "epochs": epochs,
        "data_passes": passes,
        "seconds": seconds,
        "cpu_seconds": times["cpu_seconds"],
        "images_per_second": passes * images / seconds if seconds else None,
        "target": str(store.folder(entry.trial.target.job).relative_to(store.root.parent)),
    }


def summary_of(
    setting: Setting,
    entries: Sequence[Entry],
    output: Path,
    *,
    tuned: Sequence[Entry] = (),
    published: Mapping[str, float] | None = None,
    clock: Clock = "elapsed",
) -> dict[str, Any]:
    """Return rows, the table and the cost to reach standard training's score; write the rows.

    Rows that the folder had before and that are not asked for now stay, those of tuning too.
    """
    store = Store(output / JOBS)
    before = read_run_result(output / RESULT) or {}
    rows, tuning = (
        _with_old([row_of(one, setting, store) for one in asked], before.get(kind, []))
        for kind, asked in (("rows", entries), ("tuning", tuned))
    )
    found = statistics_of(rows, clock)
    alone, shared = flops_of(entries)
    _write_rows(output, found["rows"])
    return {
        **setting.to_json(),
        "metric": rows[0]["metric"],
        **found,
        "published": dict(published or {}),
        "clock": clock,
        "tuning": tuning,
        "tuning_flops": sum(row["flops"] for row in tuning),
        "tuning_seconds": sum_known(row[SECONDS[clock]] for row in tuning),
        "flops_counted": alone / setting.baseline_flops,
        "flops_spent": shared / setting.baseline_flops,
    }


def _with_old(rows: list[dict[str, Any]], old: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows, and of the old ones those of other trials."""

    def trial(row: Mapping[str, Any]) -> tuple[Any, ...]:
        tried = (row["lr"], row["decay_start"]) if row["seed"] == TUNING_SEED else ()
        return row["protocol"], row["budget"], row["seed"], *tried

    asked = {trial(row) for row in rows}
    return rows + [row for row in old if trial(row) not in asked]


def _write_rows(output: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write results.jsonl and results.csv, a row per trial."""
    write_text(output / ROWS, "".join(json.dumps(row) + "\n" for row in rows))
    text = io.StringIO()
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    for row in rows:
        table.writerow(
            {k: json.dumps(v) if isinstance(v, dict | list) else v for k, v in row.items()}
        )
    write_text(output / TABLE, text.getvalue())
