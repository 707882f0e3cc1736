"""Detection as a training problem: a detector, its batches and its scores."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from timm.optim import param_groups_layer_decay
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer

from rbdc.coupling import evaluating
from rbdc.data import derive_seed
from rbdc.settings import Machine
from rbdc.settings.detection import DetectionRecipe
from rbdc.training import World
from rbdc.training.machine import settled, torch_device
from rbdc.training.optimizer import timm_optimizer
from rbdc.training.problem import Problem
from rbdc.training.state import State
from rbdc.transfer.backbone import ViTBackbone
from rbdc.transfer.batches import DetectionBatch, DetectionBatches, DetectionSamples, make_transform
from rbdc.transfer.detector import Detector, build_detector
from rbdc.transfer.folder import save_detector
from rbdc.transfer.pictures import draw_sheet
from rbdc.transfer.scores import join_results, results_of, score

if TYPE_CHECKING:
    from rbdc.transfer.jobs import DetectJob

VIT_DECAY = 0.7  # factor of the learning rate from a layer to the one before it, as in the paper
SHOWN = 8  # images on the sheet of predictions


def groups_of(detector: Detector, recipe: DetectionRecipe) -> list[dict[str, Any]]:
    """Return timm's parameter groups, from the first layer to the heads.

    A layer's learning rate is `layer_decay` times that of the next: heads and pyramid have the full
    rate, the last block 0.7 times, and the patch embedding 0.7^13 times in a ViT of twelve blocks.
    The layers of a ResNet are its stages; by default only a ViT has layer-wise decay. Norms, biases
    and the position embedding have no weight decay.
    """
    usual = VIT_DECAY if isinstance(detector.backbone, ViTBackbone) else 1.0
    return param_groups_layer_decay(  # type: ignore[no-any-return]
        detector,
        weight_decay=recipe.weight_decay,
        no_weight_decay_list=["backbone.body.pos_embed"],
        layer_decay=usual if recipe.layer_decay is None else recipe.layer_decay,
    )


class Detection(Problem):
    """Train Mask R-CNN on a classifier's features."""

    primary_metric = "mask_map"
    fixed_shapes = False
    recipe: DetectionRecipe

    def __init__(self, job: "DetectJob", machine: Machine, world: World) -> None:
        machine = settled(machine)
        self.job, self.machine, self.world = job, machine, world
        self.recipe, self.splits, self.seed = job.recipe, job.splits, job.seed
        self.name = f"Mask R-CNN on {job.backbone.spec}"
        self.classifier = job.backbone.open(job.seed)
        self.device = torch_device(machine, world.local_rank)
        workers, part = machine.workers or 0, (world.size, world.rank)
        batches = partial(DetectionBatches, device=self.device, workers=workers, part=part)
        (train, val), names = self.splits, self.splits.class_names
        self.training = batches(
            samples=DetectionSamples(train, names, make_transform(self.recipe), self.seed),
            batch_size=self.recipe.batch_size,
            micro=self.recipe.grad_accum_steps,
        )
        self.val = batches(samples=DetectionSamples(val, names))
        self.steps_per_epoch = self.training.steps_per_epoch
        self.steps = self.recipe.steps(self.steps_per_epoch)
        self.epochs = self.steps / self.steps_per_epoch
        self.results = join_results([])  # results of the last evaluation, in rank 0

    def to_json(self) -> dict[str, Any]:
        return self.job.content()

    def state(self, *, fresh: bool) -> State:  # noqa: ARG002 - a checkpoint overwrites it
        """Return the state with the classifier's weights; other weights are drawn from the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(self.seed, "weights"))
            classes = len(self.splits.class_names)
            detector, self.weights = build_detector(self.classifier, classes, self.recipe)
        return State(
            detector,
            self.recipe,
            seed=self.seed,
            loss=_loss,
            make_optimizer=self._optimizer,
            make_schedule=self._schedule,
            device=self.device,
            machine=self.machine,
            world=self.world,
        )

    def _optimizer(self, detector: nn.Module) -> Optimizer:
        assert isinstance(detector, Detector)
        return timm_optimizer(groups_of(detector, self.recipe), self.recipe, self.device)

    def _schedule(self, optimizer: Optimizer) -> CosineLRScheduler:
        """Return a schedule in updates: linear warm-up, then a cosine over the rest."""
        warmup = min(self.recipe.warmup_updates(self.steps_per_epoch), self.steps // 2)
        return CosineLRScheduler(
            optimizer,
            t_initial=self.steps - warmup,
            lr_min=self.recipe.min_lr,
            warmup_t=warmup,
            warmup_lr_init=self.recipe.warmup_lr,
            warmup_prefix=True,
        )

    def batches(
        self,
        start: int,
        stop: int,
        stopped: Callable[[], bool] = lambda: False,  # noqa: ARG002 - waits for nobody
    ) -> Iterator[Sequence[DetectionBatch]]:
        return self.training.from_step(start, stop)

    def image_name(self, index: int) -> str:
        return str(self.splits.train.pictures[index].location)

    def evaluate(
        self, models: Sequence[nn.Module], autocast: AbstractContextManager[Any]
    ) -> list[dict[str, float]]:
        return [self._scores(model, autocast) for model in models]

    def _scores(self, model: nn.Module, autocast: AbstractContextManager[Any]) -> dict[str, float]:
        mine, (train, val) = [], self.splits
        with torch.no_grad(), evaluating(model):
            for batch in self.val.once():
                with autocast:
                    outputs = model(batch.images)
                ids = [int(target["image_id"]) for target in batch.targets]
                mine.append(results_of(outputs, ids, val, train.class_names))
        gathered = self.world.gather(join_results(mine))

        def scores() -> dict[str, float]:
            self.results = join_results(gathered)
            found = score(val.annotations, self.results)
            return {
                f"{kind}_m{name}": precision[name] or 0.0
                for kind, precision in (("box", found["boxes"]), ("mask", found["masks"]))
                for name in ("ap", "ap50", "ap75")
            }

        return self.world.broadcast(scores)

    def export(self, model: nn.Module, folder: Path) -> None:
        assert isinstance(model, Detector)
        save_detector(model, folder, self.classifier, self.recipe, self.splits.class_names)

    @torch.no_grad()
    def draw(self, model: nn.Module, path: Path) -> None:
        """Draw the model's predictions for some validation images, evenly chosen."""
        pictures, samples = self.splits.val.pictures, self.val.samples
        found = [number for number, picture in enumerate(pictures) if picture.regions]
        chosen = found[:: max(1, len(found) // SHOWN)][:SHOWN]
        images = [samples[0, number][0] for number in chosen]
        with evaluating(model):
            outputs = [
                {k: v.cpu() for k, v in model([image.to(self.device)])[0].items()}
                for image in images
            ]
        titles = [pictures[number].location.path.name for number in chosen]
        draw_sheet(images, outputs, self.splits.class_names, path, titles=titles)


def _loss(forward: Callable[..., dict[str, Tensor]], batch: DetectionBatch) -> Tensor:
    """Return the sum of the losses of proposals, boxes, classes and masks."""
    return torch.stack(list(forward(batch.images, batch.targets).values())).sum()
