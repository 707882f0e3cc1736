"""The timetable that `rbdc plan --devices 2` simulates, held against real runs on two cores.

    python benchmarks/simulator.py

The demo's tree by the local engine (--jobs 2; narrow models have a core each, the target both), and
on Ray (every model has a core). A core is a device. Printed are the real makespan, from the first
job's beginning to the last one's end, over

    its jobs:   the timetable simulated with the seconds that each job took;
    its speed:  the timetable simulated from images a second, measured before the run on idle cores.

Expected: within 2 % of the first, which is the scheduling alone, and on Ray within 10 %, for its
second worker begins later; the second leaves out evaluation, couplings, checkpoints, and that two
trainings disturb each other, so that real runs take longer.
How fast a group of GPUs is, is not checked here.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch

from rbdc.cluster.allocation import demands_of
from rbdc.cluster.timetable import Demand, simulate
from rbdc.experiments.train import Training, prepare
from rbdc.jobs.measure import measure_training
from rbdc.jobs.store import Store
from rbdc.jobs.train import TrainJob
from rbdc.plan import Hardware, scaling_of
from rbdc.runs.run import Where, start
from rbdc.settings import Cluster, Machine, read_recipe, split_settings
from rbdc.training import Task

CORES = 2
ALLOCATIONS = {"local": (2, 1, 1), "ray": (1, 1, 1)}  # cores of each level's models, target first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--baseline-epochs", type=float, default=6.0, help="the tree's length")
    options = parser.parse_args()
    settings = {"baseline_epochs": options.baseline_epochs, "with_baseline": False}
    prepared = prepare(*split_settings(read_recipe("demo"), settings))
    print(f"{'':8}{'real / simulated with its jobs':>32}{'with measured speed':>22}")
    for name, allocation in ALLOCATIONS.items():
        found = []
        for _ in range(options.turns):
            predicted = predict(prepared, allocation)
            found.append(run(prepared, name, allocation, predicted))
        for ratios in found:
            print(f"{name:8}{ratios[0]:32.3f}{ratios[1]:22.3f}")
        means = [mean(ratios) for ratios in zip(*found, strict=True)]
        print(f"{'  mean':8}{means[0]:32.3f}{means[1]:22.3f}")


def predict(prepared: Training, allocation: Sequence[int]) -> float:
    """Seconds of the whole tree, from the speed of each level."""
    plan, first = prepared.plan, dict[int, Task]()
    for node in prepared.tree.nodes:
        if isinstance(node.job, TrainJob):
            first.setdefault(node.level, node.job.task)

    def speed(level: int, cores: int) -> float:
        torch.set_num_threads(cores)
        return measure_training(first[level], Machine(device="cpu")).images_per_second

    levels = [stage.level for stage in plan.stages[::-1]]
    speeds = [speed(level, cores) for level, cores in zip(levels, allocation, strict=True)]
    hardware = Hardware(least_step_seconds=0.0)
    scaling = scaling_of(
        plan,
        batch_size=prepared.setting.recipe.batch_size,
        images_per_second=speeds,
        hardware=hardware,
    )
    demands = [  # threads, not processes that exchange gradients: their speed was measured
        replace(demand, devices=allocation[demand.level])
        for demand in demands_of(plan, [1] * len(levels), scaling)
    ]
    return simulate(demands, CORES).makespan_seconds


def run(
    prepared: Training, name: str, allocation: Sequence[int], predicted: float
) -> tuple[float, float]:
    """The real makespan over both simulated ones."""
    local = name == "local"
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        where = Where(
            machine=Machine(device="cpu", threads=CORES if local else 0),
            jobs=CORES if local else None,
            cluster=Cluster() if local else Cluster(engine="ray", cpus_per_job=(1.0,)),
        )
        start(prepared.run(), output, where)
        store, demands, spans = Store(output / "jobs"), [], []
        names = {node.job.key: node.name for node in prepared.nodes}
        for node in prepared.nodes:
            path = store.folder(node.job) / "result.json"
            seconds = json.loads(path.read_text())["seconds"]
            ended = path.stat().st_mtime
            spans.append((ended - seconds, ended))
            demands.append(
                Demand(
                    name=node.name,
                    level=node.level,
                    devices=allocation[node.level] if node.job.trains else 1,
                    seconds=seconds,
                    parents=tuple(names[parent.key] for parent in node.job.parents),
                )
            )
    real = max(end for _, end in spans) - min(begin for begin, _ in spans)
    return real / simulate(demands, CORES).makespan_seconds, real / predicted


if __name__ == "__main__":
    main()
