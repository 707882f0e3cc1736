"""What a comparison leaves: a row for each trial, the table, and the files they are in."""

import csv
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rbdc.disk import read_json, write_json, write_text
from rbdc.growth import Setting, Trial
from rbdc.jobs.job import TrainJob
from rbdc.jobs.store import Store
from rbdc.jobs.tree import Node
from rbdc.jobs.workshop import own_flops

TUNING_SEED = 2**32
ROWS, TABLE, SUMMARY = "results.jsonl", "results.csv", "summary.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One cell of the comparison."""

    protocol: str
    budget: float
    seed: int
    trial: Trial
    lr: float

    @property
    def nodes(self) -> Iterator[Node]:
        """With names that say whose they are."""
        trial = f"lr {self.lr:g}" if self.seed == TUNING_SEED else f"seed {self.seed}"
        for node in self.trial.nodes:
            yield replace(node, name=f"{self.protocol} {self.budget:.3g} {trial}: {node.name}")


def row_of(entry: Entry, setting: Setting, store: Store) -> dict[str, Any]:
    """What came out of a trial; the accuracy is None if it is not finished."""
    images = len(setting.data.train)
    counted = (images, setting.counter)
    levels: dict[int, float] = {}
    epochs: dict[str, list[float]] = {}
    passes = method = seconds = 0.0
    for node in entry.trial.nodes:
        flops = own_flops(node.job, *counted) / setting.baseline_flops
        levels[node.level] = levels.get(node.level, 0.0) + flops
        seconds += (store.result(node.job) or {}).get("seconds", 0.0)
        if isinstance(node.job, TrainJob):
            epochs.setdefault(str(node.level), []).append(node.job.task.epochs)
            passes += node.job.task.epochs
        else:
            method += flops
    result = store.result(entry.trial.target.job) or {}
    return {
        "protocol": entry.protocol,
        "budget": entry.budget,
        "seed": entry.seed,
        "lr": entry.lr,
        "top1": result.get("top1"),
        "best_top1": result.get("best", {}).get("top1", result.get("top1")),
        "top5": result.get("top5"),
        "loss": result.get("loss"),
        "flops": sum(levels.values()),
        "flops_by_level": {str(level): share for level, share in sorted(levels.items())},
        "method_flops": method,
        "epochs": epochs,
        "data_passes": passes,
        "seconds": seconds,
        "images_per_second": passes * images / seconds if seconds else None,
        "target": str(store.folder(entry.trial.target.job).relative_to(store.root.parent)),
    }


def write_results(output: Path, summary: Mapping[str, Any]) -> None:
    """results.jsonl and results.csv with a row a trial, and summary.json with everything."""
    rows = summary["rows"]
    write_text(output / ROWS, "".join(json.dumps(row) + "\n" for row in rows))
    text = io.StringIO()
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    for row in rows:
        table.writerow(
            {k: json.dumps(v) if isinstance(v, dict | list) else v for k, v in row.items()}
        )
    write_text(output / TABLE, text.getvalue())
    write_json(output / SUMMARY, summary)


def read_summary(output: Path) -> dict[str, Any] | None:
    return read_json(output / SUMMARY)
