"""Find the spec of a timm model that `timm.create_model` built, not we."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from rbdc.coupling.checks import check_same_architecture
from rbdc.errors import CouplingError, ModelError
from rbdc.models.build import build_meta, family
from rbdc.models.create import constructor_names
from rbdc.models.spec import ModelSpec


def timm_spec(model: Any, arguments: Mapping[str, Any] | None = None) -> ModelSpec:
    """Return the spec of a timm model: its name, and the arguments that can be read from it.

    `arguments` are those of `timm.create_model` that cannot. The spec builds the same modules with
    the same settings, else the model is refused.
    """
    name = getattr(model, "pretrained_cfg", {}).get("architecture")
    if not isinstance(name, str):
        raise ModelError(
            f"this {type(model).__name__} has no record of what it was built from",
            "Build it with rbdc.build or timm.create_model, or load it with rbdc.load(folder).",
        )
    own = {**_readable(model, name), **(arguments or {})}
    spec = ModelSpec(name=name, arguments=own)
    try:
        check_same_architecture(build_meta(spec), model, str(spec), "this model")
    except (CouplingError, ModelError) as error:
        raise ModelError(
            f"timm's {name} with {own} is another model than this one: {error.problem}",
            "Give what timm.create_model was given: export(..., arguments={'depth': 6, ...}).",
        ) from None
    return spec


def _readable(model: Any, name: str) -> dict[str, Any]:
    """Return the arguments of the constructor that a built model shows."""
    known = constructor_names(name)
    found: dict[str, Any] = {}
    for argument in ("num_classes", "in_chans", "img_size", "patch_size"):
        value = _first(model, argument)
        if argument in known and value is not None:
            square = isinstance(value, tuple) and len({*value}) == 1
            found[argument] = value[0] if square else value
    default = family(ModelSpec(name=name))
    for read in (default.widths, default.depths):
        if read is not None:
            found |= {key: value for key, value in read(model).items() if key in known}
    return found


def _first(model: nn.Module, name: str) -> Any:
    """Return an attribute of the model or of its patch embedding."""
    for module in (model, getattr(model, "patch_embed", None)):
        value = getattr(module, name, None)
        if isinstance(value, int | tuple):
            return value
    return None
