"""Build a model of timm or torchvision at a fraction of its width, by its own constructor."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from rbdc.errors import ModelError, WidthError
from rbdc.models.create import TORCHVISION, create
from rbdc.models.families import Family, family_of
from rbdc.models.narrow import Factory, Narrowing, constructor_arguments, find_narrowing, outline
from rbdc.models.spec import ModelSpec

_OF_TIMMS_WEIGHTS = (
    "tag", "license", "origin_url", "paper_ids", "paper_name", "notes",
    "test_input_size", "test_crop_pct",
)  # fmt: skip
"""Entries of timm's `pretrained_cfg` that describe timm's own weights, not ours."""
_DEPTHS = ("depth", "depths", "layers")
"""Names of the constructor arguments that say how many blocks a model has."""
PARAMETRIZATIONS = ".parametrizations."
"""Part of the names that torch gives the tensors of a parametrized weight."""


def build(model: str | ModelSpec, width: float = 1.0, **arguments: Any) -> nn.Module:
    """Build a model of timm or torchvision at `width` times its full width, with new weights.

    torchvision's are called `torchvision:NAME`.

    `arguments` are timm's and describe the full-width model: `build("deit_tiny_patch16_224",
    width=0.5, embed_dim=64, num_heads=4, depth=6, img_size=28, patch_size=4, in_chans=1)` has an
    embedding dimension of 32 and 2 heads. `img_size` can be given for every family.
    `spec_of(model)` returns the spec from which `build(spec)` builds the same architecture again.
    """
    spec = as_spec(model, width, **arguments)
    reference, family = _reference(spec)
    arguments = timm_arguments(spec)
    if spec.width != 1 and family.widths is None:
        result = narrowing_of(spec).build(_at_full_width(spec), reference)
    elif spec.width == 1 or family.construct is None:
        result = create(spec.name, arguments)
    else:
        result = family.construct(reference, lambda **given: create(spec.name, given), arguments)
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
def _meta(spec: ModelSpec) -> nn.Module:
    return outline(partial(build, spec)).to("meta")


def build_empty(spec: ModelSpec) -> nn.Module:
    """Build a model with uninitialised weights, which the caller must all overwrite."""
    model = build_meta(spec)
    if any(module._non_persistent_buffers_set for module in model.modules()):
        return build(spec)  # it has buffers that no state dict contains
    return model.to_empty(device="cpu")


def build_zeros(spec: ModelSpec) -> nn.Module:
    """Build a model that can run, but whose weights are zero unless that is not possible."""
    model = build_meta(spec)
    for module in model.modules():
        integers = any(b.numel() > 1 and not b.is_floating_point() for b in module.buffers(False))
        if module._non_persistent_buffers_set or integers:
            return build(spec)
    model.to_empty(device="cpu")
    for tensor in model.state_dict().values():
        tensor.zero_()
    return model


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
    if spec.name.startswith(TORCHVISION):
        return False
    try:
        alone = outline(partial(create, spec.name, timm_arguments(spec))).state_dict()
    except ModelError:  # a constructor that does not take its widths by name
        return False
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
    if family.widths is None:
        found = {} if spec.width == 1 else narrowing_of(spec).arguments
        # what timm takes as an argument, and a file can contain
        lists = {k: tuple(v) for k, v in found.items() if isinstance(v, list | tuple)}
        return {k: v for k, v in found.items() if isinstance(v, int)} | lists
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


def depths(spec: ModelSpec) -> dict[str, int | tuple[int, ...]]:
    """Return the constructor argument that defines the depth: {"depth": 12}; empty if none does."""
    return dict(_depths(replace(spec, width=1.0)))


@cache
def _depths(spec: ModelSpec) -> Mapping[str, int | tuple[int, ...]]:
    reference, family = _reference(spec)
    if family.depths is not None:
        return family.depths(reference)
    if spec.name.startswith(TORCHVISION):  # their names already say the depth
        return {}
    build_it = partial(create, spec.name, timm_arguments(spec))
    given = constructor_arguments(build_it, type(reference))
    for name in _DEPTHS:
        blocks = given.get(name)
        numbers = tuple(blocks) if isinstance(blocks, list | tuple) else (blocks,)
        if numbers and all(type(number) is int for number in numbers):
            return {name: numbers if isinstance(blocks, list | tuple) else numbers[0]}
    return {}


def image_side(spec: ModelSpec) -> int:
    """Return the side of the square images that the model takes, in pixels."""
    _channels, height, width = record_of(spec)["input_size"]
    if height != width:
        raise ModelError(
            f"{spec} takes images of {height} x {width} pixels",
            "Only models of square images can grow in resolution.",
        )
    return int(height)


def patch_side(spec: ModelSpec) -> int | None:
    """Return the side of the patches that an image is cut into; None if it is not cut."""
    size = getattr(getattr(_reference(spec)[0], "patch_embed", None), "patch_size", None)
    return int(size[0]) if isinstance(size, tuple) else None


@cache
def narrowing_of(spec: ModelSpec) -> Narrowing:
    """Return how a model without an entry in the table of families is built at its width."""
    factor = round(1 / spec.width)
    if factor * spec.width != 1 or factor.bit_count() != 1:
        raise WidthError(
            f"{spec} is asked for, and a {type(_reference(spec)[0]).__name__} can only be halved",
            "Use a width of 1, 0.5, 0.25, ...",
        )
    return find_narrowing(_at_full_width(spec), _reference(spec)[0], factor)


def _at_full_width(spec: ModelSpec) -> Factory:
    return partial(create, spec.name, timm_arguments(replace(spec, width=1.0)))


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
    size = given.pop("img_size", None)
    model = outline(partial(create, name, given))
    family = family_of(model)
    if size is not None and family.takes_image_size:
        model = outline(partial(create, name, {**given, "img_size": size}))
    _describe(model, spec)
    return model, family


def _describe(model: Any, spec: ModelSpec) -> None:
    """Correct `pretrained_cfg` for this model, and store the spec in the model."""
    record = model.pretrained_cfg
    for key in _OF_TIMMS_WEIGHTS:
        record.pop(key, None)
    _channels, height, width = record["input_size"]
    size = spec.arguments.get("img_size") or (height, width)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = spec.arguments.get("in_chans") or 3
    for key in ("mean", "std"):  # timm has three values for any number of channels
        if len(record[key]) != channels:
            record[key] = (sum(record[key]) / len(record[key]),) * channels
    record["input_size"] = (channels, height, width)
    record["num_classes"] = model.num_classes
    model.rbdc_spec = spec
