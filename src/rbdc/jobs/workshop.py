"""The jobs of a tree: train one model, or grow it of others; and what each costs."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rbdc.coupling import check_slots
from rbdc.data import (
    DataSet,
    EvaluationBatches,
    ImageSet,
    TrainingBatches,
    check_batch_size,
    check_image_size,
)
from rbdc.data.augment import training_transform
from rbdc.errors import CouplingError, WidthError
from rbdc.jobs.execute import Workshop
from rbdc.jobs.job import GrowJob, Job, TrainJob
from rbdc.jobs.layout import AVERAGE, KEPT, MODEL, START
from rbdc.jobs.measure import faster_jobs, images_per_second
from rbdc.jobs.method import GrowthContext, Parent
from rbdc.jobs.tree import Node
from rbdc.models import ModelSpec, build_empty, export, halves_layout, load, shapes_of
from rbdc.models.templates import folded
from rbdc.plan import CounterName, Scaling, forward_flops, training_flops
from rbdc.training import Observer, Start, Trained, evaluate, initial_weights, train
from rbdc.training.checkpoint import read_state, write_state
from rbdc.training.machine import check_machine, torch_device
from rbdc.training.objective import Objective
from rbdc.training.optimizer import optimizer_slots
from rbdc.training.state import part
from rbdc.training.task import image_format
from rbdc.training.teacher import Teacher


@dataclass(frozen=True, kw_only=True)
class TreeWorkshop(Workshop):
    """What it takes to do a tree's jobs."""

    data: DataSet
    teacher: Teacher | None = None
    counter: CounterName = "fvcore+sdpa"

    def do(self, job: Job, observe: Observer, stopped: Callable[[], bool]) -> dict[str, Any]:
        if isinstance(job, GrowJob):
            return _grow(job, self)
        assert isinstance(job, TrainJob)
        return _train(job, self, observe, stopped)

    def flops(self, job: Job) -> float:
        return own_flops(job, len(self.data.train), self.counter)

    def check(self, jobs: Sequence[Job]) -> None:
        """The plan has already coupled the whole tree by shapes."""
        data, trainings = self.data, _trainings(jobs)
        for task in {job.task.recipe: job.task for job in trainings}.values():
            recipe = task.recipe
            shares = self.world.size * recipe.grad_accum_steps
            check_batch_size(len(data.train), recipe.batch_size, shares, mixes=recipe.mixes)
            if isinstance(data.train, ImageSet) and recipe.batched:
                check_image_size(data.train, image_format(task.model, recipe, data))
            optimizer_slots(recipe)
            training_transform(recipe, image_format(task.model, recipe, data))
        for job in trainings:
            if job.keeps == "optimizer":
                check_slots(optimizer_slots(job.task.recipe))
                break

    def check_device(self, jobs: Sequence[Job]) -> None:
        for recipe in {job.task.recipe for job in _trainings(jobs)}:
            check_machine(self.machine, recipe, self.world.local_rank)

    def scaling(self, job: Job) -> Scaling:
        """Its speed is measured."""
        assert isinstance(job, TrainJob)
        recipe = job.task.recipe
        speed, images = images_per_second(job.task, self.data, self.machine)
        return Scaling(
            batch_size=recipe.batch_size // recipe.grad_accum_steps,
            images_per_second=(speed,),
            gradient_bytes=(_model_bytes(job.model),),
            largest_share=None if torch_device(self.machine).type == "cpu" else images,
        )

    def needed_bytes(self, nodes: Sequence[Node], at_a_time: int | None) -> int:
        """Of the results that are still to come, and the checkpoints of the largest level."""
        results, checkpoints, largest = 0, 0, 0
        siblings = Counter(node.level for node in nodes if node.job.trains)
        for node in nodes:
            job = node.job
            assert isinstance(job, TrainJob | GrowJob)
            size = _model_bytes(job.model)
            largest = max(largest, size)
            if self.store.result(job):
                continue
            results -= self.store.bytes_of(job)
            if isinstance(job, TrainJob):
                task = job.task
                inner = size * max(1, task.templates)  # while it trains
                results += size * (2 + task.recipe.model_ema) + 2 * inner * bool(job.keeps)
                copies = 4 + task.recipe.model_ema  # weights, the best, two moments, average
                at_once = min(siblings[node.level], at_a_time or siblings[node.level])
                checkpoints = max(checkpoints, at_once * inner * copies * (self.machine.keep + 1))
            else:
                results += size * (1 + 2 * bool(job.method.keeps))
        return max(0, results + checkpoints) + largest

    def data_record(self) -> dict[str, Any]:
        return self.data.to_json()

    def decoders(self, jobs: Sequence[Job]) -> int:
        batched = _trainings(jobs)[0].task.recipe.batched
        return 0 if self.data.in_memory and batched else self.machine.workers

    def default_jobs(self, jobs: Sequence[Job], threads: int) -> int:
        """One on a GPU, and on a CPU what is faster."""
        leaves = [job for job in _trainings(jobs) if job.initial is None]
        on_cpu = torch_device(self.machine).type == "cpu"
        if self.world.size > 1 or len(leaves) == 1 or not on_cpu:
            return 1
        return faster_jobs(leaves[0].task, self.data, threads=threads, siblings=len(leaves))


def _trainings(jobs: Sequence[Job]) -> list[TrainJob]:
    return [job for job in jobs if isinstance(job, TrainJob)]


def _model_bytes(spec: ModelSpec) -> int:
    return sum(t.numel() * t.element_size() for t in shapes_of(spec).values())


def _train(
    job: TrainJob, shop: TreeWorkshop, observe: Observer, stopped: Callable[[], bool]
) -> dict[str, Any]:
    folder = shop.store.folder(job)
    counted = (len(shop.data.train), shop.counter)
    before = sum(subtree_flops(parent, *counted) for parent in job.parents)
    per_image = training_flops(forward_flops(job.model, counter=shop.counter), 1, 1)
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
        observe=observe,
        stopped=stopped,
    )
    result = _result(shop, trained, per_image)
    _keep(job, folder, trained, result, shop.world.is_main)
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


def _result(shop: TreeWorkshop, trained: Trained, per_image: float) -> dict[str, Any]:
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


def _keep(
    job: TrainJob, folder: Path, trained: Trained, result: dict[str, Any], writes: bool
) -> None:
    """The trained model; its average; what the method that widens it needs. Every process takes
    part, because each may have a part of the weights, and one writes."""
    record, state = {"job": {"key": job.key, **job.content()}, "result": result}, trained.state
    for place, model in ((MODEL, state.model), (AVERAGE, state.averaged)):
        plain = state.plain(model) if model is not None else None
        if plain is not None and writes:
            export(folded(plain), folder / place, record=record, force=True)
    if job.keeps:
        tensors, facts = state.saved()
        kept = {"optimizer": ("optimizer/", facts["optimizer"]), "templates": ("model/", {})}
        prefix, others = kept[job.keeps]
        if writes:
            write_state(folder / KEPT, part(tensors, prefix), others)


def _start(job: TrainJob, shop: TreeWorkshop) -> Start:
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


def _grow(job: GrowJob, shop: TreeWorkshop) -> dict[str, Any]:
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


def _lab(job: GrowJob, shop: TreeWorkshop, device: torch.device) -> GrowthContext:
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
    return GrowthContext(
        seed=job.seed,
        device=device,
        batches=lambda: (
            micro[0] for micro in batches.from_step(0, job.images // recipe.batch_size)
        ),
        loss=lambda model, batch: objective(model(batch.images), batch.images, batch.targets),
    )


def own_flops(job: Job, images: int, counter: CounterName) -> float:
    """FLOPs of this job alone: of the images it will really see, of a set of so many."""
    assert isinstance(job, TrainJob | GrowJob)
    per_image = training_flops(forward_flops(job.model, counter=counter), 1, 1)
    if isinstance(job, GrowJob):
        return job.method.cost * per_image * job.images
    batch_size = job.task.recipe.batch_size
    return per_image * job.task.steps(images // batch_size) * batch_size


def subtree_flops(job: Job, images: int, counter: CounterName) -> float:
    """FLOPs of this job and of everything it came from, each counted for every use."""
    return own_flops(job, images, counter) + sum(
        subtree_flops(parent, images, counter) for parent in job.parents
    )
