"""Do one job: train or couple, and leave the result in the store."""

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from rbdc.budget import CounterName, forward_flops, training_flops
from rbdc.coupling import couple, layout_of, verify_coupling
from rbdc.data import DataSet, EvaluationBatches
from rbdc.disk import write_text
from rbdc.errors import CouplingError
from rbdc.models import build_empty, export, load
from rbdc.models.coupled import noise_image
from rbdc.recipes import Machine
from rbdc.training import Progress, Start, Trained, World, evaluate, initial_weights, train
from rbdc.training.checkpoint import read_state, write_state
from rbdc.training.machine import torch_device
from rbdc.training.state import part
from rbdc.training.task import image_format
from rbdc.training.teacher import Teacher
from rbdc.tree.jobs import CoupleJob, Job, TrainJob
from rbdc.tree.places import AVERAGE, MODEL, OPTIMIZER, PROGRESS, START
from rbdc.tree.store import Store
from rbdc.tree.transition import carried_optimizer

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


Observer = Callable[[Progress], None]


def execute(
    job: Job, shop: Workshop, *, observe: Observer, stopped: Callable[[], bool]
) -> dict[str, Any]:
    """Do the job, or find it done; its result. Parents must be finished."""
    result = shop.world.tell(lambda: shop.store.result(job))
    if result is not None:
        return result
    shop.world.tell(lambda: str(shop.store.begin(job)))
    if isinstance(job, CoupleJob):
        result = _couple(job, shop)
    else:
        result = _train(job, shop, observe, stopped)
    shop.world.tell(lambda: shop.store.finish(job, result))
    return result


def _train(
    job: TrainJob, shop: Workshop, observe: Observer, stopped: Callable[[], bool]
) -> dict[str, Any]:
    folder = shop.store.folder(job)
    before = subtree_flops(job, shop) - own_flops(job, shop)
    per_image = training_flops(_forward(job, shop), 1, 1)
    noted = [0.0]

    def note(progress: Progress) -> None:
        observe(progress)
        if progress.scores is not None or time.monotonic() - noted[0] > PROGRESS_SECONDS:
            noted[0] = time.monotonic()
            write_text(folder / PROGRESS, json.dumps(progress.to_json()))  # may be lost

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
        observe=note,
        stopped=stopped,
    )
    result = _result(shop, trained, per_image)
    if shop.world.is_main:
        _keep(job, folder, trained, result)
    return result


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
    """The trained model; its average; what a coupling carries over."""
    record = {"job": {"key": job.key, **job.content()}, "result": result}
    export(trained.state.model, folder / MODEL, record=record, force=True)
    if trained.state.averaged is not None:
        export(trained.state.averaged, folder / AVERAGE, record=record, force=True)
    if job.keeps_optimizer:
        tensors, facts = trained.state.saved()
        write_state(folder / OPTIMIZER, part(tensors, "optimizer/"), facts["optimizer"])


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


def _couple(job: CoupleJob, shop: Workshop) -> dict[str, Any]:
    """Couple, prove it, and see how good the wide model is before any step."""
    began = time.monotonic()
    folders = [shop.store.folder(parent) for parent in job.parents]
    first, second = (load(folder / MODEL) for folder in folders)
    wide = couple(first, second, into=build_empty(job.model), allow_inexact=job.allow_inexact)
    proof = verify_coupling(first, second, wide, noise_image(wide))
    if not (proof.holds or job.allow_inexact):
        raise CouplingError(
            f"the coupled {job.model} is {proof.error:.1e} off the mean of its parents",
            "Its layers cannot be kept apart by width; allow an inexact coupling to go on.",
        )
    recipe = job.parents[0].task.recipe
    image = image_format(job.model, recipe, shop.data)
    device = torch_device(shop.machine, shop.world.local_rank)
    test = EvaluationBatches(
        shop.data,
        image,
        batch_size=256,
        part=(shop.world.size, shop.world.rank),
        device=device,
        workers=shop.machine.workers,
    )
    scores = evaluate(wide.to(device), test, shop.world, nullcontext())
    tensors: dict[str, Tensor] = {f"model/{k}": v for k, v in wide.state_dict().items()}
    facts: dict[str, Any] = {}
    if job.transition.carries:
        left, right = (read_state(folder / OPTIMIZER) for folder in folders)
        moments, facts["optimizer"] = carried_optimizer(left, right, layout_of(first, wide))
        tensors |= {f"optimizer/{name}": tensor for name, tensor in moments.items()}
    if shop.world.is_main:
        write_state(shop.store.folder(job) / START, tensors, facts)
    return {
        "kind": "couple",
        "transition": job.transition.name,
        "top1": scores.top1,
        "top5": scores.top5,
        "loss": scores.loss,
        "proof_error": proof.error,
        "norm_drift": proof.drift,
        "exact": proof.holds,
        "seconds": time.monotonic() - began,
    }


def _forward(job: TrainJob, shop: Workshop) -> int:
    return forward_flops(job.model, counter=shop.counter)


def own_flops(job: TrainJob, shop: Workshop) -> float:
    """FLOPs of this training alone: of the images it will really see."""
    per_epoch = len(shop.data.train) // job.task.recipe.batch_size
    images = job.task.steps(per_epoch) * job.task.recipe.batch_size
    return training_flops(_forward(job, shop), 1, images)


def subtree_flops(job: Job, shop: Workshop) -> float:
    """FLOPs of this job and of everything it came from, each counted for every use."""
    own = own_flops(job, shop) if isinstance(job, TrainJob) else 0.0
    return own + sum(subtree_flops(parent, shop) for parent in job.parents)
