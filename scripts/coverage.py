"""Which models of timm and torchvision couple, and how exactly: try them all.

    python scripts/coverage.py coverage.jsonl                 # all of them: hours on one core
    python scripts/coverage.py coverage.jsonl resnet deit_    # those that begin so
    python scripts/coverage.py coverage.jsonl --every 40      # a sample
    python scripts/coverage.py coverage.jsonl --retry         # those that do not couple exactly
    python scripts/coverage.py coverage.jsonl --table         # only print the table

Each is halved, coupled with random weights and proved in float64, with two blocks per stage and
small images where its constructor takes a depth and an image size; `--full` changes nothing. One
that is not exact so is tried at twice its width too, from two models of its own width. A worker
process tries one after the other; it is replaced when it dies, hangs or needs too much memory. A
line is added to the file for each model; what the file has is not tried again, so a stopped run
goes on. The order is shuffled, so the part that is done is a fair sample.
"""

import argparse
import json
import resource
import select
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import timm
import torch
import torchvision

from rbdc.errors import CouplingError, RbdcError, WidthError
from rbdc.models import ModelSpec, build_meta, depths, memory
from rbdc.models.create import TORCHVISION
from rbdc.models.explain import explain

Row = dict[str, Any]
MEMORY = 9 * 2**30
"""Bytes of data that a worker may allocate; beyond a third of it, it ends after its model."""
SIZES = (64, 128, None)
"""Sides of images that are tried; None is the model's own."""


_HANGS = 100
"""Seconds, for each CPU second that a model may take, after which its process counts as hanging."""


# What the worker does


def work() -> None:
    """Try the models that are named on standard input, and print a line for each."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        memory.FOLDER = Path(folder)  # what another version of the code remembered is not used
        _work()


def _work() -> None:
    for line in sys.stdin:
        name, full, seconds = json.loads(line)
        limit = int(time.process_time() + seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        print(json.dumps(tried(name, full=full)), flush=True)
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > MEMORY / 3:
            return


def tried(name: str, *, full: bool) -> Row:
    """Couple a model from two of half its width; if that is not exact, also couple two of it."""
    spec = ModelSpec(name=name)
    try:
        spec = spec if full else cut(name)
    except RbdcError as error:
        return {"halved": False, "couples": False, "exact": False, "cause": error.problem}
    row = coupled(spec)
    if not row["exact"]:
        row["doubled"] = coupled(spec.scaled(2))
    return row


def coupled(spec: ModelSpec) -> Row:
    """Halve, couple and prove one model, and return what was found."""
    row: Row = {"halved": False, "couples": False, "exact": False, "cause": ""}
    try:
        row["arguments"] = dict(spec.arguments)
        found = explain(spec)
        cause = ": ".join(next(iter(found.structure.inexact.items()), ()))
        how = {"halved": True, "couples": True, "by": found.halved}
        row |= {**how, "exact": found.proof.holds, "error": found.proof.error, "cause": cause}
    except WidthError as error:
        row["cause"] = error.problem
    except CouplingError as error:
        row |= {"halved": True, "cause": error.problem}
    except MemoryError:
        row["cause"] = "it needs too much memory"
    except RbdcError as error:
        row["cause"] = error.problem
    except Exception as error:  # a mistake of ours: the table counts these
        memory_ended = "allocate memory" in str(error)
        cause = f"{type(error).__name__}: {error}"[:300]
        row |= {"crash": not memory_ended}
        row["cause"] = "it needs too much memory" if memory_ended else cause
    return row


def cut(name: str) -> ModelSpec:
    """Return the model with at most two blocks per stage and small images, if it then runs."""
    blocks = {
        key: tuple(min(2, n) for n in value) if isinstance(value, tuple) else min(2, value)
        for key, value in depths(ModelSpec(name=name)).items()
    }
    for arguments in (blocks, {}) if blocks else ({},):
        for size in SIZES:
            given = arguments | ({} if size is None else {"img_size": size})
            spec = ModelSpec(name=name, arguments=given)
            if runs(spec):
                return spec
    return ModelSpec(name=name)


def runs(spec: ModelSpec) -> bool:
    """Return whether the model runs on the meta device."""
    try:
        model: Any = build_meta(spec)
        size = model.pretrained_cfg["input_size"]
        with torch.no_grad():
            model.eval()(torch.empty(1, *size, device="meta"))
    except Exception:  # constructors and forward passes raise many types of errors
        return False
    return True


# What the run does


class Worker:
    """A process that tries models; it is started when it is needed."""

    def __init__(self, *, full: bool, seconds: float) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.full, self.seconds = full, seconds

    def tried(self, name: str) -> Row:
        """Try one model; what ends the process (time, memory) is a cause too."""
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--work"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )  # fmt: skip
        assert self.process.stdin and self.process.stdout
        began, failed = time.monotonic(), {"halved": False, "couples": False, "exact": False}
        with suppress(BrokenPipeError):
            order = json.dumps([name, self.full, self.seconds])
            print(order, file=self.process.stdin, flush=True)
        ready, _, _ = select.select([self.process.stdout], [], [], _HANGS * self.seconds)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            if not ready:
                self.process.kill()
            code = self.process.wait()
            if code == 0:  # it ended after the model before this one
                return self.tried(name)
            slow = not ready or code == -signal.SIGXCPU
            why = f"more than {self.seconds:g} s" if slow else f"its process ended with {code}"
            line = json.dumps({**failed, "crash": True, "cause": why})
        seconds = round(time.monotonic() - began, 1)
        return {"name": name, "module": module_of(name), **json.loads(line), "seconds": seconds}


def names() -> list[str]:
    """Return all models, in a shuffled order that is always the same."""
    others = torchvision.models.list_models(module=torchvision.models)
    every = [*timm.list_models(), *(f"{TORCHVISION}{name}" for name in others)]
    Random(0).shuffle(every)
    return every


def module_of(name: str) -> str:
    """Return the name of the module in which a model is defined."""
    if name.startswith(TORCHVISION):
        return "torchvision"
    return str(timm.models.model_entrypoint(name).__module__.rpartition(".")[2])


def table(rows: list[Row]) -> str:
    """Return the numbers of architectures by module, and the most frequent cause in each."""
    modules: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        modules[row["module"]].append(row)
    lines = [
        "| module | architectures | halved | couple | exact | exact or doubled exactly | why not |",
        "|---|---|---|---|---|---|---|",
    ]
    for module, own in (*sorted(modules.items()), ("all", rows)):
        counts = [sum(bool(row[key]) for row in own) for key in ("halved", "couples", "exact")]
        counts.append(sum(exact_somehow(row) for row in own))
        lines.append(f"| {' | '.join(map(str, (module, len(own), *counts, why_not(own))))} |")
    return "\n".join(lines)


def exact_somehow(row: Row) -> bool:
    """Return whether a model couples exactly, from two of half its width or as one of two."""
    return bool(row["exact"] or row.get("doubled", {}).get("exact"))


def why_not(rows: list[Row]) -> str:
    """Return the most frequent cause among models that do not couple exactly."""
    causes = Counter(row["cause"][:100] for row in rows if not exact_somehow(row))
    return next((f"{cause} ({n})".replace("|", "/") for cause, n in causes.most_common(1)), "")


def read(file: Path) -> dict[str, Row]:
    """Return the last line of each model."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {row["name"]: row for row in map(json.loads, lines)}


def main() -> None:
    """Try the models that the file does not have, and print the table."""
    parser = argparse.ArgumentParser(description="Try which models couple.")
    parser.add_argument("file", type=Path)
    parser.add_argument("prefixes", nargs="*")
    parser.add_argument("--every", type=int, default=1, help="try only every n-th model")
    parser.add_argument("--seconds", type=float, default=900, help="CPU seconds for one model")
    parser.add_argument("--full", action="store_true", help="do not cut blocks and images")
    parser.add_argument("--retry", action="store_true", help="try again what was not exact")
    parser.add_argument("--table", action="store_true", help="print the table and try nothing")
    options = parser.parse_args()
    rows = read(options.file)
    wanted = [n for n in names() if n.startswith(tuple(options.prefixes) or "")][:: options.every]
    worker = Worker(full=options.full, seconds=options.seconds)
    with options.file.open("a") as file:
        for name in () if options.table else wanted:
            if name not in rows or (options.retry and not rows[name]["exact"]):
                rows[name] = worker.tried(name)
                print(json.dumps(rows[name]), file=file, flush=True)
    print(table([rows[name] for name in wanted if name in rows]))


if __name__ == "__main__":
    work() if sys.argv[1:] == ["--work"] else main()
