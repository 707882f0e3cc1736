"""The demo's tree on a Ray of this machine's own, against siblings side by side without Ray.

    python benchmarks/ray_engine.py

On two cores: the local engine with --jobs 2, then --engine ray, each in a process of its own, in
turns. Start-up is the time until a training first tells how far it is: for Ray that is its
processes, the checks of its nodes, and torch imported by a worker; the local engine starts
processes, too. Expected: with Ray's start-up taken off, at most 1.1 times the local engine's time.
With both start-ups taken off the ratio is higher: what Ray's other workers import, and what it
takes to end Ray, is then set against less.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ENGINES = ("local", "ray")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--baseline-epochs", type=float, default=10.0, help="the demo's length")
    parser.add_argument("--measure", choices=ENGINES, help="one run, as JSON")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.baseline_epochs)))
        return
    times: dict[str, list[dict[str, float]]] = {name: [] for name in ENGINES}
    for _ in range(options.turns):
        for name, found in times.items():
            words = ["--measure", name, "--baseline-epochs", str(options.baseline_epochs)]
            done = subprocess.run(
                [sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, check=True
            )
            found.append(json.loads(done.stdout.splitlines()[-1]))
            print(f"{name:6}", "  ".join(f"{k} {v:6.1f} s" for k, v in found[-1].items()))
    after = {name: median(turn["after"] for turn in found) for name, found in times.items()}
    start = {name: median(turn["start-up"] for turn in found) for name, found in times.items()}
    whole = after["local"] + start["local"]
    print(f"ray without its start-up / local: {after['ray'] / whole:.3f}")
    print(f"both without: {after['ray'] / after['local']:.3f}")
    print(f"start-up: {start['ray'] / start['local']:.1f} times as long with Ray")


def measure(name: str, baseline_epochs: float) -> dict[str, float]:
    """Seconds of one run of the demo."""
    from rbdc.experiments.train import prepare
    from rbdc.jobs.engine import Event
    from rbdc.runs.run import Where, start
    from rbdc.settings import Cluster, Machine, read_recipe, split_settings

    prepared = prepare(*split_settings(read_recipe("demo"), {"baseline_epochs": baseline_epochs}))
    first = 0.0

    def watch(event: Event) -> None:
        nonlocal first
        if event.kind == "progress" and not first:
            first = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        where = Where(
            machine=Machine(),
            jobs=2 if name == "local" else None,
            cluster=Cluster(engine="ray") if name == "ray" else Cluster(),
        )
        start(prepared.run(), Path(folder) / "run", where, watch)
        ended = time.perf_counter()
    return {"start-up": first - began, "after": ended - first}


if __name__ == "__main__":
    main()
