"""Build a timm model at a fraction of its width, through timm's own constructors."""

import copy
import inspect
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial
from typing import Any, cast

import timm
import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from rbdc.coupling import Layout, layout_of
from rbdc.errors import ModelError, WidthError, nearest
from rbdc.models.families import Family, family_of
from rbdc.models.spec import ModelSpec

_OF_TIMMS_WEIGHTS = (
    "tag", "license", "origin_url", "paper_ids", "paper_name", "notes",
    "test_input_size", "test_crop_pct",
)  # fmt: skip
"""Entries of timm's `pretrained_cfg` that describe timm's own weights, not ours."""
PARAMETRIZATIONS = ".parametrizations."
"""Part of the names that torch gives the tensors of a parametrized weight."""


def build(model: str | ModelSpec, width: float = 1.0, **arguments: Any) -> nn.Module:
    """Build a timm model at `width` times its full width, with new weights.

    `arguments` are timm's and describe the full-width model: `build("deit_tiny_patch16_224",
    width=0.5, embed_dim=64, num_heads=4, depth=6, img_size=28, patch_size=4, in_chans=1)` has an
    embedding dimension of 32 and 2 heads. `img_size` can be given for every family.
    `spec_of(model)` returns the spec from which `build(spec)` builds the same architecture again.
    """
    spec = as_spec(model, width, **arguments)
    reference, family = _reference(spec)
    arguments = timm_arguments(spec)
    if spec.width == 1 or family.construct is None:
        result = _create(spec.name, **arguments)
    else:
        result = family.construct(reference, partial(_create, spec.name), arguments)
    _describe(result, spec)
    return result


def build_meta(spec: ModelSpec) -> nn.Module:
    """Build the model on the meta device, for layouts and checks."""
    return copy.deepcopy(_meta(spec))


def shapes_of(spec: ModelSpec) -> Mapping[str, torch.Tensor]:
    """Return the model's state dict on the meta device. It is cached: do not change it."""
    return _meta(spec).state_dict()


def record_of(spec: ModelSpec) -> Mapping[str, Any]:
    """Return timm's `pretrained_cfg` of the model. It is cached: do not change it."""
    return _meta(spec).pretrained_cfg  # type: ignore[return-value]


@cache
def halves_layout(spec: ModelSpec) -> Layout:
    """Return how the model's tensors are built from those of two models of half the width."""
    return layout_of(_meta(spec.scaled(0.5)), _meta(spec))


@cache
def _meta(spec: ModelSpec) -> nn.Module:
    with torch.device("meta"):
        return build(spec)


def build_empty(spec: ModelSpec) -> nn.Module:
    """Build a model with uninitialised weights, which the caller must all overwrite."""
    model = build_meta(spec)
    if any(module._non_persistent_buffers_set for module in model.modules()):
        return build(spec)  # it has buffers that no state dict contains
    return model.to_empty(device="cpu")


def as_spec(model: str | ModelSpec, width: float = 1.0, /, **arguments: Any) -> ModelSpec:
    """Return a spec for a name, a width and timm's arguments. A spec is returned unchanged."""
    if isinstance(model, ModelSpec):
        if arguments or width != 1.0:
            raise ModelError(
                f"a spec of {model} was given together with a width or arguments of its own",
                "Use spec.scaled(factor), or dataclasses.replace, to change a spec.",
            )
        return model
    return ModelSpec(name=model, width=width, arguments=arguments)


def spec_of(model: nn.Module) -> ModelSpec:
    """Return the spec that `build` or `load` built this model from."""
    spec = getattr(model, "rbdc_spec", None)
    if not isinstance(spec, ModelSpec):
        raise ModelError(
            f"this {type(model).__name__} has no record of what it was built from",
            "Build it with rbdc.build(name, width, ...) or load it with rbdc.load(folder).",
        )
    return spec


@torch.no_grad()
def fold_parametrizations(model: nn.Module) -> nn.Module:
    """Return an ordinary model with the values of the parametrized weights of `model`.

    A model without parametrized weights (`torch.nn.utils.parametrize`) is returned itself.
    """
    modules: list[tuple[str, Any]] = [*model.named_modules()]
    weights = {
        f"{path}.{name}": getattr(module, name)
        for path, module in modules
        for name in (module.parametrizations if is_parametrized(module) else ())
    }
    if not weights:
        return model
    others = {k: t for k, t in model.state_dict().items() if PARAMETRIZATIONS not in k}
    plain: Any = build_empty(spec_of(model))
    plain.load_state_dict(weights | others)
    plain.pretrained_cfg.update(model.pretrained_cfg)  # its images and class names
    return plain  # type: ignore[no-any-return]


def timm_builds(spec: ModelSpec) -> bool:
    """Return whether timm alone can build this model from its exported `model_args`."""
    with torch.device("meta"):
        alone = _create(spec.name, **timm_arguments(spec)).state_dict()
    ours = shapes_of(spec)
    return {k: t.shape for k, t in alone.items()} == {k: t.shape for k, t in ours.items()}


def family(spec: ModelSpec) -> Family:
    """Return the architecture family of a spec."""
    return _reference(spec)[1]


def timm_arguments(spec: ModelSpec) -> dict[str, Any]:
    """Return the arguments of timm's constructor for this spec, with scaled widths."""
    arguments = dict(spec.arguments)
    if not family(spec).takes_image_size:
        arguments.pop("img_size", None)  # stored in pretrained_cfg["input_size"]
    return arguments | (scaled_widths(spec) if spec.width != 1 else {})


def scaled_widths(spec: ModelSpec) -> dict[str, int | tuple[int, ...]]:
    """Return the constructor arguments that define the width, at this spec's width."""
    reference, family = _reference(spec)
    factor = Fraction(spec.width).limit_denominator(2**16)
    widths: dict[str, int | tuple[int, ...]] = {}
    for key, sizes in family.widths(reference).items():
        full = sizes if isinstance(sizes, tuple) else (sizes,)
        scaled = [size * factor for size in full]
        for size, width in zip(full, scaled, strict=True):
            if width.denominator != 1 or width < 1:
                raise WidthError(
                    f"{key} is {size} at full width and would be {float(width):g} at width "
                    f"{spec.width:g}",
                    f"Choose a width at which {key} is a whole number.",
                )
        widths[key] = tuple(map(int, scaled)) if isinstance(sizes, tuple) else int(scaled[0])
    return widths


def check_steps(spec: ModelSpec, steps: int) -> None:
    """Refuse more recursive steps than the architecture allows, and name the reason."""
    scaled_widths(spec)
    for most in range(steps):
        try:
            scaled_widths(spec.scaled(0.5 ** (most + 1)))
        except WidthError as obstacle:
            raise WidthError(
                f"{spec} cannot be halved {steps} times: {obstacle.problem}",
                f"At most {most} recursive step{'s' if most != 1 else ''} from {spec}.",
            ) from None


def _reference(spec: ModelSpec) -> tuple[Any, Family]:
    """Return the full-width model on the meta device and its family."""
    return _full_width(replace(spec, width=1.0))


@cache
def _full_width(spec: ModelSpec) -> tuple[Any, Family]:
    name, given = spec.name, dict(spec.arguments)
    if not timm.is_model(name):
        raise ModelError(
            f"timm has no model called {name!r}",
            nearest(name, timm.list_models()) or "timm.list_models() lists the names.",
        )
    if not {"pretrained", "checkpoint_path"}.isdisjoint(given):
        raise ModelError(
            f"the arguments of {name} ask for weights, but a spec describes only an architecture",
            "Build the model, then load weights into it; or use rbdc.load for an exported folder.",
        )
    size = given.pop("img_size", None)
    with torch.device("meta"):
        model = _create(name, **given)
        family = family_of(model)
        if size is not None and family.takes_image_size:
            model = _create(name, **given, img_size=size)
    return model, family


def _create(name: str, **arguments: Any) -> nn.Module:
    try:
        return cast(nn.Module, timm.create_model(name, **arguments))
    except Exception as error:  # timm's constructors raise many types of errors
        raise ModelError(
            f"timm cannot build {name} with {arguments}: {str(error) or type(error).__name__}",
            _suggest_argument(name, arguments),
        ) from error


def _suggest_argument(name: str, given: dict[str, Any]) -> str:
    with torch.device("meta"):
        known = list(inspect.signature(type(timm.create_model(name))).parameters)
    for argument in given:
        if argument not in known:
            return nearest(argument, known) or f"Its arguments are {', '.join(known)}."
    return "Check these values against timm's documentation of the model."


def _describe(model: Any, spec: ModelSpec) -> None:
    """Correct `pretrained_cfg` for this model, and store the spec in the model."""
    record = model.pretrained_cfg
    for key in _OF_TIMMS_WEIGHTS:
        record.pop(key, None)
    _channels, height, width = record["input_size"]
    size = spec.arguments.get("img_size", (height, width))
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = spec.arguments.get("in_chans", 3)
    for key in ("mean", "std"):  # timm has three values for any number of channels
        if len(record[key]) != channels:
            record[key] = (sum(record[key]) / len(record[key]),) * channels
    record["input_size"] = (channels, height, width)
    record["num_classes"] = model.num_classes
    model.rbdc_spec = spec
