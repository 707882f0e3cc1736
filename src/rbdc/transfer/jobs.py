"""The job of training a detector on a backbone."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rbdc.data import derive_seed
from rbdc.disk import sha256_of, write_json
from rbdc.errors import RunError
from rbdc.jobs.job import FORMAT, Context, TrainingJob
from rbdc.jobs.layout import AVERAGE, MODEL, PREDICTIONS, RUN, SCORES, SHEET, WEIGHTS
from rbdc.models import ModelSpec, build, build_empty, spec_of
from rbdc.models.folder import weights_in
from rbdc.plan import Hardware, Scaling, training_flops
from rbdc.settings import Machine
from rbdc.settings.detection import DetectionRecipe
from rbdc.training import Observer, Session, Trained
from rbdc.training.machine import check_machine
from rbdc.training.optimizer import optimizer_slots
from rbdc.transfer.batches import check_micro_batches, make_transform
from rbdc.transfer.coco import Splits
from rbdc.transfer.detection import Detection
from rbdc.transfer.detector import DetectorCost, build_detector, detector_cost
from rbdc.transfer.scores import score, write_results
from rbdc.transfer.weights import open_classifier

SCRATCH = "scratch:"


@dataclass(frozen=True, kw_only=True)
class Backbone:
    """A classifier to build a detector on, and where its weights are."""

    name: str
    place: Path
    sha256: str
    """Checksum of its weights; empty: random weights."""
    spec: ModelSpec
    mean: tuple[float, ...]
    std: tuple[float, ...]
    how: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `open_classifier` for a weight file."""

    def open(self, seed: int) -> nn.Module:
        """Load the classifier, or draw random weights from the seed."""
        if self.sha256:
            return open_classifier(self.place, **self.how)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(seed, "backbone"))
            classifier: Any = build(self.spec)
        classifier.pretrained_cfg.update(mean=self.mean, std=self.std)
        return classifier  # type: ignore[no-any-return]

    def content(self) -> dict[str, Any]:
        """Return everything that decides a detector's result."""
        return {
            "sha256": self.sha256,
            "spec": self.spec.to_json(),
            "mean": list(self.mean),
            "std": list(self.std),
        }


def find_backbone(path: str, **how: Any) -> Backbone:
    """Find a classifier: an exported folder, a run of `rbdc train`, or a weight file.

    A weight file needs its architecture's name. `scratch:PATH` is the same architecture with random
    weights, as a baseline.
    """
    trained = not path.startswith(SCRATCH)
    place = Path(path.removeprefix(SCRATCH))
    if (place / RUN).exists() and (place / MODEL).is_dir():
        place = place / MODEL
    classifier = open_classifier(place, **how)
    record: Any = classifier.pretrained_cfg
    return Backbone(
        name=path,
        place=place,
        sha256=sha256_of(weights_in(place) if place.is_dir() else place) if trained else "",
        spec=spec_of(classifier),
        mean=tuple(record["mean"]),
        std=tuple(record["std"]),
        how={key: value for key, value in how.items() if value is not None},
    )


@dataclass(frozen=True, kw_only=True)
class DetectJob(TrainingJob):
    """Train a detector on a backbone, and score it as COCO does."""

    parents = ()
    metrics = ("mask_map", "box_map")
    backbone: Backbone
    recipe: DetectionRecipe
    seed: int
    splits: Splits = field(repr=False, compare=False)

    def content(self) -> dict[str, Any]:
        return {
            "kind": "detect",
            "format": FORMAT,
            "backbone": self.backbone.content(),
            "recipe": self.recipe.to_json(),
            "seed": self.seed,
            "data": {"train": self.splits.train.fingerprint, "val": self.splits.val.fingerprint},
            "class_names": list(self.splits.class_names),
        }

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "detect",
            "backbone": self.backbone.name,
            "epochs": self.recipe.steps(self.steps_per_epoch) / self.steps_per_epoch,
            "seed": self.seed,
            "width": self.backbone.spec.width,
            "metrics": list(self.metrics),
        }

    @property
    def label(self) -> str:
        """The backbone's architecture and its width."""
        return f"detect-{self.backbone.spec.name}-w{self.backbone.spec.width:g}"

    @property
    def steps_per_epoch(self) -> int:
        """Updates per pass over the training images; too large a batch is refused by `check`."""
        return max(1, len(self.splits.train.pictures) // self.recipe.batch_size)

    @property
    def cost(self) -> DetectorCost:
        """The whole detector on an image of the largest size it is given."""
        return _cost(self.backbone.spec, len(self.splits.class_names), self.recipe)

    @property
    def image_flops(self) -> float:
        """FLOPs of training on one image."""
        return training_flops(self.cost.total_flops, 1, 1)

    @property
    def flops(self) -> float:
        """FLOPs of the whole training."""
        steps = self.recipe.steps(self.steps_per_epoch)
        return self.image_flops * steps * self.recipe.batch_size

    @property
    def model_bytes(self) -> int:
        """Bytes of the detector's weights."""
        return 4 * self.cost.total_parameters

    def result_bytes(self) -> int:
        """Return the bytes of the last and the best detector, and of the EMA's."""
        return self.model_bytes * (2 + self.recipe.model_ema)

    def checkpoint_bytes(self, machine: Machine) -> int:
        """Return the bytes of checkpoints: weights, best weights, two moments, EMA weights."""
        return self.model_bytes * (4 + self.recipe.model_ema) * (machine.keep + 1)

    def check(self, machine: Machine, processes: int) -> None:
        """Refuse sharded weights, a batch that does not divide, and what cannot be built."""
        if machine.parallel == "fsdp":
            raise RunError(
                "a detector's processes each need all its weights: what they compute differs",
                "Use --parallel ddp.",
            )
        recipe = self.recipe
        micro_batches = processes * recipe.grad_accum_steps
        check_micro_batches(len(self.splits.train.pictures), recipe.batch_size, micro_batches)
        make_transform(recipe)
        optimizer_slots(recipe)
        _ = self.cost  # builds it, without weights

    def check_device(self, machine: Machine, local_rank: int = 0) -> None:
        check_machine(machine, self.recipe, local_rank)

    def measure_scaling(self, machine: Machine) -> Scaling:  # noqa: ARG002
        """Return the speed that the FLOPs suggest; it is assumed, not measured."""
        recipe = self.recipe
        return Scaling(
            batch_size=recipe.batch_size // recipe.grad_accum_steps,
            images_per_second=(Hardware().flops_per_second / self.image_flops,),
            gradient_bytes=(self.model_bytes,),
        )

    def session(self, context: Context, observe: Observer, resume_at: int | None = None) -> Session:
        return Session(
            Detection(self, context.machine, context.world),
            context.store.folder(self),
            machine=context.machine,
            world=context.world,
            flops=(0.0, self.image_flops),
            observe=observe,
            resume_at=resume_at,
        )

    def finish(self, context: Context, session: Session, trained: Trained) -> dict[str, Any]:
        """Leave the detector with predictions, scores and pictures in its folder."""
        result = {
            "kind": "detect",
            "backbone": self.backbone.name,
            "seed": self.seed,
            "best": trained.best,
            "images": trained.images,
            "decoded": trained.decoded,
            "training_flops": self.image_flops * trained.images,
            **trained.spent.to_json(),
        }
        problem, folder = session.problem, context.store.folder(self)
        assert isinstance(problem, Detection)
        return context.world.broadcast(lambda: result | self._save(problem, trained, folder))

    def _save(self, problem: Detection, trained: Trained, folder: Path) -> dict[str, Any]:
        """Write the detector, its predictions with scores and pictures, and the weight report."""
        state = trained.state
        problem.export(state.model, folder / MODEL)
        if state.ema_model is not None:
            problem.export(state.ema_model, folder / AVERAGE)
        problem.draw(state.best_model(), folder / SHEET)
        write_results(problem.results, folder / PREDICTIONS)
        write_json(folder / WEIGHTS, asdict(problem.weights))
        scores = score(self.splits.val.annotations, problem.results)
        write_json(folder / SCORES, scores)
        maps = {"mask_map": scores["masks"]["ap"], "box_map": scores["boxes"]["ap"]}
        return {"metrics": maps, "scores": scores}


@cache
def _cost(spec: ModelSpec, classes: int, recipe: DetectionRecipe) -> DetectorCost:
    detector, _ = build_detector(build_empty(spec), classes, recipe)
    return detector_cost(detector, recipe.min_size, recipe.max_size)
