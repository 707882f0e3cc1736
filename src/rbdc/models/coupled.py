"""Couple two models on disk into a third: load, couple, prove, write."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rbdc.coupling import (
    TOLERANCE,
    CouplingProof,
    OffDiagonal,
    class_names,
    couple,
    verify_coupling,
)
from rbdc.errors import CouplingError
from rbdc.models.build import build, build_empty, spec_of
from rbdc.models.folder import check_writable, export, load

PROOF_IMAGES = 1


def couple_folders(
    first: str | Path,
    second: str | Path,
    output: str | Path,
    *,
    model: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    off_diagonal: OffDiagonal = "zero",
    seed: int = 0,
    force: bool = False,
    allow_identical: bool = False,
    allow_inexact: bool = False,
) -> dict[str, Any]:
    """Couple two exported folders or weight files, prove the coupling, and export the wide model.

    Returns the record that is kept with it in rbdc.json. A zero-padded coupling whose proof fails
    is not written, unless `allow_inexact`: the architecture then has a layer that mixes its
    branches, or shares weights between them.
    """
    check_writable(Path(output), force=force)
    left, right = (load(path, model=model, arguments=arguments) for path in (first, second))
    spec = spec_of(left).scaled(2)
    wide = build(spec) if off_diagonal == "random" else build_empty(spec)
    couple(
        left,
        right,
        into=wide,
        off_diagonal=off_diagonal,
        seed=seed,
        allow_identical=allow_identical,
    )
    proof = verify_coupling(left, right, wide, proof_images(wide))
    if off_diagonal == "zero" and not (proof.holds or allow_inexact):
        raise CouplingError(
            f"the coupled {spec} differs from the mean of its parents by {proof.error:.1e} of the "
            f"largest logit, more than rounding explains ({TOLERANCE:.0e})",
            "Its layers cannot be kept apart by width; allow an inexact coupling to use it anyway.",
        )
    record = {
        "coupling": {
            "parents": [str(Path(path).resolve().name) for path in (first, second)],
            "off_diagonal": off_diagonal,
            "seed": seed if off_diagonal == "random" else None,
            "class_names_compared": all(class_names(parent) for parent in (left, right)),
            **proof_record(proof),
        }
    }
    export(wide, output, record=record, force=force)
    return {"spec": spec.to_json(), **record}


def proof_record(proof: CouplingProof) -> dict[str, float]:
    return {"proof_error": proof.error, "norm_drift": proof.drift}


def proof_images(model: nn.Module) -> Tensor:
    """Standard normal noise, always the same, of the size the model takes."""
    size = model.pretrained_cfg["input_size"]  # type: ignore[index]
    return torch.randn(PROOF_IMAGES, *size, generator=torch.Generator().manual_seed(0))
