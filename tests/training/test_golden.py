"""The loss of the first 30 steps on the embedded images, as it was when this was written.

A change of these numbers is a change of what users' trainings do. To accept one, run this file:

    python -m tests.training.test_golden
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rbdc.data import TrainingBatches
from rbdc.experiments.train import prepare
from rbdc.jobs.train import TrainJob
from rbdc.settings import Machine, read_recipe, split_settings
from rbdc.training import World, initial_weights
from rbdc.training.classification import training_state

pytestmark = pytest.mark.numeric
GOLDEN = Path(__file__).with_name("golden.json")
RECIPES: dict[str, dict[str, Any]] = {
    "demo": {"model_kwargs": {"channels": [16, 32, 64, 128], "stem_width": 8}},
    "demo-deit": {},
}
STEPS = 30


def curve(name: str) -> list[float]:
    """The losses of a leaf of the demo, with something of everything random."""
    given = {
        "grow": ("width",),
        "sched": "cosine",
        "with_baseline": False,
        "mixup": 0.2,
        "reprob": 0.25,
        "drop_path": 0.1,
        **RECIPES[name],
    }
    prepared = prepare(*split_settings(read_recipe(name), given))
    leaf = prepared.tree.nodes[0].job
    assert isinstance(leaf, TrainJob)
    task, device = leaf.task, torch.device("cpu")
    batches = TrainingBatches(
        leaf.data,
        task.recipe,
        task.image,
        seed=task.data_seed,
        batch_size=task.recipe.batch_size,
    )
    start, steps = initial_weights(task), batches.steps_per_epoch
    state = training_state(task, start, steps, device=device, machine=Machine(), world=World())
    return [float(state.update(micro)) for micro in batches.from_step(0, STEPS)]


@pytest.mark.parametrize("name", RECIPES)
def test_the_loss_goes_as_it_did(name: str) -> None:
    expected = json.loads(GOLDEN.read_text())[name]
    found = curve(name)
    assert len(found) == len(expected) == STEPS
    # other processors round otherwise, and 30 steps let that grow
    assert found == pytest.approx(expected, rel=2e-3)
    assert sum(expected[-5:]) < sum(expected[:5])


if __name__ == "__main__":
    curves = {recipe: curve(recipe) for recipe in RECIPES}
    GOLDEN.write_text(json.dumps(curves, indent=1) + "\n")
