"""How large a report of a large run is, and how long it takes to write.

    python benchmarks/report.py

The run is made up, and large: 8 leaves, 4, 2 and 1 models, 300 epochs and 1,000 logged steps each,
and the blocks of 50 layers at 100 of the epochs. Expected: under 5 MB, under 5 seconds.
"""

import csv
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from rbdc.report.page import read_state, render

EPOCHS, STEPS, LAYERS, BLOCK_ROWS = 300, 1000, 50, 100


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        make_run(folder)
        logs = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        began = time.perf_counter()
        state = read_state([folder])
        read = time.perf_counter()
        page = render(state)
        done = time.perf_counter()
        assert not state["runs"][0]["missing"], state["runs"][0]["missing"]
    print(f"page {len(page.encode()) / 1e6:.2f} MB of {logs / 1e6:.0f} MB of logs")
    print(f"{done - began:.2f} s: read {read - began:.2f} s, rendered {done - read:.2f} s")


def make_run(folder: Path) -> None:
    numbers, nodes = random.Random(0), []
    below: list[str] = []
    for level in (3, 2, 1, 0):
        here = []
        for index in range(2**level):
            parents = []
            if below:
                key = f"coupling-{level}-{index}"
                nodes.append(_node(key, level, "grow", below[2 * index : 2 * index + 2]))
                _write(folder, key, {"kind": "grow", "metrics": {"top1": 0.5}, "seconds": 1.0})
                parents = [key]
            key = f"model-{level}-{index}"
            here.append(key)
            nodes.append(_node(key, level, "train", parents) | {"epochs": EPOCHS, "seed": 1})
            _write(folder, key, {"kind": "train", "metrics": {"top1": 0.8}, "seconds": 1e5})
            _logs(folder / "jobs" / key, 2 ** (3 - level), numbers)
        below = here
    plan = {"model": {"name": "deit_base", "width": 1.0}, "baseline_flops": 1e20}
    run = {"request": {"plan": plan, "recipe": {}}, "nodes": nodes, "command": [], "data": {}}
    (folder / "run.json").write_text(json.dumps(run))


def _node(key: str, level: int, kind: str, parents: list[str]) -> dict[str, Any]:
    place = {"key": key, "name": key, "folder": f"jobs/{key}", "level": level, "kind": kind}
    facts = {"width": 0.5**level, "flops": 1e18, "metrics": ["top1"]}
    return {**place, **facts, "parents": parents}


def _write(folder: Path, key: str, result: dict[str, Any]) -> None:
    (folder / "jobs" / key).mkdir(parents=True)
    (folder / "jobs" / key / "result.json").write_text(json.dumps(result))


def _logs(folder: Path, blocks: int, numbers: random.Random) -> None:
    with (folder / "summary.csv").open("w") as file:
        names = ("epoch", "step", "train_loss", "lr", "top1", "top5", "loss", "flops", "seconds")
        table = csv.DictWriter(file, names)
        table.writeheader()
        for epoch in range(EPOCHS):
            table.writerow({name: numbers.random() for name in names} | {"epoch": epoch + 1})
    with (folder / "log.jsonl").open("w") as file:
        for step in range(STEPS):
            values = {name: numbers.random() for name in ("loss", "lr", "flops", "seconds")}
            print(json.dumps({"step": step, "epoch": step * EPOCHS / STEPS, **values}), file=file)
    with (folder / "blocks.jsonl").open("w") as file:
        side = range(max(2, blocks))
        for row in range(BLOCK_ROWS):
            sizes = {
                f"blocks.{layer}.attn.qkv.weight": [
                    [float(f"{numbers.random():.4g}") for _ in side] for _ in side
                ]
                for layer in range(LAYERS)
            }
            print(
                json.dumps({"step": row, "epoch": 3 * row, "flops": 1, "blocks": sizes}), file=file
            )


if __name__ == "__main__":
    main()
