"""Couple two models on disk into a third: load, couple, verify, write."""

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from torch import nn

from rbdc.coupling import OffDiagonal, class_names, couple, example_for, verify_coupling
from rbdc.errors import CheckpointError, CouplingError
from rbdc.models.build import (
    build,
    build_empty,
    parameters_of,
    scaled_widths,
    spec_of,
    timm_builds,
)
from rbdc.models.folder import check_writable, export, load_noted
from rbdc.models.hub import is_language_folder
from rbdc.models.spec import ModelSpec
from rbdc.models.streamed import couple_streamed
from rbdc.models.structures import halves_structure


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
    use_ema: bool = True,
    **options: bool,
) -> dict[str, Any]:
    """Couple two exported folders or weight files, verify the result, and export the wide model.

    `options` are `allow_identical` and `allow_inexact` of `couple`. Return the record that is
    written to its rbdc.json. If `off_diagonal` is "zero" and the verification fails, the
    architecture has a layer that mixes its branches or shares weights between them; the model is
    then written only with `allow_inexact`.
    """
    output = Path(output)
    check_writable(output, force=force)
    _check_apart(output, first, second)
    folders = Path(first), Path(second)
    if all(map(is_language_folder, folders)):
        if off_diagonal != "zero":
            raise CouplingError(
                "random off-diagonal blocks are not made for language models on disk",
                "Leave --off-diagonal out.",
            )
        return couple_streamed(
            *folders,
            output,
            allow_identical=options.get("allow_identical", False),
            allow_inexact=options.get("allow_inexact", False),
        )
    of_files: dict[str, Any] = {"model": model, "arguments": arguments}
    if any(of_files.values()) and Path(first).is_dir() and Path(second).is_dir():
        raise CheckpointError(
            f"{first} and {second} are folders, which already name their models",
            "Give a model name and its arguments only with weight files.",
        )
    (left, *notes), (right, *more) = (
        load_noted(path, use_ema=use_ema, **({} if Path(path).is_dir() else of_files))
        for path in (first, second)
    )
    spec = spec_of(left).scaled(2)
    wide, proof = couple_verified(left, right, spec, off_diagonal, seed=seed, **options)
    exported = [parent for parent, path in ((left, first), (right, second)) if Path(path).is_dir()]
    _copy_preprocessing(wide, exported)
    record = {
        "coupling": {
            "parents": [Path(path).resolve().name for path in (first, second)],
            "off_diagonal": off_diagonal,
            "seed": seed if off_diagonal == "random" else None,
            "class_names_compared": all(class_names(parent) for parent in (left, right)),
            **proof,
        }
    }
    export(wide, output, record=record, force=force)
    return {
        "spec": spec.to_json(),
        "timm_loads": timm_builds(spec),
        "read": [*notes, *more],
        "sizes": sizes_of(spec_of(left), spec),
        **record,
    }


def sizes_of(narrow: ModelSpec, wide: ModelSpec) -> dict[str, tuple[Any, Any]]:
    """Return what the coupling doubles, before and after: arguments and the parameters."""
    before, after = scaled_widths(narrow), scaled_widths(wide)
    sizes: dict[str, tuple[Any, Any]] = {k: (before[k], after[k]) for k in after if k in before}
    return {**sizes, "parameters": (parameters_of(narrow), parameters_of(wide))}


def couple_verified(
    first: nn.Module, second: nn.Module, spec: ModelSpec, off_diagonal: OffDiagonal, **options: Any
) -> tuple[nn.Module, dict[str, Any]]:
    """Couple two models into one built from `spec`, and verify that it is their mean.

    `options` are further ones of `couple`. Return the wide model and a record of the proof.
    """
    into = build(spec) if off_diagonal == "random" else build_empty(spec)
    structure = halves_structure(spec)
    options |= {"off_diagonal": off_diagonal, "structure": structure}
    wide = couple(first, second, into=into, **options)
    proof = verify_coupling(first, second, wide, example_for(wide), structure)
    must_hold = off_diagonal == "zero" and not options.get("allow_inexact")
    if not isfinite(proof.error) or (must_hold and not proof.holds):
        raise CouplingError(
            f"the coupled {spec} differs from the mean of its parents by {proof.error:.1e} of the "
            f"largest logit, more than rounding can cause ({proof.tolerance:.0e})",
            "The branches are not independent: choose an architecture that couples exactly (rbdc "
            "explain MODEL). allow_inexact writes the model with this difference.",
        )
    record = {"exact": proof.holds, "proof_error": proof.error, "norm_drift": proof.drift}
    return wide, record


def _copy_preprocessing(wide: Any, parents: Sequence[Any]) -> None:
    """Copy the image preprocessing of exported parents. Weight files do not record it."""
    for key in ("mean", "std", "crop_pct", "interpolation"):
        values = [parent.pretrained_cfg.get(key) for parent in parents]
        if any(value != values[0] for value in values):
            raise CouplingError(
                f"the parents preprocess images differently: {key} is {values[0]}, {values[1]}",
                "Couple models that were trained with the same preprocessing.",
            )
        if values:
            wide.pretrained_cfg[key] = values[0]


def _check_apart(output: Path, *inputs: str | Path) -> None:
    """Refuse an output that would overwrite a parent, even with `force`."""
    target = output.resolve()
    for path in (Path(path).resolve() for path in inputs):
        if target == path or target in path.parents or path in target.parents:
            raise CheckpointError(
                f"{output} would replace, contain or be inside the parent {path}",
                "Write the wide model beside its parents.",
            )
