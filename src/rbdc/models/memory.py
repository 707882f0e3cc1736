"""Remember on disk what was found out about architectures, because finding it takes seconds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch

from rbdc.disk import remembered
from rbdc.models.create import is_transformers
from rbdc.models.hugging_face import version
from rbdc.models.spec import ModelSpec

FOLDER = Path("~/.cache/rbdc/structures")
FORMAT = 4


def found(what: str, spec: ModelSpec, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what was computed about a model before, with the same libraries; or compute it."""
    about = {what: spec.to_json(), "torch": torch.__version__, "format": FORMAT}
    used = {"transformers": version()} if is_transformers(spec.name) else {"timm": timm.__version__}
    return remembered(FOLDER.expanduser(), {**about, **used}, compute)[0]
