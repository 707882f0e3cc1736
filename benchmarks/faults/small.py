"""The runs that faults are made in: real ones, of a second or two, and the bits they end with."""

import atexit
import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.faults.child import Ranks, Running, before_operations
from rbdc.cli import main
from rbdc.disk import Json, read_lines
from rbdc.jobs import engine
from rbdc.models import memory
from tests.cluster.ray_cluster import RayCluster
from tests.support import TINY, folder_data

MODEL = "resnet18d"
SETTINGS = {
    "memory": ("--in-memory", "--jobs", "1"),
    "folder": ("--jobs", "1"),
    "two": ("--in-memory", "--jobs", "2"),
    "ddp": ("--in-memory",),
    "fsdp": ("--in-memory", "--parallel", "fsdp", "--transition", "restart"),
    "ray": ("--in-memory", "--engine", "ray", "--retries", "10"),
}
"""The options of each way to run."""


def root() -> Path:
    """Return the folder of all cases, below $RBDC_FAULTS."""
    return Path(os.environ.get("RBDC_FAULTS", tempfile.gettempdir())) / "rbdc-faults"


def words(way: str, output: Path, *more: str) -> list[str]:
    """Return the command of a run that saves after every step: two leaves and a target."""
    arguments = [f"{key}={value}".replace(" ", "") for key, value in TINY[MODEL].items()]
    text = (
        f"train --model {MODEL} --data {data()} --steps 1 --epochs 2 --batch-size 8 --lr 0.001 "
        "--warmup-epochs 1 --scale null --color-jitter 0 --crop-padding 2 --threads 1 --workers 0 "
        f"--checkpoint-minutes 0 --no-tensorboard --device cpu --output {output}"
    )
    return [*text.split(), *SETTINGS[way], *more, "--model-kwargs", *arguments]


def start(way: str, run: Path, before: Callable[[], None] | None = None) -> Running | Ranks:
    """Start a run, or go on with it. `before` is called in its process."""

    def begin() -> None:
        if way == "two":  # workers are copies of it: a server would need seconds to import
            engine.start_server = lambda modules: get_context("fork")  # noqa: ARG005
        if before:
            before()

    said = run.with_name(f"{run.name}.said")
    if way == "ray":
        cluster = ray_cluster()
        return Running(words(way, run, "--address", cluster.address), said, begin, cluster.start)
    started = Ranks if way in ("ddp", "fsdp") else Running
    return started(words(way, run), said, begin)


@cache
def ray_cluster() -> RayCluster:
    """Return a Ray cluster of two nodes, which ends with this process."""
    cluster = RayCluster()
    atexit.register(cluster.close)
    return cluster


def prepare() -> None:
    """Make the folder of all cases; remember in it how models couple, and what was measured."""
    root().mkdir(parents=True, exist_ok=True)
    memory.FOLDER = root() / "structures"
    os.environ["HOME"] = str(root() / "home")  # nothing of the user's is read or written
    import_module("matplotlib.font_manager")  # lists the fonts once, in the new home
    with redirect_stdout(io.StringIO()):  # what is computed once for a process, its copies have
        assert main(words("memory", root() / "none", "--dry-run")) == 0


@cache
def data() -> Path:
    """Return a folder of few images."""
    folder = root() / "data"
    if not (root() / "data.done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder_data(folder, train=20, test=10)
        (root() / "data.done").touch()
    return folder


def fresh(name: str) -> Path:
    """Return an empty folder for a case."""
    folder = root() / f"{name}-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def finished(way: str) -> Path:
    """Return a run that nothing happened to. Nobody may change it."""
    run, done = root() / f"reference-{way}", root() / f"reference-{way}.json"
    if not done.exists():
        shutil.rmtree(run, ignore_errors=True)
        counted = root() / f"reference-{way}.operations"
        counted.write_bytes(b"")

        def count(_event: str, _path: str) -> None:
            with counted.open("ab") as file:  # a byte each, of whichever process
                file.write(b".")

        ended = start(way, run, lambda: before_operations(run, count)).wait()
        assert ended.code == 0, ended.text
        about = {"seconds": ended.seconds, "operations": counted.stat().st_size}
        done.write_text(json.dumps(about))
    return run


def about(way: str) -> dict[str, Any]:
    """Return the seconds and the file operations of a run that nothing happened to."""
    finished(way)
    content: dict[str, Any] = json.loads((root() / f"reference-{way}.json").read_text())
    return content


def bits(run: Path) -> dict[str, str]:
    """Return digests of all weights and scores of a run, and of each step's loss."""
    found = {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in run.rglob("*.safetensors")
        if "checkpoints" not in path.parts
    }
    for path in run.glob("jobs/*/log.jsonl"):
        rows, _damaged = read_lines(path, Json)  # the damaged ones are left out
        losses = [[row.get(name) for name in ("step", "loss", "lr")] for row in rows]
        found[str(path.relative_to(run))] = repr(losses)
    nodes = json.loads((run / "result.json").read_text())["nodes"]
    return found | {name: json.dumps(node["metrics"]) for name, node in nodes.items()}


def difference(run: Path, reference: Path) -> str:
    """Return the first thing that is not the same in two runs; empty if there is none."""
    ours, theirs = bits(run), bits(reference)
    other = [name for name in {**theirs, **ours} if ours.get(name) != theirs.get(name)]
    return f"{sorted(other)[0]} and {len(other) - 1} more differ" if other else ""
