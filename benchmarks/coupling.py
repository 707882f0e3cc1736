"""What coupling costs beside what cannot be avoided: reading and writing the same bytes.

    python benchmarks/coupling.py                  # two halves of DeiT-Base
    python benchmarks/coupling.py --model resnet50d

Three jobs, each in a process of its own, taking turns: `plain` reads the two parents and writes a
file of the wide model's size, with safetensors and fsync; `couple` does what `rbdc couple` does
between those (load, couple, export), without the proof; `prove` adds the proof. Printed are the
ratios of their median times, and peak memory over that of the imports, in units of parents + wide
model. Expected for DeiT-Base: couple at most 2.0x plain, memory under 1.5.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import rbdc
from rbdc.coupling import example_for
from rbdc.models import ModelSpec, build_empty


def plain(parents: list[Path], output: Path, spec: ModelSpec) -> None:
    """Load + save: every byte of the parents read, as many written as the wide model has."""
    states = [load_file(path / "model.safetensors") for path in parents]
    for state in states:
        for tensor in state.values():
            tensor.clone()  # load_file maps: this reads
    wide = {name: torch.ones_like(t) for name, t in build_empty(spec).state_dict().items()}
    output.mkdir()
    save_file(wide, output / "model.safetensors")
    with (output / "model.safetensors").open("rb") as file:
        os.fsync(file.fileno())


def couple(parents: list[Path], output: Path, spec: ModelSpec, *, prove: bool = False) -> None:
    first, second = (rbdc.load(path) for path in parents)
    wide = rbdc.couple(first, second, into=build_empty(spec))
    if prove:
        rbdc.verify_coupling(first, second, wide, example_for(wide))
    rbdc.export(wide, output)


def job(name: str, folder: Path, spec: ModelSpec, turn: int) -> None:
    """In a process of its own: run one job, print its time and its memory over the imports'."""
    parents = [folder / "a", folder / "b"]
    output = folder / f"{name}-{turn}"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    if name == "plain":
        plain(parents, output, spec)
    else:
        couple(parents, output, spec, prove=name == "prove")
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"seconds": seconds, "bytes": (peak - before) * 1024}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="deit_base_patch16_224")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--job", nargs=3, metavar=("NAME", "FOLDER", "TURN"), help="internal")
    options = parser.parse_args()
    spec = ModelSpec(name=options.model)
    if options.job:
        name, folder, turn = options.job
        job(name, Path(folder), spec, int(turn))
        return
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        for seed, side in enumerate("ab"):
            torch.manual_seed(seed)
            rbdc.export(rbdc.build(spec.scaled(0.5)), Path(folder) / side)
        report(run(options.model, folder, options.turns), parameter_bytes(spec), options.model)


def run(model: str, folder: str, turns: int) -> dict[str, list[dict[str, float]]]:
    results: dict[str, list[dict[str, float]]] = {"plain": [], "couple": [], "prove": []}
    for turn in range(turns):
        for name, rows in results.items():
            command = [sys.executable, __file__, "--model", model, "--job", name, folder, str(turn)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
    return results


def parameter_bytes(spec: ModelSpec) -> int:
    """Parents and wide model together."""
    sizes: list[int] = [
        sum(t.numel() * t.element_size() for t in build_empty(s).state_dict().values())
        for s in (spec, spec.scaled(0.5))
    ]
    return sizes[0] + 2 * sizes[1]


def report(results: dict[str, list[dict[str, float]]], size: int, model: str) -> None:
    print(f"{model}: parents + wide model are {size / 2**20:.0f} MiB")
    base = statistics.median(row["seconds"] for row in results["plain"])
    for name, rows in results.items():
        ratios = sorted(row["seconds"] / base for row in rows)
        memory = max(row["bytes"] for row in rows) / size
        print(
            f"{name:>7}: {statistics.median(ratios):.2f}x the time of load + save "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f} in {len(rows)} turns), "
            f"peak memory {memory:.2f} of parents + wide"
        )


if __name__ == "__main__":
    main()
