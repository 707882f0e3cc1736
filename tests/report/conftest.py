"""A small finished run that several tests look at, and a browser."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

from rbdc.experiments.train import Training, prepare
from rbdc.settings import Request
from tests.report.browsing import CHROMIUM
from tests.support import QUICK, TINY, made_once, small_recipe, started


def small_run(folder: Path, recipe: dict[str, Any] | None = None, **settings: Any) -> Training:
    """Four leaves for one epoch, two models for two, the target for four, standard training."""
    request: dict[str, Any] = {
        "model": "resnet18d",
        "model_kwargs": TINY["resnet18d"],
        "data": str(folder),
        "in_memory": True,
        "steps": 2,
        "epochs": 4.0,
        "with_baseline": True,
    }
    pixels: dict[str, Any] = {"mean": (0.286, 0.286, 0.286), "std": (0.353, 0.353, 0.353)}
    return prepare(Request(**{**request, **settings}), small_recipe(**pixels, **(recipe or {})))


@pytest.fixture(scope="session")
def finished(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nobody may change it."""

    def make(output: Path) -> None:
        started(small_run(folder), output, machine=QUICK, watch=lambda _event: None, jobs=1)

    return made_once(tmp_path_factory, "finished", make)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """A browser whose pages end with the test: charts and polls go on in what is left open."""
    yield chromium
    for context in chromium.contexts:
        context.close()
