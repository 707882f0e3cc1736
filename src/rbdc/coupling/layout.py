"""Find how the tensors of a wide model are built from those of two narrow ones.

Nothing is known here of architectures: both models run once, side by side (`rbdc.structure`).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rbdc.errors import CouplingError
from rbdc.structure import Axes as Axes
from rbdc.structure import Layout, Structure, find_structure, unwrapped


def layout_of(narrow: nn.Module, wide: nn.Module, example: Any = None) -> Layout:
    """Return how each tensor of the wide model is built from two narrow ones."""
    return structure_of(narrow, wide, example).layout


def structure_of(narrow: nn.Module, wide: nn.Module, example: Any = None) -> Structure:
    """Run a model at widths w and 2w, and return how it couples; refuse one that cannot be.

    `example` is an input of the models; default: an image of noise for a timm model.
    """
    narrow, wide = unwrapped(narrow), unwrapped(wide)
    structure = find_structure(narrow, wide, example_for(wide) if example is None else example)
    check_conflicts(structure)
    return structure


def check_conflicts(structure: Structure) -> None:
    """Refuse a structure with tensors that have no layout, or operations that have no rule."""
    for what, cause in structure.conflicts.items():
        more = len(structure.conflicts) - 1
        raise CouplingError(
            f"{what} cannot be coupled: {cause}" + (f", and {more} more" if more else ""),
            "The two halves of such a model cannot be told apart, so nothing is written.",
        )


PROOF_TOKENS = 16  # of the sequence that a language model is proven on


def example_for(model: nn.Module) -> Any:
    """Return a fixed input: an image of noise for a timm model, tokens for a language model."""
    record = getattr(model, "pretrained_cfg", {})
    if "vocab_size" in record:
        return tokens_for(record, PROOF_TOKENS)
    size = record.get("input_size")
    if size is None:
        raise CouplingError(
            f"the inputs of a {type(model).__name__} are not known",
            "Give an example of them: example=tensor, or a tuple or dict of arguments.",
        )
    return torch.randn(1, *size, generator=torch.Generator().manual_seed(0))


def tokens_for(record: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Return the arguments of a forward pass of one sequence of random tokens, always the same."""
    shape = (1, min(length, record["sequence_length"]))
    draws = torch.Generator().manual_seed(0)
    tokens = torch.randint(record["vocab_size"], shape, generator=draws)
    return {"input_ids": tokens, "use_cache": False}


def heads_of(model: nn.Module) -> tuple[str, ...]:
    """Return the module names of the classifiers, as timm's `pretrained_cfg` records them."""
    names = getattr(model, "pretrained_cfg", {}).get("classifier") or ()
    return (names,) if isinstance(names, str) else tuple(names)
