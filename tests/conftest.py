"""What many tests share."""

from pathlib import Path

import pytest

from tests.support import folder_data


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some embedded images as a folder of files. Nobody may change them."""
    root = tmp_path_factory.mktemp("data")
    folder_data(root)
    return root
