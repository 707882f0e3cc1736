"""The loss of the first 30 steps on the embedded images, as it was when this was written.

A change of these numbers is a change of what users' trainings do. To accept one, run this file:

    python -m tests.training.test_golden
"""

import json
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from rbdc.data import open_data
from rbdc.recipes import Machine, read_recipe, split_settings
from rbdc.training import World, initial_weights
from rbdc.training.loop import train
from rbdc.tree.jobs import TrainJob
from rbdc.tree.prepare import prepare

GOLDEN = Path(__file__).with_name("golden.json")
RECIPES = ("demo", "demo-deit")
STEPS = 30


def curve(name: str, folder: Path) -> list[float]:
    """The losses of a leaf of the demo."""
    given = {"epochs": 2.0, "with_baseline": False, "mixup": 0.2, "reprob": 0.25, "drop_path": 0.1}
    prepared = prepare(*split_settings(read_recipe(name), given))
    leaf = prepared.tree.nodes[0].job
    assert isinstance(leaf, TrainJob)
    losses: list[float] = []

    class Enough(Exception):  # noqa: N818
        pass

    def stopped() -> bool:
        losses[:] = [json.loads(line)["loss"] for line in log.read_text().splitlines()]
        if len(losses) >= STEPS:
            raise Enough
        return False

    log = folder / "log.jsonl"
    with suppress(Enough):
        train(
            leaf.task,
            open_data("embedded"),
            folder,
            start=lambda: initial_weights(leaf.task),
            machine=Machine(device="cpu", threads=1, workers=0, tensorboard=False),
            world=World(),
            stopped=stopped,
        )
    return losses


@pytest.mark.parametrize("name", RECIPES)
def test_the_loss_goes_as_it_did(name: str, tmp_path: Path) -> None:
    expected = json.loads(GOLDEN.read_text())[name]
    found = curve(name, tmp_path)
    assert len(found) == len(expected) == STEPS
    # other processors round otherwise, and 30 steps let that grow
    assert found == pytest.approx(expected, rel=2e-3)
    assert expected[-1] < 0.8 * expected[0]


if __name__ == "__main__":
    with TemporaryDirectory() as place:
        curves = {}
        for recipe in RECIPES:
            (Path(place) / recipe).mkdir()
            curves[recipe] = curve(recipe, Path(place) / recipe)
    GOLDEN.write_text(json.dumps(curves, indent=1) + "\n")
