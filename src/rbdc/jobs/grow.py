"""Make the initial weights of a wide model from trained ones: couple two, or what a rival does."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rbdc.data import EvaluationBatches, TextBatches, TextData, TrainingBatches
from rbdc.jobs.job import FORMAT, Context, QuickJob
from rbdc.jobs.layout import MODEL, SAVED_FOR_GROWTH, START
from rbdc.jobs.method import GrowthContext, Method, Parent
from rbdc.jobs.train import TrainJob, bytes_of
from rbdc.models import ModelSpec, load
from rbdc.plan import forward_flops, training_flops
from rbdc.training import evaluate, images_for
from rbdc.training.checkpoint import read_state, write_state
from rbdc.training.clock import Spent
from rbdc.training.language import evaluate_text, evaluation_batches
from rbdc.training.machine import torch_device
from rbdc.training.objective import Objective, next_token_loss


@dataclass(frozen=True, kw_only=True)
class GrowJob(QuickJob):
    """Apply a growth method to trained parents, and evaluate the result before any step."""

    model: ModelSpec
    parents: tuple[TrainJob, ...]
    method: Method
    seed: int = 0
    """Seed of what the method draws."""
    images: int = 0
    """Training images that the method may look at, and pays for."""

    @property
    def metrics(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the metrics shown to people, those of the parents."""
        return self.parents[0].metrics

    def content(self) -> dict[str, Any]:
        return {
            "kind": "grow",
            "format": FORMAT,
            "model": self.model.to_json(),
            "parents": [parent.key for parent in self.parents],
            "method": self.method.content(),
            "seed": self.seed,
            "images": self.images,
        }

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "grow",
            "width": self.model.width,
            "method": self.method.content(),
            "metrics": list(self.metrics),
        }

    @property
    def label(self) -> str:
        """The method, the architecture and its width."""
        return f"{self.method.name}-{self.model.name}-w{self.model.width:g}"

    @property
    def size(self) -> str:
        return f"width {self.model.width:g}"

    @property
    def flops(self) -> float:
        """FLOPs of the images that the method looks at."""
        counter = self.parents[0].counter
        per_image = training_flops(forward_flops(self.model, counter=counter), 1, 1)
        return self.method.cost * per_image * self.images

    @property
    def model_bytes(self) -> int:
        return bytes_of(self.model)

    def result_bytes(self) -> int:
        """Return the bytes of the weights, and of two moments where they are carried over."""
        return self.model_bytes * (1 + 2 * bool(self.method.saved_for_growth))

    def run(self, context: Context) -> dict[str, Any]:
        """Grow the wide model, evaluate it before any step, and write where training starts."""
        began, saved = Spent.now(), self.method.saved_for_growth
        store, machine, world = context.store, context.machine, context.world
        parents = [
            Parent(
                model=load(folder / MODEL),
                saved_for_growth=read_state(folder / SAVED_FOR_GROWTH) if saved else None,
            )
            for folder in map(store.folder, self.parents)
        ]
        device = torch_device(machine, world.local_rank)
        grown = self.method.grow(parents, self.model, self._context(context, device))
        scores = self._evaluate(grown.model.to(device), context, device)
        tensors: dict[str, Tensor] = {f"model/{k}": v for k, v in grown.model.state_dict().items()}
        facts: dict[str, Any] = {}
        if grown.optimizer is not None:
            moments, facts["optimizer"] = grown.optimizer
            tensors |= {f"optimizer/{name}": tensor for name, tensor in moments.items()}
        if world.is_main:
            write_state(store.folder(self) / START, tensors, facts)
        return {
            "kind": "grow",
            "method": self.method.content(),
            "metrics": scores,
            **grown.record,
            "images": self.images,
            "training_flops": self.flops,
            **Spent.since(began).to_json(),
        }

    def _evaluate(
        self, model: nn.Module, context: Context, device: torch.device
    ) -> dict[str, float]:
        parent, world = self.parents[0], context.world
        if isinstance(parent.data, TextData):
            length = images_for(self.model, parent.task.image).sequence_length
            tokens = evaluation_batches(parent.data.tested_at(length), device, world)
            return evaluate_text([model], tokens, world, nullcontext())[0]
        test = EvaluationBatches(
            parent.data,
            images_for(self.model, parent.task.image),
            batch_size=256,
            part=(world.size, world.rank),
            device=device,
            workers=context.machine.workers or 0,
        )
        return evaluate([model], test, world, nullcontext())[0]

    def _context(self, context: Context, device: torch.device) -> GrowthContext:
        """Give every process the same batches; only the main one's result is used."""
        parent = self.parents[0]
        recipe = parent.task.recipe
        objective = Objective(recipe, None)
        if isinstance(parent.data, TextData):
            tokens = TextBatches(
                parent.data, seed=self.seed, batch_size=recipe.batch_size, device=device
            )
            steps = self.images // recipe.batch_size
            return GrowthContext(
                seed=self.seed,
                device=device,
                batches=lambda: (micro[0] for micro in tokens.from_step(0, steps)),
                loss=next_token_loss,
            )
        batches = TrainingBatches(
            parent.data,
            recipe,
            parent.task.image,
            seed=self.seed,
            batch_size=recipe.batch_size,
            device=device,
            workers=context.machine.workers or 0,
        )
        return GrowthContext(
            seed=self.seed,
            device=device,
            batches=lambda: (
                micro[0] for micro in batches.from_step(0, self.images // recipe.batch_size)
            ),
            loss=lambda model, batch: objective(model(batch.images), batch.images, batch.targets),
        )
