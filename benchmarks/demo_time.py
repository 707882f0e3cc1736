"""Time the demo's tree against standard training with the same FLOPs, each alone on the machine.

    python benchmarks/demo_time.py [--recipe demo] [--turns 5] [--paper]

A turn trains the tree, then the target alone (`--steps 0`) for the same FLOPs, with the settings
that `rbdc train` chooses. Start-up, data and report are not counted, evaluation is. Prints the
median of the ratios tree / standard, and the part of each level in the tree's time. `--paper` grows
in width alone, with the paper's ratio of 2 and the FLOPs of standard training in full.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import rbdc
from rbdc.jobs.engine import Event, start_server


class Clock:
    """The time from the first job's start to the last one's end, and the notes on the way."""

    def __init__(self) -> None:
        self.began: float | None = None
        self.ended = 0.0
        self.note = ""

    def __call__(self, event: Event) -> None:
        self.note = event.note or self.note
        if event.kind == "started":
            self.began = self.began or time.perf_counter()
        self.ended = time.perf_counter()

    @property
    def seconds(self) -> float:
        assert self.began is not None
        return self.ended - self.began


def turn(recipe: str, **settings: Any) -> tuple[Clock, dict[str, Any]]:
    """Train once; return the clock and the result."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        result = rbdc.train(output, recipe=recipe, with_baseline=False, watch=clock, **settings)
    return clock, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--fuse", default="auto", choices=["auto", "on", "off"])
    parser.add_argument("--paper", action="store_true", help="width alone, ratio 2, budget 1")
    options = parser.parse_args()
    plan = {"grow": ["width"], "ratio": 2, "budget": 1.0} if options.paper else {}
    start_server({"rbdc.jobs.grow", "rbdc.jobs.train"})  # as `rbdc train` does, while it plans
    # Warm up, and measure the way to train siblings.
    turn(options.recipe, **{**plan, "budget": 0.2, "rounding": "none"})
    ratios = []
    for number in range(options.turns):
        tree, result = turn(options.recipe, fuse=options.fuse, **plan)
        budget = result["normalized_flops"]
        standard, _ = turn(options.recipe, steps=0, budget=budget, rounding="none")
        ratios.append(tree.seconds / standard.seconds)
        if not number and tree.note:
            print(tree.note)
        levels: dict[str, float] = {}
        for name, node in result["nodes"].items():
            level = name.partition(".")[0] if "coupling" not in name else "couplings"
            levels[level] = levels.get(level, 0.0) + node["device_seconds"]
        parts = ", ".join(f"{k} {v / standard.seconds:.2f}" for k, v in levels.items())
        print(f"turn {number + 1}: {ratios[-1]:.2f} ({parts} of standard's time)", flush=True)
    print(
        f"{options.recipe}: tree / standard at equal FLOPs: {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} turns)"
    )


if __name__ == "__main__":
    main()
