"""What many tests share."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from rbdc.models.build import _meta
from tests.support import folder_data

# `build` caches models without memory, which have a dtype: float64 has a cache of its own.
_double_meta = cache(_meta.__wrapped__)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some embedded images as a folder of files. Nobody may change them."""
    root = tmp_path_factory.mktemp("data")
    folder_data(root)
    return root


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
