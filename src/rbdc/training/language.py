"""Learn to predict the next token: a task, its text and its weights, as work for the loop."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from math import exp, log
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rbdc.coupling import block_sizes, evaluating
from rbdc.data import Batch, TextBatches, TextData, TextEvaluation, derive_seed
from rbdc.models import export, halves_layout
from rbdc.models.hub import TOKENIZER
from rbdc.settings import Machine
from rbdc.training.classification import Start, training_state
from rbdc.training.machine import settled, torch_device
from rbdc.training.objective import token_loss
from rbdc.training.problem import Problem
from rbdc.training.sharding import is_sharded
from rbdc.training.state import State
from rbdc.training.task import Task
from rbdc.training.world import World

SAMPLES, SAMPLE_TOKENS, PROMPT_TOKENS, TEMPERATURE = 2, 120, 16, 0.8  # of text at the end
EVALUATED_TOKENS = 2**14  # in a batch of the evaluation


class Language(Problem):
    """Train a task's model to predict the next token of a text."""

    primary_metric = "loss"

    def __init__(
        self,
        task: Task,
        data: TextData,
        start: Callable[[], Start],
        machine: Machine,
        world: World,
        *,
        blocks: int = 1,
    ) -> None:
        """Prepare the batches. `start` returns the initial weights, if there is no checkpoint.

        If `blocks` > 1, the norms of `blocks` x `blocks` blocks of each weight are logged.
        """
        machine = settled(machine)
        length = task.image.sequence_length
        self.task, self.start, self.machine = task, start, machine
        self.data = data.tested_at(length)
        self.world = world
        self.name, self.recipe, self.epochs = str(task.model), task.recipe, task.epochs
        self.device = torch_device(machine, world.local_rank)
        micro = task.recipe.grad_accum_steps
        self.training = TextBatches(
            data,
            seed=task.data_seed,
            batch_size=task.recipe.batch_size,
            length=length,
            micro_batches=(world.size * micro, range(world.rank * micro, (world.rank + 1) * micro)),
            device=self.device,
        )
        self.test = evaluation_batches(self.data, self.device, world)
        self.steps_per_epoch = self.training.steps_per_epoch
        self.steps = task.steps(self.steps_per_epoch)
        self.layout = halves_layout(task.model) if blocks > 1 else None
        self.blocks_a_side, self.has_blocks = blocks, self.layout is not None

    def to_json(self) -> dict[str, Any]:
        return self.task.to_json()

    def state(self, *, fresh: bool) -> State:
        state = training_state(
            self.task,
            self.start() if fresh else None,
            self.steps_per_epoch,
            device=self.device,
            machine=self.machine,
            world=self.world,
        )
        for model in state.models():
            record: Any = model.pretrained_cfg
            record[TOKENIZER] = self.data.tokenizer.files if self.data.tokenizer else None
        return state

    def batches(
        self, start: int, stop: int, stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[Sequence[Batch]]:
        return self.training.from_step(start, stop, stopped)

    def image_name(self, index: int) -> str:
        return self.data.train.name(index)

    def evaluate(
        self, models: Sequence[nn.Module], autocast: AbstractContextManager[Any]
    ) -> list[dict[str, float]]:
        return evaluate_text(models, self.test, self.world, autocast)

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write the model in transformers' layout."""
        export(model, folder, force=True)

    def blocks(self, weights: Mapping[str, Tensor]) -> Mapping[str, Sequence[Sequence[float]]]:
        assert self.layout is not None
        return block_sizes(weights, self.layout, self.blocks_a_side)

    def samples(self, model: nn.Module) -> dict[str, Any]:
        """Return texts that the model goes on with, each after the first tokens of a test text."""
        return {"samples": sample_texts(model, self.data, self.task.seed)}


def evaluation_batches(data: TextData, device: torch.device, world: World) -> TextEvaluation:
    """Return this process's test sequences."""
    size = max(1, EVALUATED_TOKENS // data.test.length)
    return TextEvaluation(data, batch_size=size, part=(world.size, world.rank), device=device)


@torch.no_grad()
def evaluate_text(
    models: Sequence[nn.Module],
    test: TextEvaluation,
    world: World,
    autocast: AbstractContextManager[Any],
) -> list[dict[str, float]]:
    """Return each model's loss (nats per token), perplexity and, if known, bits per byte."""
    sums = [[0.0, 0.0] for _ in models]  # tokens, loss
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(evaluating(model))
        for batch in test:
            for model, total in zip(models, sums, strict=True):
                with autocast:
                    logits = model(batch.images, use_cache=False).logits
                total[0] += batch.targets.numel()
                total[1] += float(token_loss(logits, batch.targets, reduction="sum"))
        for model in models if test.idle else ():  # forward passes of sharded models are collective
            for _ in range(test.idle if is_sharded(model) else 0):
                model(batch.images, use_cache=False)
    return [_scores(world.sum(total), test.data.bytes_per_token) for total in sums]


def _scores(total: Sequence[float], bytes_per_token: float | None) -> dict[str, float]:
    tokens, loss = total
    mean = loss / tokens
    scores = {"loss": mean, "perplexity": exp(min(mean, 700.0))}
    if bytes_per_token:
        scores["bits_per_byte"] = mean / log(2) / bytes_per_token
    return scores


@torch.no_grad()
def sample_texts(model: Any, data: TextData, seed: int) -> list[dict[str, str]]:
    """Continue a few test sequences; the same model and seed give the same texts."""
    if data.tokenizer is None:
        return []
    device, found = next(model.parameters()).device, []
    chosen = torch.linspace(0, len(data.test) - 1, SAMPLES).long()
    prompts = data.test.sequences(chosen)[:, : min(PROMPT_TOKENS, data.test.length)].to(device)
    with torch.random.fork_rng(devices=[]), evaluating(model):
        torch.manual_seed(derive_seed(seed, "samples"))
        tokens = prompts
        for _ in range(SAMPLE_TOKENS):
            context = tokens[:, -data.test.length :]
            logits = model(context, use_cache=False).logits[:, -1].float() / TEMPERATURE
            drawn = torch.multinomial(logits.softmax(dim=-1).cpu(), 1)
            tokens = torch.cat([tokens, drawn.to(device)], dim=1)
    for prompt, row in zip(prompts.tolist(), tokens.tolist(), strict=True):
        after = row[len(prompt) :]
        known = [token for token in after if token < data.tokenizer.vocab_size]
        found.append(
            {"prompt": data.tokenizer.decode(prompt), "text": data.tokenizer.decode(known)}
        )
    return found
