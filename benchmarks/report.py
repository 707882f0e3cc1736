"""How large a report of a large run is, and how long it takes to write.

    python benchmarks/report.py
    python benchmarks/report.py --jobs 5000

Runs are made up. The first is deep: 8 leaves, 4, 2 and 1 models, 300 epochs and 1,000 logged steps
each, and the blocks of 50 layers at 100 of the epochs. Expected: under 5 MB, under 5 seconds.

With `--jobs` it is a comparison of trees of one step (two leaves, a coupling, a target) of 10
epochs and 100 logged steps each. Expected for 5,000: `rbdc status` under 2 seconds, a page under 8
MB and 10 seconds.
"""

import argparse
import csv
import io
import json
import random
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from rbdc.cli import main as main_command
from rbdc.disk import json_text
from rbdc.report.page import read_state, render
from rbdc.runs.record import FORMAT

EPOCHS, STEPS, LAYERS, BLOCK_ROWS = 300, 1000, 50, 100
FEW_EPOCHS, FEW_STEPS = 10, 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, help="jobs of a comparison, a multiple of 4")
    jobs = parser.parse_args().jobs
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        make_comparison(folder, jobs // 4) if jobs else make_run(folder)
        logs = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        began = time.process_time()
        with redirect_stdout(io.StringIO()):
            assert main_command(["status", str(folder)]) == 0
        told = time.process_time()
        state = read_state([folder])
        read = time.process_time()
        page = render(state)
        done = time.process_time()
        assert not state["runs"][0]["missing"], state["runs"][0]["missing"]
    print("seconds of CPU time, which on a quiet machine is all the time:")
    print(f"status of {len(state['runs'][0]['nodes'])} jobs: {told - began:.2f} s")
    print(f"page {len(page.encode()) / 1e6:.2f} MB of {logs / 1e6:.0f} MB of logs")
    print(f"{done - told:.2f} s: read {read - told:.2f} s, rendered {done - read:.2f} s")


def make_run(folder: Path) -> None:
    numbers, nodes = random.Random(0), []
    below: list[str] = []
    for level in (3, 2, 1, 0):
        here = []
        for index in range(2**level):
            parents = []
            if below:
                parents = [f"coupling-{level}-{index}"]
                nodes.append(_grown(folder, parents[0], level, below[2 * index : 2 * index + 2]))
            key = f"model-{level}-{index}"
            here.append(key)
            nodes.append(_trained(folder, key, level, parents, EPOCHS))
            _logs(folder / "jobs" / key, numbers, EPOCHS, STEPS)
            _blocks(folder / "jobs" / key, 2 ** (3 - level), numbers)
        below = here
    _write_run(folder, "train", nodes)


def make_comparison(folder: Path, trials: int) -> None:
    numbers, nodes, rows = random.Random(0), [], []
    for trial in range(trials):
        leaves = [f"leaf-{trial}-{index}" for index in range(2)]
        coupling, target = f"coupling-{trial}", f"target-{trial}"
        nodes += [_trained(folder, leaf, 1, [], FEW_EPOCHS) for leaf in leaves]
        nodes.append(_grown(folder, coupling, 0, leaves))
        nodes.append(_trained(folder, target, 0, [coupling], FEW_EPOCHS))
        for key in (*leaves, target):
            _logs(folder / "jobs" / key, numbers, FEW_EPOCHS, FEW_STEPS)
        cost = {"budget": 1.0, "flops": 4e18, "data_passes": 30.0, "seconds": 1e5}
        epochs = {"0": [FEW_EPOCHS], "1": [FEW_EPOCHS] * 2}
        rows.append({"protocol": "rbdc:1", "seed": trial, "score": 0.8, "epochs": epochs,
                     "target": f"jobs/{target}", **cost})  # fmt: skip
    _write_run(folder, "compare", nodes)
    result = {"metric": "top1", "rows": rows, "lines": []}
    (folder / "result.json").write_text(json_text(result))


def _write_run(folder: Path, kind: str, nodes: list[dict[str, Any]]) -> None:
    setting = {"model": {"name": "deit_base", "width": 1.0}, "recipe": {}, "baseline_flops": 1e20}
    run = {"format": FORMAT, "kind": kind, "nodes": nodes, "identity": {"setting": setting}}
    (folder / "run.json").write_text(json_text(run))


def _grown(folder: Path, key: str, level: int, parents: list[str]) -> dict[str, Any]:
    _write(folder, key, {"kind": "grow", "metrics": {"top1": 0.5}, "seconds": 1.0})
    return _node(key, level, "grow", parents)


def _trained(folder: Path, key: str, level: int, parents: list[str], epochs: int) -> dict[str, Any]:
    _write(folder, key, {"kind": "train", "metrics": {"top1": 0.8}, "seconds": 1e5})
    return _node(key, level, "train", parents) | {"epochs": epochs, "seed": 1}


def _node(key: str, level: int, kind: str, parents: list[str]) -> dict[str, Any]:
    place = {"key": key, "name": key, "folder": f"jobs/{key}", "level": level, "kind": kind}
    facts = {"width": 0.5**level, "flops": 1e18, "metrics": ["top1"]}
    return {**place, **facts, "parents": parents}


def _write(folder: Path, key: str, result: dict[str, Any]) -> None:
    (folder / "jobs" / key).mkdir(parents=True)
    (folder / "jobs" / key / "result.json").write_text(json_text(result))


def _logs(folder: Path, numbers: random.Random, epochs: int, steps: int) -> None:
    with (folder / "summary.csv").open("w") as file:
        names = ("epoch", "step", "train_loss", "lr", "top1", "top5", "loss", "flops", "seconds")
        table = csv.DictWriter(file, names)
        table.writeheader()
        for epoch in range(epochs):
            table.writerow({name: numbers.random() for name in names} | {"epoch": epoch + 1})
    with (folder / "log.jsonl").open("w") as file:
        for step in range(steps):
            values = {name: numbers.random() for name in ("loss", "lr", "flops", "seconds")}
            print(json.dumps({"step": step, "epoch": step * epochs / steps, **values}), file=file)


def _blocks(folder: Path, blocks: int, numbers: random.Random) -> None:
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
