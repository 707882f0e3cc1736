"""One session of a training: its steps, evaluations, logs and checkpoints.

Everything random is a function of the problem's seeds and the step, and everything else is in the
checkpoint. So a training that is stopped and resumed at any step ends with the same bits. `loop`
gives the batches to one session, or to several that train on the same ones.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from rbdc.errors import TrainingError
from rbdc.metrics import find_metric
from rbdc.settings import Machine
from rbdc.training.checkpoint import latest_checkpoint, save_checkpoint
from rbdc.training.clock import Spent
from rbdc.training.logs import Logs
from rbdc.training.machine import read_facts, set_backends, settled
from rbdc.training.problem import Problem
from rbdc.training.progress import Observer, Progress, Trained
from rbdc.training.sharding import full_tensor
from rbdc.training.state import select_prefix
from rbdc.training.world import World

CHECKPOINTS, BEST = "checkpoints", "best"
# assumed until the first save: trainings of a few seconds save no checkpoints
FIRST_SAVE_SECONDS = 0.05
LOGGED_STEPS, BOARD_STEPS = 1000, 100  # steps in log.jsonl and TensorBoard, evenly spaced
LOGGED_BLOCKS = 100  # how often a training logs the norms of weight blocks


class Session:
    """One session of a training, which begins at its start or at the last checkpoint."""

    def __init__(
        self,
        problem: Problem,
        folder: Path,
        *,
        machine: Machine,
        world: World,
        flops: tuple[float, float] = (0.0, 0.0),
        observe: Observer = lambda _progress: None,
        resume_at: int | None = None,
    ) -> None:
        """Prepare to train `problem` in `folder`, or to continue it there.

        FLOPs are only logged: `flops` are those spent on the parents, and those of one image. The
        session begins at the last checkpoint, or at that of the step `resume_at`.
        """
        if machine.threads:
            torch.set_num_threads(machine.threads)
        machine, device = settled(machine), read_facts(machine.device).device
        set_backends(machine, device, fixed_shapes=problem.fixed_shapes)
        self.problem, self.folder, self.machine = problem, folder, machine
        self.world, self.observe, self.flops = world, observe, flops
        self.steps, self.steps_per_epoch = problem.steps, problem.steps_per_epoch
        # those that resume at a common step keep the one before, until all have saved
        self.keep = machine.keep if resume_at is None else max(2, machine.keep)
        saved = self._saved(resume_at)
        self.state = problem.state(fresh=not saved)
        self.history: list[dict[str, Any]] = []
        self.best: dict[str, Any] = {}
        self.best_weights: dict[str, Tensor] = {}
        self.losses: list[float] = []  # losses of this epoch's steps so far
        self.spent_before, self.decoded = Spent(), 0  # spent in earlier sessions
        # step, image indices, loss on the device
        self.pending: list[tuple[int, list[Tensor], Tensor]] = []
        if saved:
            self._restore(*saved)
        self.logs = (
            Logs(
                folder,
                step=self.state.step,
                gflops=int(self._flops() / 1e9),
                tensorboard=machine.tensorboard,
            )
            if world.is_main
            else None
        )
        self.first_step = self.state.step
        self.saved_at = self.reported_at = time.monotonic()
        self.save_seconds = FIRST_SAVE_SECONDS
        self.spent, self.waited = Spent(), 0.0  # of this session; seconds waited for batches
        self.since, self.speed = (self.state.step, 0.0), 0.0  # of this epoch; images/s
        # reading a loss waits for the GPU
        self.check_every = 1 if self.state.device.type == "cpu" else 16
        self.log_every, self.board_every = (
            max(1, self.steps // number) for number in (LOGGED_STEPS, BOARD_STEPS)
        )
        if self.state.step == 0:
            self._log_blocks()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if self.logs:
            self.logs.close()
        if isinstance(error, torch.OutOfMemoryError):
            raise self.explain(error) from error

    def explain(self, error: torch.OutOfMemoryError) -> TrainingError:
        """Return what to do about a device without enough memory."""
        recipe = self.problem.recipe
        images = recipe.batch_size // self.world.size // recipe.grad_accum_steps
        return TrainingError(
            f"the device has no memory for {self.problem.name} with {images} images at a time: "
            f"{error}",
            "Use more micro-batches (--grad-accum-steps), --amp, --recompute, or more processes.",
        )

    @property
    def finished(self) -> bool:
        """Return whether all steps are done."""
        return self.state.step == self.steps

    @property
    def ends_epoch(self) -> bool:
        """Return whether an epoch, maybe an incomplete last one, ends with the last step."""
        return self.state.step % self.steps_per_epoch == 0 or self.finished

    @property
    def evaluates(self) -> bool:
        """Return whether the recipe asks for an evaluation after the last step."""
        epoch = -(-self.state.step // self.steps_per_epoch)
        return self.ends_epoch and (epoch % self.problem.recipe.eval_epochs == 0 or self.finished)

    @contextmanager
    def timed(self, share: float = 1.0) -> Iterator[None]:
        """Add a share of the time inside the context to what this training has spent."""
        began = Spent.now()
        try:
            yield
        finally:
            self.spent += Spent.since(began) * share

    def wait(self, spent: Spent) -> None:
        """Note the time that this training has waited for its batch."""
        self.spent += spent
        self.waited += spent.elapsed

    def note(self, micro: Sequence[Any], loss: Tensor) -> None:
        """Check and log the step that was just taken."""
        done = self.state.step
        self.pending.append((done - 1, [batch.indices for batch in micro], loss))
        if len(self.pending) >= self.check_every:
            self.check_losses()
            self._report()
        if done % self.log_every == 0:
            self._log_step(board=done % self.board_every == 0)

    def models(self) -> dict[str, nn.Module]:
        """Return the models to evaluate, by the prefix of their scores."""
        found = {"": self.state.model, "ema_": self.state.ema_model}
        return {prefix: model for prefix, model in found.items() if model is not None}

    def end_epoch(self, scores: Mapping[str, float] | None) -> None:
        """Log the scores of the evaluation after this epoch, if there was one."""
        losses, self.losses = self.losses, []
        if scores is not None:
            self._log_epoch(losses, scores)

    def save(self) -> None:
        """Save a checkpoint, if there is anything new."""
        if self.state.step > self.first_step:
            self._save()

    def finish(self) -> Trained:
        """Write the best model to `folder/best`, and return the result."""
        self._check_weights()
        best = self.state.unsharded(self.state.best_model(), self.best_weights)
        if self.world.is_main:
            self.problem.export(best, self.folder / BEST)
        return Trained(
            state=self.state,
            history=self.history,
            best=self.best,
            images=self.steps * self.problem.recipe.batch_size,
            decoded=self.decoded,
            spent=self._all_spent(),
        )

    def _check_weights(self) -> None:
        """Refuse weights that are not finite. Gradients can overflow while the loss is finite."""
        self.check_losses()
        if not self.state.is_finite():
            raise TrainingError(
                f"weights are not finite after step {self.state.step - 1}, though the loss was",
                "The last good checkpoint is kept. Try a lower learning rate, or clip-grad.",
            )

    def check_losses(self) -> None:
        """Read the losses of the last steps. A loss that is not finite ends the training."""
        if not self.pending:
            return
        losses = torch.stack([loss for _, _, loss in self.pending]).tolist()
        for (step, images, _), loss in zip(self.pending, losses, strict=True):
            if not isfinite(loss):
                indices = torch.cat(images)
                names = [self.problem.image_name(int(index)) for index in indices[:4]]
                raise TrainingError(
                    f"the loss is {loss} at step {step} (epoch {step // self.steps_per_epoch}), "
                    f"images {', '.join(names)}, ... ({len(indices)} in the batch: "
                    f"{', '.join(map(str, indices.tolist()[:16]))}, ...)",
                    "The last good checkpoint is kept. Try a lower learning rate, clip-grad, or "
                    "no float16; if one image causes it, remove the image.",
                )
            self.losses.append(loss)
        self.pending.clear()

    def _log_epoch(self, losses: Sequence[float], scores: Mapping[str, float]) -> None:
        step = self.state.step
        epoch = -(-step // self.steps_per_epoch)  # an incomplete last epoch counts as one
        row: dict[str, Any] = {
            "epoch": step / self.steps_per_epoch,
            "step": step,
            "train_loss": sum(losses) / len(losses),  # of rank 0's micro-batches
            "lr": self.state.learning_rate,
            **scores,
            "flops": self._flops(),
            "images_per_second": self._speed(),
            "seconds": self._all_spent().elapsed,
        }
        self.history.append(row)
        metric = find_metric(self.problem.primary_metric)
        value = row.get(f"ema_{metric.name}", row[metric.name])
        if not self.best or metric.is_better(value, self.best[metric.name]):
            self.best = {"step": step, "epoch": row["epoch"], metric.name: value}
            weights = self.state.best_model().state_dict()
            self.best_weights = {name: tensor.clone() for name, tensor in weights.items()}
        if self.logs:
            self.logs.epoch(self.history, ["train_loss", *scores])
        if epoch % max(1, round(self.problem.epochs) // LOGGED_BLOCKS) == 0 or step == self.steps:
            self._log_blocks()
        self.since = (step, self.spent.elapsed)
        self._report(scores)

    @property
    def due(self) -> bool:
        """Return whether a checkpoint is due after the last step."""
        elapsed = time.monotonic() - self.saved_at
        epoch = self.state.step // self.steps_per_epoch
        return elapsed > 60 * self.machine.checkpoint_minutes or (
            self.ends_epoch
            and epoch % self.machine.checkpoint_epochs == 0
            and self.save_seconds <= self.machine.checkpoint_share * elapsed
        )

    def _save(self) -> None:
        self._check_weights()  # never save weights that are not finite
        began = time.monotonic()
        if self.logs:
            self.logs.flush()
        tensors, facts = self.state.saved()
        best = {f"best/{name}": full_tensor(tensor) for name, tensor in self.best_weights.items()}
        if self.world.is_main:
            facts |= {
                "task": self.problem.to_json(),
                "history": self.history,
                "best": self.best,
                "losses": self.losses,
                "decoded": self.decoded,
                "seconds": self._all_spent().elapsed,
                "cpu_seconds": self._all_spent().cpu,
            }
            save_checkpoint(
                self.folder / CHECKPOINTS, self.state.step, tensors | best, facts, keep=self.keep
            )
        self.saved_at = time.monotonic()
        self.save_seconds = self.saved_at - began

    def _saved(self, resume_at: int | None) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return the last checkpoint, and check that every process reads the same one."""
        found = latest_checkpoint(self.folder / CHECKPOINTS, resume_at)
        step = found[1]["step"] if found else None
        same = self.world.broadcast(lambda: step) == step
        assert same, "processes read different checkpoints"
        return found

    def _restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        task = json.loads(json.dumps(self.problem.to_json()))  # tuples become lists
        assert facts["task"] == task, "a checkpoint of another task"
        self.state.restore(tensors, facts)
        self.history, self.best = facts["history"], facts["best"]
        self.best_weights = select_prefix(tensors, "best/")
        self.losses, self.decoded = facts["losses"], facts["decoded"]
        # checkpoints of older versions have no CPU time; with one thread it was about the same
        self.spent_before = Spent(facts["seconds"], facts.get("cpu_seconds", facts["seconds"]))

    def _report(self, scores: Mapping[str, float] | None = None) -> None:
        now = time.monotonic()
        if not self.world.is_main or (scores is None and now - self.reported_at < 0.25):
            return
        self.reported_at = now
        self.observe(
            Progress(
                step=self.state.step,
                steps=self.steps,
                epoch=(self.state.step - 1) // self.steps_per_epoch,
                epochs=self.problem.epochs,
                batch_size=self.problem.recipe.batch_size,
                loss=self.losses[-1] if self.losses else self.history[-1]["train_loss"],
                lr=self.state.learning_rate,
                images_per_second=self._speed(),
                seconds=self._all_spent().elapsed,
                waited=self.waited / max(self.spent.elapsed, 1e-9),
                workers=self.machine.workers or 0,
                scores=scores,
            )
        )

    def _log_step(self, *, board: bool) -> None:
        if self.logs:
            self.check_losses()
            self.logs.step(
                {
                    "step": self.state.step,
                    "epoch": self.state.step / self.steps_per_epoch,
                    "loss": self.losses[-1],
                    "lr": self.state.learning_rate,
                    "flops": self._flops(),
                    "images_per_second": self._speed(),
                    "seconds": self._all_spent().elapsed,
                },
                board=board,
            )

    def _log_blocks(self) -> None:
        if not self.problem.has_blocks:
            return
        weights = self.state.weights(self.state.model)
        if self.logs:
            self.logs.blocks(
                {
                    "step": self.state.step,
                    "epoch": self.state.step / self.steps_per_epoch,
                    "flops": self._flops(),
                },
                self.problem.blocks(weights),
            )

    def _flops(self) -> float:
        before, per_image = self.flops
        return before + per_image * self.state.step * self.problem.recipe.batch_size

    def _speed(self) -> float:
        step, since = self.since
        done = (self.state.step - step) * self.problem.recipe.batch_size
        if done:
            self.speed = done / max(self.spent.elapsed - since, 1e-9)
        return self.speed

    def _all_spent(self) -> Spent:
        return self.spent_before + self.spent
