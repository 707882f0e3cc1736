"""What many tests share."""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import hypothesis
import pytest
import torch

from rbdc import models
from rbdc.jobs import measure
from rbdc.models.build import _meta
from tests.support import folder_data, made_once

# `build` caches models without memory, which have a dtype: float64 has a cache of its own.
_double_meta = cache(_meta.__wrapped__)


@pytest.fixture(scope="session", autouse=True)
def structures(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Remember how models couple among the tests' own files, for all workers of a session."""
    base = tmp_path_factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    models.memory.FOLDER = root / "structures"


@pytest.fixture(scope="session", autouse=True)
def quick_measurements() -> None:
    """Measure speeds for a tenth of the usual time: no test needs them to be precise."""
    measure.median_seconds.__defaults__ = (measure.MEASURED / 10,)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some embedded images as a folder of files. Nobody may change them."""
    return made_once(tmp_path_factory, "data", folder_data)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the groups: each keeps one worker busy for minutes, whatever the others do."""
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)


@pytest.fixture
def double_precision(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Build and run models in float64.

    Where two ways to the same numbers are compared, float32 differs from CPU to CPU by what the
    order of its sums makes of 6e-8; in float64 a comparison can be as strict as it should be.
    """
    monkeypatch.setitem(_meta.__wrapped__.__globals__, "_meta", _double_meta)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


hypothesis.settings.register_profile("any machine", deadline=None)  # a busy one is slow
hypothesis.settings.load_profile("any machine")
