"""Where detectors are trained: one job's work, what it costs, and what it leaves behind."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rbdc.disk import write_json
from rbdc.errors import RunError
from rbdc.jobs.execute import Workshop
from rbdc.jobs.job import Job
from rbdc.jobs.layout import AVERAGE, MODEL, PREDICTIONS, SCORES, SHEET, WEIGHTS
from rbdc.jobs.tree import Node
from rbdc.models import ModelSpec, build_empty
from rbdc.plan import Hardware, Scaling, training_flops
from rbdc.settings.detection import DetectionRecipe
from rbdc.training import Observer, Trained
from rbdc.training.loop import run_training
from rbdc.training.machine import check_machine
from rbdc.training.optimizer import optimizer_slots
from rbdc.transfer.batches import check_shares
from rbdc.transfer.detection import Detection, Splits, settings_of, views_of
from rbdc.transfer.detector import DetectorCost, build_detector, detector_cost
from rbdc.transfer.jobs import DetectJob
from rbdc.transfer.scores import score

BYTES_PER_WEIGHT = 4


@dataclass(frozen=True, kw_only=True)
class DetectionWorkshop(Workshop):
    """What it takes to train detectors."""

    splits: Splits

    def do(self, job: Job, observe: Observer, stopped: Callable[[], bool]) -> dict[str, Any]:
        assert isinstance(job, DetectJob)
        folder, world, per_image = self.store.folder(job), self.world, self._image_flops(job)
        work = Detection(
            job.backbone.open(job.seed),
            self.splits,
            job.recipe,
            job.seed,
            identity=job.content(),
            name=f"Mask R-CNN on {job.backbone.spec}",
            machine=self.machine,
            world=world,
        )
        trained = run_training(
            work,
            folder,
            machine=self.machine,
            world=world,
            flops_per_image=per_image,
            observe=observe,
            stopped=stopped,
        )
        result = {
            "kind": "detect",
            "backbone": job.backbone.name,
            "seed": job.seed,
            "best": trained.best,
            "images": trained.images,
            "training_flops": per_image * trained.images,
            "seconds": trained.seconds,
        }
        return world.broadcast(lambda: result | self._keep(work, trained, folder))

    def _keep(self, work: Detection, trained: Trained, folder: Path) -> dict[str, Any]:
        """The detector, its predictions and their scores, pictures of them, and what became of the
        classifier's weights."""
        state = trained.state
        work.keep(state.model, folder / MODEL)
        if state.averaged is not None:
            work.keep(state.averaged, folder / AVERAGE)
        work.draw(state.best_model(), folder / SHEET)
        work.results.write(folder / PREDICTIONS)
        write_json(folder / WEIGHTS, work.weights.to_json())
        scores = score(self.splits.val.annotations, work.results, by_class=True)
        write_json(folder / SCORES, scores.to_json())
        maps = {"box_map": scores.boxes.ap, "mask_map": scores.masks.ap}
        return {**maps, "scores": scores.to_json()}

    def flops(self, job: Job) -> float:
        assert isinstance(job, DetectJob)
        batch_size = job.recipe.batch_size
        steps = job.recipe.steps(len(self.splits.train.pictures) // batch_size)
        return self._image_flops(job) * steps * batch_size

    def cost(self, job: DetectJob) -> DetectorCost:
        """Of the whole detector, on an image of the largest size it is given."""
        return _cost(job.backbone.spec, len(job.class_names), job.recipe)

    def _image_flops(self, job: DetectJob) -> float:
        return training_flops(self.cost(job).total_flops, 1, 1)

    def check(self, jobs: Sequence[Job]) -> None:
        if self.machine.parallel == "fsdp":
            raise RunError(
                "a detector's processes each need all its weights: what they compute differs",
                "Use --parallel ddp.",
            )
        for job in jobs:
            assert isinstance(job, DetectJob)
            recipe, world = job.recipe, self.world
            shares = world.size * recipe.grad_accum_steps
            check_shares(len(self.splits.train.pictures), recipe.batch_size, shares)
            views_of(recipe).transform()
            optimizer_slots(recipe)
            self.cost(job)  # builds it, without weights

    def check_device(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            assert isinstance(job, DetectJob)
            check_machine(self.machine, job.recipe, self.world.local_rank)

    def scaling(self, job: Job) -> Scaling:
        """Its speed is assumed, from FLOPs."""
        assert isinstance(job, DetectJob)
        recipe = job.recipe
        return Scaling(
            batch_size=recipe.batch_size // recipe.grad_accum_steps,
            images_per_second=(Hardware().flops_per_second / self._image_flops(job),),
            gradient_bytes=(BYTES_PER_WEIGHT * self.cost(job).total_parameters,),
        )

    def needed_bytes(self, nodes: Sequence[Node], at_a_time: int | None) -> int:
        needed, largest = 0, 0
        for node in nodes:
            job = node.job
            assert isinstance(job, DetectJob)
            size = BYTES_PER_WEIGHT * self.cost(job).total_parameters
            largest = max(largest, size * (4 + job.recipe.model_ema) * (self.machine.keep + 1))
            if not self.store.result(job):
                needed += size * (2 + job.recipe.model_ema) - self.store.bytes_of(job)
        return max(0, needed + largest * (at_a_time or 1))

    def data_record(self) -> dict[str, Any]:
        return self.splits.to_json()


@cache
def _cost(spec: ModelSpec, classes: int, recipe: DetectionRecipe) -> DetectorCost:
    detector, _ = build_detector(build_empty(spec), classes=classes, settings=settings_of(recipe))
    return detector_cost(detector, recipe.min_size, recipe.max_size)
