"""Do one job: train or grow, and leave the result in the store."""

import json
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rbdc.budget import CounterName, forward_flops, training_flops
from rbdc.data import DataSet, EvaluationBatches, TrainingBatches
from rbdc.disk import write_text
from rbdc.errors import CouplingError, WidthError
from rbdc.models import ModelSpec, build_empty, export, halves_layout, load
from rbdc.models.templates import folded
from rbdc.recipes import Machine
from rbdc.training import (
    Observer,
    Progress,
    Start,
    Trained,
    World,
    evaluate,
    initial_weights,
    train,
)
from rbdc.training.checkpoint import read_state, write_state
from rbdc.training.machine import torch_device
from rbdc.training.objective import Objective
from rbdc.training.state import part
from rbdc.training.task import image_format
from rbdc.training.teacher import Teacher
from rbdc.tree.jobs import GrowJob, Job, TrainJob
from rbdc.tree.method import Lab, Parent
from rbdc.tree.places import AVERAGE, KEPT, MODEL, PROGRESS, START
from rbdc.tree.store import Store

PROGRESS_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Workshop:
    """What it takes to do a job."""

    store: Store
    data: DataSet
    machine: Machine
    world: World
    teacher: Teacher | None = None
    counter: CounterName = "fvcore+sdpa"


def execute(
    job: Job, shop: Workshop, *, observe: Observer, stopped: Callable[[], bool]
) -> dict[str, Any]:
    """Do the job, or find it done; its result. Parents must be finished."""
    result = shop.world.tell(lambda: shop.store.result(job))
    if result is not None:
        return result
    shop.world.tell(lambda: str(shop.store.begin(job)))
    result = _grow(job, shop) if isinstance(job, GrowJob) else _train(job, shop, observe, stopped)
    shop.world.tell(lambda: shop.store.finish(job, result))
    return result


def _train(
    job: TrainJob, shop: Workshop, observe: Observer, stopped: Callable[[], bool]
) -> dict[str, Any]:
    folder = shop.store.folder(job)
    counted = (len(shop.data.train), shop.counter)
    before = sum(subtree_flops(parent, *counted) for parent in job.parents)
    per_image = training_flops(forward_flops(job.model, counter=shop.counter), 1, 1)
    noted, scores = 0.0, None

    def note(progress: Progress) -> None:
        nonlocal noted, scores
        observe(progress)
        scores = progress.scores or scores  # the last ones stay to be seen
        if progress.scores is not None or time.monotonic() - noted > PROGRESS_SECONDS:
            noted = time.monotonic()
            so_far = replace(progress, scores=scores)
            write_text(folder / PROGRESS, json.dumps(so_far.to_json()))  # may be lost

    trained = train(
        job.task,
        shop.data,
        folder,
        start=lambda: _start(job, shop),
        machine=shop.machine,
        world=shop.world,
        teacher=shop.teacher.model if shop.teacher else None,
        flops_per_image=per_image,
        flops_before=before,
        blocks=_blocks(job),
        observe=note,
        stopped=stopped,
    )
    result = _result(shop, trained, per_image)
    if shop.world.is_main:
        _keep(job, folder, trained, result)
    return result


def _blocks(job: TrainJob) -> int:
    """Blocks a side that a weight is looked at in: one for each leaf, or two of what never was."""
    if job.initial is None:
        return 2 if _has_halves(job.model) else 1
    parent = job.initial.parents[0]
    return 2 if parent.initial is None else 2 * _blocks(parent)


def _has_halves(model: ModelSpec) -> bool:
    """Whether it could be coupled of two; standard training also takes models that cannot."""
    try:
        halves_layout(model)
    except (CouplingError, WidthError):
        return False
    return True


def _result(shop: Workshop, trained: Trained, per_image: float) -> dict[str, Any]:
    last = trained.history[-1]
    return {
        "kind": "train",
        "top1": last.get("ema_top1", last["top1"]),
        "top5": last.get("ema_top5", last["top5"]),
        "loss": last.get("ema_loss", last["loss"]),
        "last": last,
        "best": trained.best,
        "images": trained.images,
        "training_flops": per_image * trained.images,
        "teacher_flops": shop.teacher.forward_flops * trained.images if shop.teacher else 0,
        "seconds": trained.seconds,
    }


def _keep(job: TrainJob, folder: Path, trained: Trained, result: dict[str, Any]) -> None:
    """The trained model; its average; what the method that widens it needs."""
    record = {"job": {"key": job.key, **job.content()}, "result": result}
    export(folded(trained.state.model), folder / MODEL, record=record, force=True)
    if trained.state.averaged is not None:
        export(folded(trained.state.averaged), folder / AVERAGE, record=record, force=True)
    if job.keeps:
        tensors, facts = trained.state.saved()
        kept = {"optimizer": ("optimizer/", facts["optimizer"]), "templates": ("model/", {})}
        prefix, others = kept[job.keeps]
        write_state(folder / KEPT, part(tensors, prefix), others)


def _start(job: TrainJob, shop: Workshop) -> Start:
    if job.initial is None:
        return initial_weights(job.task)
    tensors, facts = read_state(shop.store.folder(job.initial) / START)
    model = build_empty(job.model)
    model.load_state_dict(part(tensors, "model/"))
    moments = part(tensors, "optimizer/")
    return Start(
        model=model,
        optimizer=(moments, facts["optimizer"]) if moments else None,
    )


def _grow(job: GrowJob, shop: Workshop) -> dict[str, Any]:
    """Make the wide model's start, and see how good it is before any step."""
    began, kept = time.monotonic(), job.method.keeps
    parents = [
        Parent(model=load(folder / MODEL), kept=read_state(folder / KEPT) if kept else None)
        for folder in map(shop.store.folder, job.parents)
    ]
    device = torch_device(shop.machine, shop.world.local_rank)
    grown = job.method.grow(parents, job.model, _lab(job, shop, device))
    recipe = job.parents[0].task.recipe
    test = EvaluationBatches(
        shop.data,
        image_format(job.model, recipe, shop.data),
        batch_size=256,
        part=(shop.world.size, shop.world.rank),
        device=device,
        workers=shop.machine.workers,
    )
    scores = evaluate(grown.model.to(device), test, shop.world, nullcontext())
    tensors: dict[str, Tensor] = {f"model/{k}": v for k, v in grown.model.state_dict().items()}
    facts: dict[str, Any] = {}
    if grown.optimizer is not None:
        moments, facts["optimizer"] = grown.optimizer
        tensors |= {f"optimizer/{name}": tensor for name, tensor in moments.items()}
    if shop.world.is_main:
        write_state(shop.store.folder(job) / START, tensors, facts)
    return {
        "kind": "grow",
        "method": job.method.content(),
        **scores.to_json(),
        **grown.record,
        "images": job.images,
        "training_flops": own_flops(job, len(shop.data.train), shop.counter),
        "seconds": time.monotonic() - began,
    }


def _lab(job: GrowJob, shop: Workshop, device: torch.device) -> Lab:
    """Every process sees the same batches, and only the main one's result is used."""
    recipe = job.parents[0].task.recipe
    objective = Objective(recipe, None)
    batches = TrainingBatches(
        shop.data,
        recipe,
        image_format(job.model, recipe, shop.data),
        seed=job.seed,
        batch_size=recipe.batch_size,
        device=device,
        workers=shop.machine.workers,
    )
    return Lab(
        seed=job.seed,
        device=device,
        batches=lambda: (
            micro[0] for micro in batches.from_step(0, job.images // recipe.batch_size)
        ),
        loss=lambda model, batch: objective(model(batch.images), batch.images, batch.targets),
    )


def own_flops(job: Job, images: int, counter: CounterName) -> float:
    """FLOPs of this job alone: of the images it will really see, of a set of so many."""
    per_image = training_flops(forward_flops(job.model, counter=counter), 1, 1)
    if isinstance(job, GrowJob):
        return job.method.cost * per_image * job.images
    batch_size = job.task.recipe.batch_size
    return per_image * job.task.steps(images // batch_size) * batch_size


def flops_by_key(jobs: Iterable[Job], images: int, counter: CounterName) -> dict[str, float]:
    """FLOPs of each job alone."""
    return {job.key: own_flops(job, images, counter) for job in jobs}


def subtree_flops(job: Job, images: int, counter: CounterName) -> float:
    """FLOPs of this job and of everything it came from, each counted for every use."""
    return own_flops(job, images, counter) + sum(
        subtree_flops(parent, images, counter) for parent in job.parents
    )
