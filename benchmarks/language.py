"""Compare the speed of our training loop on tokens with a plain PyTorch loop's, as in nanoGPT.

    python benchmarks/language.py                      # gpt-demo's model, one thread
    python benchmarks/language.py --width 0.25         # one of its leaves
    python benchmarks/language.py --threads 2

Ours is `rbdc.training.train` as a run calls it: its checks of every loss, logs and TensorBoard
included. The plain loop draws random positions of the same tokens, runs the same model of
transformers from the same weights, takes cross-entropy, clips the gradient's norm, steps a fused
AdamW with a cosine schedule, and reads the loss every ten steps. Equal are model, batch, sequence
length, threads, optimizer settings and fp32. They take turns in one process; the first steps of a
turn are not timed. `--cpu` counts CPU time, for a machine that does other things. Printed is our
tokens per second over theirs: the median of the turns, with the least and the largest. Expected:
1.0 or more.
"""

import argparse
import math
import statistics
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from rbdc.data import TextData
from rbdc.errors import Interrupted
from rbdc.experiments.train import prepare
from rbdc.settings import Machine, read_recipe, split_settings
from rbdc.training import Session, Task, World, initial_weights, train
from rbdc.training.problems import make_problem

WARM = 8  # steps of a turn that are not timed
clock = time.perf_counter


def our_turn(task: Task, data: TextData, steps: int, machine: Machine) -> float:
    """Return the seconds of `steps` steps in our loop, which is told to stop after them."""
    done: list[float] = []

    def stopped() -> bool:  # asked after every step
        done.append(clock())
        return len(done) == WARM + steps

    with tempfile.TemporaryDirectory() as folder, suppress(Interrupted):
        problem = make_problem(task, data, lambda: initial_weights(task), machine, World())
        with Session(problem, Path(folder), machine=machine, world=World()) as session:
            train(session, stopped)
    return done[-1] - done[WARM - 1]


def plain_turn(task: Task, data: TextData, steps: int) -> float:
    """Return the seconds of `steps` steps in a plain loop."""
    recipe, model = task.recipe, initial_weights(task).model.train()
    decays = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decays, "weight_decay": recipe.weight_decay},
              {"params": others, "weight_decay": 0.0}]  # fmt: skip
    assert recipe.opt_betas and recipe.clip_grad
    optimizer = torch.optim.AdamW(
        groups, lr=recipe.learning_rate, betas=recipe.opt_betas, fused=True
    )
    tokens = torch.from_numpy(data.train.values.astype("int64"))
    length, done = data.train.length, []
    for step in range(WARM + steps):
        rate = recipe.min_lr + 0.5 * (recipe.learning_rate - recipe.min_lr) * (
            1 + math.cos(math.pi * step / (WARM + steps))
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(len(tokens) - length - 1, (recipe.batch_size,)).tolist()
        x = torch.stack([tokens[i : i + length] for i in starts])
        y = torch.stack([tokens[i + 1 : i + 1 + length] for i in starts])
        logits = model(x, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0:
            loss.item()
        done.append(clock())
    return done[-1] - done[WARM - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=float, default=1.0, help="of gpt-demo's model")
    for name, default in {"turns": 7, "steps": 40, "threads": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cpu", action="store_true", help="count CPU time")
    options = parser.parse_args()
    if options.cpu:
        globals()["clock"] = time.process_time
    given: dict[str, Any] = {"with_baseline": False, "steps": 0}
    setting = prepare(*split_settings(read_recipe("gpt-demo"), given)).setting
    model = setting.model.scaled(options.width)
    job = setting.training("target", 0, setting.baseline_epochs, model=model)
    task, data = replace(job.task, epochs=setting.baseline_epochs), setting.data
    assert isinstance(data, TextData)
    machine = Machine(device="cpu", threads=options.threads)
    torch.set_num_threads(options.threads)
    ratios, speeds = [], []
    for turn in range(options.turns + 1):
        ours = our_turn(task, data, options.steps, machine)
        plain = plain_turn(task, data, options.steps)
        if turn:  # the first one was to warm up
            ratios.append(plain / ours)
            speeds.append(options.steps * task.recipe.batch_size * data.train.length / ours)
    print(
        f"{model}, {options.threads} threads: {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f}) of a plain loop's speed in {len(ratios)} turns; "
        f"{statistics.median(speeds):,.0f} tokens/s"
    )


if __name__ == "__main__":
    main()
