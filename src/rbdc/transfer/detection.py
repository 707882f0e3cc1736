"""Detection as a training problem: a detector, its batches and its scores."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

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
from rbdc.transfer.batches import DetectionBatch, DetectionBatches
from rbdc.transfer.coco import CocoSet
from rbdc.transfer.detector import Detector, DetectorSettings, build_detector
from rbdc.transfer.folder import save_detector
from rbdc.transfer.pictures import draw_sheet
from rbdc.transfer.samples import DetectionSamples, Views
from rbdc.transfer.scores import Results, results_of, score

VIT_DECAY = 0.7  # factor of the learning rate from a layer to the one before it, as in the paper
SHOWN = 8  # images on the sheet of predictions


@dataclass(frozen=True, kw_only=True, slots=True)
class Splits:
    """The training and validation images. The classes are those of the training images."""

    train: CocoSet
    val: CocoSet

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.train.class_names

    def to_json(self) -> dict[str, Any]:
        return {"train": self.train.to_json(), "val": self.val.to_json()}


def settings_of(recipe: DetectionRecipe) -> DetectorSettings:
    """Return the settings of a recipe's detector. Their fields have the same names."""
    return DetectorSettings(**{f.name: getattr(recipe, f.name) for f in fields(DetectorSettings)})


def views_of(recipe: DetectionRecipe) -> Views:
    """Return the augmentation of a recipe."""
    return Views(
        min_size=recipe.train_sizes or (recipe.min_size,),
        max_size=recipe.max_size,
        flip=recipe.flip,
        jitter=recipe.jitter,
        jitter_size=recipe.jitter_size,
    )


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

    def __init__(
        self,
        classifier: nn.Module,
        splits: Splits,
        recipe: DetectionRecipe,
        seed: int,
        *,
        identity: dict[str, Any],
        name: str,
        machine: Machine,
        world: World,
    ) -> None:
        """Prepare the batches. `identity` is everything that decides the result."""
        machine = settled(machine)
        self.classifier, self.splits, self.recipe, self.seed = classifier, splits, recipe, seed
        self.identity, self.name, self.machine, self.world = identity, name, machine, world
        self.epochs = recipe.epochs
        self.device = torch_device(machine, world.local_rank)
        batches = partial(
            DetectionBatches,
            device=self.device,
            workers=machine.workers or 0,
            part=(world.size, world.rank),
        )
        names = splits.class_names
        self.training = batches(
            DetectionSamples(splits.train, names, views=views_of(recipe), seed=seed),
            batch_size=recipe.batch_size,
            micro=recipe.grad_accum_steps,
        )
        self.val = batches(DetectionSamples(splits.val, names), batch_size=1)
        self.steps_per_epoch = self.training.steps_per_epoch
        self.steps = recipe.steps(self.steps_per_epoch)
        self.results = Results()  # results of the last evaluation, in rank 0

    def to_json(self) -> dict[str, Any]:
        return self.identity

    def state(self, *, fresh: bool) -> State:  # noqa: ARG002 - a checkpoint overwrites it
        """Return the state with the classifier's weights; other weights are drawn from the seed."""
        classes, settings = len(self.splits.class_names), settings_of(self.recipe)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(self.seed, "weights"))
            detector, self.weights = build_detector(
                self.classifier, classes=classes, settings=settings
            )
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

    def batches(self, start: int, stop: int) -> Iterator[Sequence[DetectionBatch]]:
        return self.training.from_step(start, stop)

    def image_name(self, index: int) -> str:
        return str(self.splits.train.pictures[index].location)

    def evaluate(self, model: nn.Module, autocast: AbstractContextManager[Any]) -> dict[str, float]:
        splits, mine = self.splits, Results()
        with torch.no_grad(), evaluating(model):
            for batch in self.val.once():
                with autocast:
                    outputs = model(batch.images)
                ids = [int(target["image_id"]) for target in batch.targets]
                mine += results_of(outputs, ids, splits.val, splits.class_names)
        gathered = self.world.gather(mine)

        def scores() -> dict[str, float]:
            self.results = sum(gathered, Results())
            found = score(splits.val.annotations, self.results)
            return {
                f"{kind}_m{name}": getattr(precision, name) or 0.0
                for kind, precision in (("box", found.boxes), ("mask", found.masks))
                for name in ("ap", "ap50", "ap75")
            }

        return self.world.broadcast(scores)

    def export(self, model: nn.Module, folder: Path) -> None:
        assert isinstance(model, Detector)
        settings = settings_of(self.recipe)
        save_detector(model, folder, self.classifier, settings, self.splits.class_names)

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
