"""Build a model of timm, torchvision or transformers at a fraction of its width."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from rbdc.errors import ModelError, WidthError
from rbdc.models.constructors import constructor_arguments
from rbdc.models.create import TORCHVISION, create, is_transformers
from rbdc.models.families import Family, family_of
from rbdc.models.language import SEQUENCE, is_language
from rbdc.models.memory import found
from rbdc.models.narrow import Narrowing, find_narrowing, kept_axes
from rbdc.models.outline import Factory, allocated, outline, zeros
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
    """Build a model of timm, torchvision or transformers at `width` times its full width.

    torchvision's are called `torchvision:NAME`, the language models of transformers by their
    `model_type` (llama, gpt2, ...). The weights are new.

    `arguments` are timm's and describe the full-width model: `build("deit_tiny_patch16_224",
    width=0.5, embed_dim=64, num_heads=4, depth=6, img_size=28, patch_size=4, in_chans=1)` has an
    embedding dimension of 32 and 2 heads. `img_size` can be given for every family.
    `spec_of(model)` returns the spec from which `build(spec)` builds the same architecture again.
    """
    spec = as_spec(model, width, **arguments)
    if spec.width == 1:
        result = create(spec.name, timm_arguments(spec))
    elif (way := narrowing_of(spec)) is not None:
        result = way.build(_at_full_width(spec), _reference(spec)[0])
    else:
        result = _build_by_family(spec)
    _describe(result, spec)
    return result


def build_meta(spec: ModelSpec) -> nn.Module:
    """Build the model on the meta device, for layouts and checks."""
    return copy.deepcopy(_meta(spec))


def shapes_of(spec: ModelSpec) -> Mapping[str, torch.Tensor]:
    """Return the model's state dict on the meta device. It is cached: do not change it."""
    return _meta(spec).state_dict()


@cache
def parameters_of(spec: ModelSpec) -> int:
    """Return the number of trainable numbers; a tied tensor counts once."""
    return sum(parameter.numel() for parameter in _meta(spec).parameters())


def record_of(spec: ModelSpec) -> Mapping[str, Any]:
    """Return timm's `pretrained_cfg` of the model. It is cached: do not change it."""
    return _meta(spec).pretrained_cfg  # type: ignore[return-value]


@cache
def _meta(spec: ModelSpec) -> nn.Module:
    if spec.width != 1:
        narrowing_of(spec)  # runs models: an outline's modes would slow each of their operations
    return outline(partial(build, spec)).to("meta")


def build_empty(spec: ModelSpec) -> nn.Module:
    """Build a model with uninitialised weights, which the caller must all overwrite."""
    model = build_meta(spec)
    if any(module._non_persistent_buffers_set for module in model.modules()):
        return build(spec)  # it has buffers that no state dict contains
    return allocated(model)


def build_zeros(spec: ModelSpec) -> nn.Module:
    """Build a model that can run, but whose weights are zero."""
    return zeros(partial(build, spec), build_meta(spec))


def as_spec(model: str | ModelSpec, width: float = 1.0, /, **arguments: Any) -> ModelSpec:
    """Return a spec for a name, a width and arguments; for a folder, that of its config.json.

    A spec is returned unchanged.
    """
    if isinstance(model, ModelSpec):
        if arguments or width != 1.0:
            raise ModelError(
                f"a spec of {model} was given together with a width or arguments of its own",
                "Use spec.scaled(factor), or dataclasses.replace, to change a spec.",
            )
        return model
    if (Path(model) / "config.json").is_file():
        from rbdc.models.folder import folder_spec  # reads folders by way of this module

        found, _ = folder_spec(Path(model))
        return replace(found.scaled(width), arguments={**found.arguments, **arguments})
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
    if spec.name.startswith(TORCHVISION) or is_transformers(spec.name):
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
    if not is_language(spec.name) and not family(spec).takes_image_size:
        arguments.pop("img_size", None)  # stored in pretrained_cfg["input_size"]
    return arguments | (scaled_widths(spec) if spec.width != 1 else {})


def _build_by_family(spec: ModelSpec) -> nn.Module:
    """Build a model at its width from the arguments that its family names."""
    reference, family = _reference(spec)
    arguments = timm_arguments(replace(spec, width=1.0)) | _family_widths(spec)
    if family.construct is None:
        return create(spec.name, arguments)
    return family.construct(reference, lambda **given: create(spec.name, given), arguments)


def scaled_widths(spec: ModelSpec) -> dict[str, int | tuple[int, ...]]:
    """Return the constructor arguments that define the width, at this spec's width."""
    way = narrowing_of(spec)
    if way is None:
        return _family_widths(spec)
    # no file can contain the classes in timm's `block_args`: the layers are divided then
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in way.arguments.items()}
    return {k: v for k, v in values.items() if _only_numbers(v)}


def _family_widths(spec: ModelSpec) -> dict[str, int | tuple[int, ...]]:
    """Return the arguments that the model's family names, at this spec's width."""
    reference, family = _reference(spec)
    factor = Fraction(spec.width).limit_denominator(2**16)
    widths: dict[str, int | tuple[int, ...]] = {}
    assert family.widths is not None
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


def _only_numbers(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_only_numbers, value))
    return isinstance(value, int | float)


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
    """Return the side of the square images that the model takes in pixels, or tokens of text."""
    if is_language(spec.name):
        return int(record_of(spec)[SEQUENCE])
    _channels, height, width = record_of(spec)["input_size"]
    if height != width:
        raise ModelError(
            f"{spec} takes images of {height} x {width} pixels",
            "Only models of square images can grow in resolution.",
        )
    return int(height)


def sized(spec: ModelSpec, side: int) -> ModelSpec:
    """Return the same architecture for images of this side, or sequences of this many tokens."""
    return replace(spec, arguments={**spec.arguments, size_argument(spec): side})


def size_argument(spec: ModelSpec) -> str:
    """Return the argument of a spec that says the size of its inputs."""
    return SEQUENCE if is_language(spec.name) else "img_size"


def patch_side(spec: ModelSpec) -> int | None:
    """Return the side of the patches that an image is cut into; None if it is not cut."""
    size = getattr(getattr(_reference(spec)[0], "patch_embed", None), "patch_size", None)
    return int(size[0]) if isinstance(size, tuple) else None


@cache
def narrowing_of(spec: ModelSpec) -> Narrowing | None:
    """Return how a model is built at its width; None if its family's arguments say it."""
    reference, family = _reference(spec)
    width = Fraction(spec.width).limit_denominator(2**16)
    if family.widths is not None and _family_suffices(spec, width):
        return None
    if width == 1:
        return Narrowing(width=width, by="arguments")
    if any(n.bit_count() != 1 for n in width.as_integer_ratio()):
        raise WidthError(
            f"{spec} is asked for, and a {type(reference).__name__} can only be halved or doubled",
            "Use a width of 2, 1, 0.5, 0.25, ...",
        )
    create_full = _at_full_width(spec)
    about = replace(spec, width=0.5 if width < 1 else 2.0)
    way = found("narrowing of", about, lambda: find_narrowing(create_full, reference, width).way())
    return Narrowing(width=width, **way).tried(create_full, reference)


def _family_suffices(spec: ModelSpec, width: Fraction) -> bool:
    """Return whether the arguments that the family names scale all of the model."""
    unusual = any(n.bit_count() != 1 for n in width.as_integer_ratio())
    if width == 1 or unusual or is_transformers(spec.name):
        return True
    _family_widths(spec)  # refuses a number of heads that cannot be divided
    try:
        model = outline(partial(_build_by_family, spec))
        return not kept_axes(model, _reference(spec)[0], width)
    except ModelError:  # a constructor that needs more than these arguments
        return False


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
    record, model.rbdc_spec = model.pretrained_cfg, spec
    if is_language(spec.name):
        return
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
