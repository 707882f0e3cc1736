"""The moments that a coupling makes, beside the gradients that the coupled model really has.

The parents' moments are measured at their last weights, on the batches of the wide model's. An
optimizer's also remember earlier weights, whose gradients were larger by a factor that depends on
the training and, by rounding, on the CPU.
"""

from statistics import median

import pytest
import torch
from torch import Tensor

from rbdc.coupling import block_sizes, couple_moments, layout_of
from rbdc.data import Batch, TrainingBatches
from rbdc.experiments.train import prepare
from rbdc.jobs.train import TrainJob
from rbdc.models.coupled import couple_verified
from rbdc.settings import Machine, read_recipe, split_settings
from rbdc.training import World, initial_weights
from rbdc.training.classification import training_state
from rbdc.training.state import State

STEPS, MEASURED = 200, 30


def states(recipe: str) -> tuple[list[State], State, TrainingBatches]:
    """Train two models of half width, and couple them."""
    given = {"steps": 1, "grow": ("width",), "fuse": "off"}
    nodes = prepare(*split_settings(read_recipe(recipe), given)).tree.nodes
    jobs = [node.job for node in nodes if isinstance(node.job, TrainJob)]
    task = jobs[0].task
    batches = TrainingBatches(
        jobs[0].data, task.recipe, task.image, seed=0, batch_size=task.recipe.batch_size
    )
    where = {"device": torch.device("cpu"), "machine": Machine(), "world": World()}

    def state(job: TrainJob, start: object) -> State:
        return training_state(job.task, start, batches.steps_per_epoch, **where)  # type: ignore[arg-type]

    parents = [state(job, initial_weights(job.task)) for job in jobs[:2]]
    for micro in batches.from_step(0, STEPS):
        for parent in parents:
            parent.update(micro)
    first, second = (parent.model for parent in parents)
    wide, _ = couple_verified(first, second, jobs[-1].model, "zero")
    target = state(jobs[-1], None)
    target.model.load_state_dict(wide.state_dict())
    return parents, target, batches


def mean_squares(state: State, batches: list[Batch]) -> dict[str, Tensor]:
    """Return E[g^2] of every weight."""
    named = dict(state.model.named_parameters())
    found = {name: torch.zeros_like(weight) for name, weight in named.items()}
    state.model.train()
    for batch in batches:
        state.model.zero_grad()
        state.loss(state.model, batch).backward()
        for name, weight in named.items():
            assert weight.grad is not None
            found[name] += weight.grad.square() / len(batches)
    return found


@pytest.mark.parametrize("recipe", ["demo", "demo-deit"])
def test_coupled_second_moments_are_those_of_the_coupled_model(recipe: str) -> None:
    parents, target, batches = states(recipe)
    layout = layout_of(parents[0].model, target.model)
    seen = [micro[0] for micro in batches.from_step(STEPS, STEPS + MEASURED)]
    *moments, measured = (mean_squares(state, seen) for state in (*parents, target))
    first, second = ({f"{n}/exp_avg_sq": m for n, m in of.items()} for of in moments)
    coupled = couple_moments(first, second, layout)
    carried = {name: coupled[f"{name}/exp_avg_sq"] for name in measured}
    head = [n for n, a in layout.items() if a.scaled in ((), (a.input_axis,)) and n in measured]
    weights = {name: axes for name, axes in layout.items() if len(axes.scaled) == 2}
    # block_sizes takes a root mean square, so of the root of g^2 it is the root of the mean of g^2
    roots = [{n: squares.sqrt() for n, squares in of.items()} for of in (carried, measured)]
    of_carried, of_measured = (block_sizes(root, weights, 2) for root in roots)

    def ratios(pairs: tuple[tuple[int, int], ...]) -> list[float]:
        return [
            (of_carried[name][i][j] / of_measured[name][i][j]) ** 2
            for name in weights
            for i, j in pairs
        ]

    found = {
        "head": [float(carried[name].mean() / measured[name].mean()) for name in head],
        "body": ratios(((0, 0), (1, 1))),
        "between": ratios(((0, 1), (1, 0))),
    }
    middle = {part: round(median(values), 3) for part, values in found.items()}
    assert all(0.5 < value < 2 for value in middle.values()), middle
