"""Detection as a training problem: a detector, its batches and its scores."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from timm.scheduler import CosineLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer

from rbdc.coupling import evaluating
from rbdc.data import derive_seed
from rbdc.settings import Machine
from rbdc.settings.detection import DetectionRecipe
from rbdc.training import World
from rbdc.training.machine import torch_device
from rbdc.training.optimizer import timm_optimizer
from rbdc.training.problem import Problem
from rbdc.training.state import State
from rbdc.transfer.backbone import ViTBackbone
from rbdc.transfer.batches import DetectionBatch, DetectionBatches
from rbdc.transfer.coco import CocoSet
from rbdc.transfer.detector import Detector, DetectorSettings, build_detector
from rbdc.transfer.folder import description, save_detector
from rbdc.transfer.groups import ParameterGroup, parameter_groups
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

    @property
    def fingerprints(self) -> dict[str, str]:
        return {"train": self.train.fingerprint, "val": self.val.fingerprint}

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


def groups_of(detector: Detector, recipe: DetectionRecipe) -> tuple[ParameterGroup, ...]:
    """Return the parameter groups. By default only a ViT has layer-wise decay."""
    usual = VIT_DECAY if isinstance(detector.backbone, ViTBackbone) else 1.0
    decay = usual if recipe.layer_decay is None else recipe.layer_decay
    return parameter_groups(detector, weight_decay=recipe.weight_decay, layer_decay=decay)


class Detection(Problem):
    """Train Mask R-CNN on a classifier's features."""

    primary_metric = "mask_map"
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
        self.classifier, self.splits, self.recipe, self.seed = classifier, splits, recipe, seed
        self.identity, self.name, self.machine, self.world = identity, name, machine, world
        self.epochs = recipe.epochs
        self.device = torch_device(machine, world.local_rank)
        common: dict[str, Any] = {
            "device": self.device,
            "workers": machine.workers,
            "part": (world.size, world.rank),
        }
        names = splits.class_names
        self.training = DetectionBatches(
            DetectionSamples(splits.train, names, views=views_of(recipe), seed=seed),
            batch_size=recipe.batch_size,
            micro=recipe.grad_accum_steps,
            **common,
        )
        self.val = DetectionBatches(DetectionSamples(splits.val, names), batch_size=1, **common)
        self.steps_per_epoch = self.training.steps_per_epoch
        self.steps = recipe.steps(self.steps_per_epoch)
        self.results = Results()  # results of the last evaluation, in rank 0

    def to_json(self) -> dict[str, Any]:
        return self.identity

    def state(self, *, fresh: bool) -> State:  # noqa: ARG002 - a checkpoint overwrites it
        """Return the state with the classifier's weights; other weights are drawn from the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(self.seed, "weights"))
            detector, self.weights = build_detector(
                self.classifier,
                classes=len(self.splits.class_names),
                settings=settings_of(self.recipe),
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
        groups = [group.to_torch() for group in groups_of(detector, self.recipe)]
        return timm_optimizer(groups, self.recipe, self.device)

    def _schedule(self, optimizer: Optimizer) -> CosineLRScheduler:
        """Return a schedule in updates: linear warm-up, then a cosine over the rest."""
        recipe = self.recipe
        warmup = min(recipe.warmup_updates(self.steps_per_epoch), self.steps // 2)
        return CosineLRScheduler(
            optimizer,
            t_initial=self.steps - warmup,
            lr_min=recipe.min_lr,
            warmup_t=warmup,
            warmup_lr_init=recipe.warmup_lr,
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
            parts = (("box", found.boxes), ("mask", found.masks))
            return {
                f"{kind}_{name}": value or 0.0
                for kind, ap in parts
                for name, value in (("map", ap.ap), ("map50", ap.ap50), ("map75", ap.ap75))
            }

        return self.world.broadcast(scores)

    def export(self, model: nn.Module, folder: Path) -> None:
        assert isinstance(model, Detector)
        about = description(self.classifier, settings_of(self.recipe), self.splits.class_names)
        save_detector(model, folder, about)

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
