"""Lengths are one type: epochs, steps, images, or a share of the training."""

import pytest

from rbdc.errors import RecipeError
from rbdc.settings import Duration, Extent, Recipe, parse_duration, plain
from rbdc.settings.detection import DetectionRecipe

EXTENT = Extent(steps_per_epoch=100, batch_size=32, total=3000)


@pytest.mark.parametrize(
    ("text", "length", "count"),
    [
        ("5", Duration(5, "epochs"), 500),
        ("5 epochs", Duration(5, "epochs"), 500),
        ("1 epoch", Duration(1, "epochs"), 100),
        ("0.333 epochs", Duration(0.333, "epochs"), 33),
        ("500 steps", Duration(500, "steps"), 500),
        ("1 step", Duration(1, "steps"), 1),
        ("1e6 images", Duration(1e6, "images"), 31250),
        ("10%", Duration(10, "%"), 300),
        (" 2.5 % ", Duration(2.5, "%"), 75),
        ("0 steps", Duration(0, "steps"), 0),
    ],
)
def test_a_length_is_read_and_turned_into_updates(text: str, length: Duration, count: int) -> None:
    assert parse_duration(text) == length
    assert EXTENT.updates(length) == count
    assert parse_duration(str(length)) == length


def test_a_plain_number_is_in_the_unit_of_its_setting() -> None:
    assert EXTENT.updates(2.5) == 250
    assert EXTENT.updates(2.5, "steps") == 2
    assert parse_duration("7", "steps") == Duration(7, "steps")
    assert plain(2.5) == 2.5
    assert plain(Duration(1e6, "images")) == "1000000 images"


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("5 epocs", "Did you mean epochs?"),
        ("many steps", "For example"),
        ("-1 steps", "For example"),
        ("inf epochs", "For example"),
        ("nan", "For example"),
        ("", "For example"),
        ("5 10 steps", "Did you mean steps?"),
    ],
)
def test_what_is_no_length_is_refused(text: str, remedy: str) -> None:
    with pytest.raises(RecipeError, match="is not a length") as error:
        parse_duration(text)
    assert remedy in error.value.remedy


def test_the_shorter_of_two_lengths() -> None:
    assert EXTENT.shorter(5.0, 1.0) == 1.0
    assert EXTENT.shorter(5.0, Duration(499, "steps")) == Duration(499, "steps")
    assert EXTENT.shorter(5.0, Duration(501, "steps")) == 5.0
    assert EXTENT.shorter(Duration(10, "%"), Duration(9632, "images")) == Duration(10, "%")


def test_a_plan_knows_the_warmup_in_epochs() -> None:
    assert Recipe(warmup_epochs=3.0).planned_warmup(1000) == 3.0
    steps = Recipe(warmup_epochs=Duration(50, "steps"), batch_size=100)
    assert steps.planned_warmup(1000) == 5.0
    assert Recipe(warmup_epochs=Duration(10, "%")).planned_warmup(1000) == 0.0


def test_lengths_of_a_detectors_training() -> None:
    recipe = DetectionRecipe(epochs=2.5, warmup_steps=7)
    assert (recipe.steps(10), recipe.warmup_updates(10)) == (25, 7)
    assert DetectionRecipe(epochs=0.01).steps(10) == 1
    assert DetectionRecipe(epochs=Duration(25, "steps")).steps(10) == 25
    images = DetectionRecipe(epochs=Duration(400, "images"), warmup_steps=Duration(20, "%"))
    assert (images.steps(10), images.warmup_updates(10)) == (25, 5)
    assert DetectionRecipe(epochs=2.0, warmup_steps=Duration(10, "%")).warmup_updates(50) == 10


@pytest.mark.parametrize("text", ["0 steps", "0 images", "10%", "0"])
def test_a_training_has_a_length_of_its_own(text: str) -> None:
    with pytest.raises(RecipeError, match="epochs"):
        DetectionRecipe(epochs=text)  # type: ignore[arg-type]


def test_lengths_in_json_are_as_a_recipe_gives_them() -> None:
    assert Recipe().to_json()["warmup_epochs"] == 5.0
    given = Recipe(warmup_epochs=Duration(500, "steps")).to_json()
    assert given["warmup_epochs"] == "500 steps"
    assert DetectionRecipe().to_json()["epochs"] == 36.0
    assert DetectionRecipe(epochs=Duration(90, "steps")).to_json()["epochs"] == "90 steps"
