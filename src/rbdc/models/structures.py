"""How a model couples from two of half its width, found once and remembered on disk."""

from functools import cache
from pathlib import Path

import timm
import torch

from rbdc.coupling import check_conflicts, example_for
from rbdc.disk import remembered
from rbdc.models.build import build_zeros
from rbdc.models.spec import ModelSpec
from rbdc.structure import Layout, Structure, find_structure

FOLDER = Path("~/.cache/rbdc/structures")
FORMAT = 1


def folder() -> Path:
    """Return the folder in which structures and proofs are remembered."""
    return FOLDER.expanduser()


def halves_layout(spec: ModelSpec) -> Layout:
    """Return how the model's tensors are built from those of two models of half the width."""
    structure = halves_structure(spec)
    check_conflicts(structure)
    return structure.layout


@cache
def halves_structure(spec: ModelSpec) -> Structure:
    """Return how the model couples, conflicts included. Found before is read from `FOLDER`."""
    about = {
        "model": spec.to_json(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "format": FORMAT,
    }
    found, _ = remembered(folder(), about, lambda: _find(spec).to_json())
    return Structure.from_json(found)


def _find(spec: ModelSpec) -> Structure:
    narrow, wide = (build_zeros(one) for one in (spec.scaled(0.5), spec))
    return find_structure(narrow, wide, example_for(wide))
