"""How long the paper's DeiT-Base takes on 8 and 64 GPUs beside standard training: simulated.

    python benchmarks/cluster_schedule.py

Nothing is measured here: speeds are assumed (`rbdc.plan.Hardware`; they are printed), so the
ratios count, not the hours. Each is of the 2-step tree (ratio 2, budget 0.7) over standard training
for 300 epochs on the same GPUs. Expected with the assumptions as they are: makespan and GPU-hours
0.82 on 8 GPUs, 0.91 on 64. With equal FLOPs a second at every width 8 GPUs give what the FLOPs say,
0.70, and where steps can be as short as their FLOPs say 64 GPUs do too. GPU-hours are of GPUs at
work.
"""

import time

from rbdc.cluster.allocation import ClusterPlan, plan_cluster
from rbdc.plan import Hardware, make_plan, scaling_of

MODEL, GPUS = "deit_base_patch16_224", (8, 64)
CASES = {
    "as assumed": Hardware(),
    "narrow models do as many FLOP/s": Hardware(narrow_efficiency=1.0),
    "and steps can be short": Hardware(narrow_efficiency=1.0, least_step_seconds=0.0),
    "network 10 times slower": Hardware(network_bytes_per_second=5e9),
}


def main() -> None:
    plan = make_plan(MODEL, steps=2, ratio=2, budget=0.7, baseline_epochs=300)
    epochs = " / ".join(f"{stage.models} x {stage.epochs:g}" for stage in reversed(plan.stages))
    print(f"{MODEL}: {epochs} epochs, {plan.normalized_flops:.3f} of standard training's FLOPs")
    scalings = {name: scaling_of(plan, hardware=hardware) for name, hardware in CASES.items()}
    scaling = scalings["as assumed"]
    speeds = ", ".join(f"{speed:.0f}" for speed in scaling.images_per_second)
    print(
        f"assumed: {speeds} images/s of one GPU, batch {scaling.batch_size},\n{scaling.hardware}\n"
    )
    print(f"{'':36}{'GPUs':>5}{'makespan':>10}{'GPU-hours':>11}{'gap':>7}   tree / standard")
    began = time.perf_counter()
    for name, changed in scalings.items():
        for devices in GPUS:
            print(_line(name, plan_cluster(plan, devices, changed)))
    for devices in (1000, 10_000):
        print(_line("as assumed", plan_cluster(plan, devices, scaling)))
    print(f"\nall of it simulated in {time.perf_counter() - began:.2f} s")


def _line(name: str, cluster: ClusterPlan) -> str:
    tree, standard = cluster.tree, cluster.standard
    hours = f"{tree.makespan_seconds / 3600:.2f} h / {standard.makespan_seconds / 3600:.2f} h"
    groups = " + ".join(f"{row.models} on {row.devices}" for row in reversed(tree.rows))
    return (
        f"{name:36}{tree.devices:5}{cluster.makespan_ratio:10.3f}{cluster.device_ratio:11.3f}"
        f"{tree.gap:7.1%}   {hours}   ({groups})"
    )


if __name__ == "__main__":
    main()
