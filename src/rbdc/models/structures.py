"""How a model couples from two of half its width, found once and remembered on disk."""

from functools import cache
from typing import Any

import torch
from torch import nn

from rbdc.coupling import check_conflicts, example_for
from rbdc.models.build import build_meta, build_zeros, family
from rbdc.models.language import is_language
from rbdc.models.memory import found
from rbdc.models.spec import ModelSpec
from rbdc.structure import (
    EntryUnits,
    Layout,
    Structure,
    evaluating,
    find_structure,
    find_units,
)

SIDE = 128
"""Side of the images, in pixels, that models of images of any size are tried with."""


def halves_layout(spec: ModelSpec) -> Layout:
    """Return how the model's tensors are built from those of two models of half the width."""
    structure = halves_structure(spec)
    check_conflicts(structure)
    return structure.layout


@cache
def halves_structure(spec: ModelSpec) -> Structure:
    """Return how the model couples, conflicts included. Found before is read from disk."""
    return Structure.from_json(found("model", spec, lambda: _find(spec).to_json()))


def _find(spec: ModelSpec) -> Structure:
    narrow, wide = (build_zeros(one) for one in (spec.scaled(0.5), spec))
    return find_structure(narrow, wide, quick_example(spec, wide))


@cache
def halves_units(spec: ModelSpec) -> dict[str, EntryUnits]:
    """Return the units that entries of the tensors of a model of half the width belong to."""
    narrow, wide = (build_zeros(one) for one in (spec.scaled(0.5), spec))
    return find_units(narrow, wide, quick_example(spec, wide))


def quick_example(spec: ModelSpec, model: nn.Module) -> Any:
    """Return an input of a model: a small image, if it takes images of any size."""
    example = example_for(model)
    if is_language(spec.name) or family(spec).takes_image_size:
        return example
    small = example[..., :SIDE, :SIDE]
    if small.shape == example.shape:
        return example
    outline = build_meta(spec)
    try:
        with torch.no_grad(), evaluating(outline):
            outline(small.to("meta"))
    except Exception:  # forward passes raise many types of errors
        return example
    return small
