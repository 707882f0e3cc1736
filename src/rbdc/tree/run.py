"""A run: jobs in one folder, from the first check to the last result."""

import os
import platform
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch

from rbdc.coupling import check_slots
from rbdc.data import ImageSet, check_batch_size, check_image_size
from rbdc.data.augment import training_transform
from rbdc.disk import free_bytes, is_writable, read_json, write_json
from rbdc.errors import RunError
from rbdc.models import ModelSpec, shapes_of
from rbdc.training import image_format
from rbdc.training.machine import check_machine, default_threads, torch_device
from rbdc.training.optimizer import optimizer_slots
from rbdc.tree.engine import Engine, InProcess, SideBySide, Watcher
from rbdc.tree.execute import Workshop, own_flops
from rbdc.tree.jobs import TrainJob
from rbdc.tree.lock import locked
from rbdc.tree.measure import faster_jobs
from rbdc.tree.nodes import Node
from rbdc.tree.places import JOB, JOBS, LOCK, RUN
from rbdc.tree.store import folder_name

Result = TypeVar("Result")


def run_nodes(
    nodes: Sequence[Node],
    shop: Workshop,
    output: Path,
    *,
    request: Mapping[str, Any],
    watch: Watcher,
    finish: Callable[[], Result],
    jobs: int | None = None,
    engine: Engine | None = None,
) -> Result:
    """Run what is not finished of the nodes' jobs in `output`, then `finish`, and give its result.

    The same request on the same folder goes on where it was; another one is refused. `jobs`
    trainings go on side by side; by default one on a GPU, and on a CPU what is faster. Another
    `engine` than this machine's runs them as it likes.
    """
    check_run(nodes, shop, output, jobs)
    world = shop.world
    with ExitStack() as stack:

        def begin() -> dict[str, Any]:
            output.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(output))
            shop.store.clean()  # it is ours: check_run has looked
            return _begin(output, nodes, request, shop, jobs)

        local = _engine(nodes, world.tell(begin))
        (engine or local).run([node.job for node in nodes], shop, watch)
        return world.tell(finish)


def check_run(nodes: Sequence[Node], shop: Workshop, output: Path, jobs: int | None = None) -> None:
    """Everything that can be known to fail, before the first step. The plan has already coupled
    the whole tree by shapes."""
    world, data = shop.world, shop.data
    if jobs is not None and jobs < 1:
        raise RunError(f"jobs is {jobs}, expected 1 or more", "1 is one training at a time.")
    if jobs is not None and jobs > 1 and world.size > 1:
        raise RunError(
            f"{world.size} processes train each model together: there is no room for {jobs} jobs",
            "Leave --jobs out under torchrun.",
        )
    _check_folder(output)
    for task in {job.task.recipe: job.task for job in trainings(nodes)}.values():
        recipe = task.recipe
        check_machine(shop.machine, recipe, world.local_rank)
        shares = world.size * recipe.grad_accum_steps
        check_batch_size(len(data.train), recipe.batch_size, shares, mixes=recipe.mixes)
        if isinstance(data.train, ImageSet) and recipe.batched:
            check_image_size(data.train, image_format(task.model, recipe, data))
        optimizer_slots(recipe)
        training_transform(recipe, image_format(task.model, recipe, data))
    for job in trainings(nodes):
        if job.keeps == "optimizer":
            check_slots(optimizer_slots(job.task.recipe))
            break
    needed, free = _needed_bytes(nodes, shop, jobs), free_bytes(output)
    if needed > free:
        raise RunError(
            f"the run needs up to {needed / 1e9:.1f} GB and {output} has {free / 1e9:.1f} GB free",
            "Make room, choose another folder, or keep fewer checkpoints (--keep).",
        )


def _check_folder(output: Path) -> None:
    if not is_writable(output):
        raise RunError(f"{output} cannot be written to", "Choose another folder.")
    ours = (output / RUN).exists() or any((output / JOBS).glob(f"*/{JOB}"))
    if output.exists() and not ours:
        foreign = [p.name for p in output.iterdir() if p.name != LOCK and RUN not in p.name]
        if foreign:
            raise RunError(
                f"{output} holds something ({foreign[0]}), but no run of ours",
                "Choose an empty or a new folder.",
            )


def trainings(nodes: Sequence[Node]) -> list[TrainJob]:
    return [node.job for node in nodes if isinstance(node.job, TrainJob)]


def _siblings(nodes: Sequence[Node]) -> Counter[int]:
    """How many trainings a level has: at most so many can go on side by side."""
    return Counter(node.level for node in nodes if isinstance(node.job, TrainJob))


def _needed_bytes(nodes: Sequence[Node], shop: Workshop, jobs: int | None) -> int:
    """Of the results that are still to come, and the checkpoints of the largest level."""
    results, checkpoints, largest = 0, 0, 0
    siblings = _siblings(nodes)
    for node in nodes:
        size = _model_bytes(node.job.model)
        largest = max(largest, size)
        if shop.store.result(node.job):
            continue
        folder = shop.store.folder(node.job)
        results -= sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
        if isinstance(node.job, TrainJob):
            task = node.job.task
            inner = size * max(1, task.templates)  # while it trains
            results += size * (2 + task.recipe.model_ema) + 2 * inner * bool(node.job.keeps)
            copies = 4 + task.recipe.model_ema  # weights, the best, two moments, average
            at_once = min(siblings[node.level], jobs or siblings[node.level])
            checkpoints = max(checkpoints, at_once * inner * copies * (shop.machine.keep + 1))
        else:
            results += size * (1 + 2 * bool(node.job.method.keeps))
    return max(0, results + checkpoints) + largest


def _model_bytes(spec: ModelSpec) -> int:
    return sum(t.numel() * t.element_size() for t in shapes_of(spec).values())


def _begin(
    output: Path,
    nodes: Sequence[Node],
    request: Mapping[str, Any],
    shop: Workshop,
    jobs: int | None,
) -> dict[str, Any]:
    """Check an old folder's request against this one, and write down how the run is run."""
    old = read_json(output / RUN)
    if old:
        _check_same(output, old["request"], request)
    machine, world = shop.machine, shop.world
    recipe = trainings(nodes)[0].task.recipe
    decoders = 0 if shop.data.in_memory and recipe.batched else machine.workers
    threads = machine.threads or default_threads(decoders)
    if old and jobs is None:
        jobs = old["engine"]["jobs"]
    if old and not machine.threads:
        threads = old["engine"]["threads"]
    if jobs is None:
        jobs = _default_jobs(nodes, shop, threads)
    content = {
        "request": request,
        "nodes": [_describe(node, shop) for node in nodes],
        "engine": {"jobs": jobs, "threads": threads, "processes": world.size},
        "data": shop.data.to_json(),
        "machine": machine.to_json(),
        "environment": environment(),
        "command": (old or {}).get("command", sys.argv[1:]),
        "started": (old or {}).get("started", datetime.now(UTC).isoformat(timespec="seconds")),
    }
    if old:
        _warn_of_versions(old["environment"], content["environment"])
    write_json(output / RUN, content)
    return content


def _default_jobs(nodes: Sequence[Node], shop: Workshop, threads: int) -> int:
    leaves = [job for job in trainings(nodes) if job.initial is None]
    on_cpu = torch_device(shop.machine).type == "cpu"
    if shop.world.size > 1 or len(leaves) == 1 or not on_cpu:
        return 1
    return faster_jobs(leaves[0].task, shop.data, threads=threads, siblings=len(leaves))


def _engine(nodes: Sequence[Node], run: Mapping[str, Any]) -> Engine:
    """Siblings side by side share the threads; one alone has them all."""
    jobs, threads = run["engine"]["jobs"], run["engine"]["threads"]
    siblings = _siblings(nodes)
    share = {
        node.job.key: max(1, threads // min(jobs, max(1, siblings[node.level]))) for node in nodes
    }
    if jobs == 1 or run["engine"]["processes"] > 1:
        return InProcess(threads=share)
    gpus = torch.cuda.device_count() if run["machine"]["device"] in ("auto", "cuda") else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    devices = [visible.split(",")[number % gpus] for number in range(jobs)] if gpus else []
    return SideBySide(workers=jobs, threads=share, all_threads=max(threads, jobs), devices=devices)


def _describe(node: Node, shop: Workshop) -> dict[str, Any]:
    job = node.job
    description: dict[str, Any] = {
        "name": node.name,
        "level": node.level,
        "key": job.key,
        "folder": f"{JOBS}/{folder_name(job)}",
        "width": job.model.width,
        "parents": [parent.key for parent in job.parents],
        "flops": own_flops(job, len(shop.data.train), shop.counter),
    }
    if isinstance(job, TrainJob):
        return {
            **description,
            "kind": "train",
            "epochs": job.task.epochs,
            "seed": job.task.seed,
        }
    return {**description, "kind": "grow", "method": job.method.content()}


def environment() -> dict[str, str]:
    packages = ("rbdc", "torch", "torchvision", "timm", "numpy")
    return {
        **{name: version(name) for name in packages},
        "python": platform.python_version(),
        "cpu": platform.processor() or platform.machine(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
    }


def _warn_of_versions(old: Mapping[str, str], new: Mapping[str, str]) -> None:
    for name, value in new.items():
        if old.get(name) != value:
            warnings.warn(
                f"the run began with {name} {old.get(name)} and goes on with {value}: "
                "results may differ in their last bits",
                stacklevel=2,
            )


def _check_same(output: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    different = list(differences(old, new))
    if different:
        more = f" and {len(different) - 5} more" if different[5:] else ""
        raise RunError(
            f"{output} holds a run that was asked for otherwise: "
            + "; ".join(f"{name} was {was}, now {now}" for name, was, now in different[:5])
            + more,
            "Ask for the same to go on, or choose another folder.",
        )


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], where: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """(name, old value, new value) of everything that differs, nested names with dots."""
    for name in dict.fromkeys([*old, *new]):
        was, now = old.get(name), new.get(name)
        if isinstance(was, dict) and isinstance(now, dict):
            yield from differences(was, now, f"{where}{name}.")
        elif was != now:
            yield f"{where}{name}", was, now
