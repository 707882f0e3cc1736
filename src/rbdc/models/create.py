"""Create models of timm, torchvision and transformers, which a stranger's file may name.

`timm.create_model` also downloads weights, unpickles checkpoints and reads other folders, if its
arguments say so. `create` is the only caller of it: it passes the arguments of the architecture's
constructor and nothing else, and stops when a model becomes too large to be meant.
"""

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, cast

import timm
import torch
import torchvision
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from rbdc.errors import CheckpointError, ModelError, nearest
from rbdc.models.language import create_language, is_language, language_arguments
from rbdc.models.outline import outline
from rbdc.models.spec import check_arguments
from rbdc.models.vision import TRANSFORMERS, TYPES, create_vision, is_vision, vision_arguments

TORCHVISION = "torchvision:"
"""Prefix of the names of torchvision's models."""
MOST_PARTS = 10_000  # modules and parameters; timm's largest models have some thousands
MOST_PARAMETERS = 10**11
_NAME = re.compile(r"\w+(\.\w+)?", re.ASCII)  # an architecture, perhaps with timm's tag
_NOT_ARCHITECTURE = {"device", "dtype"}


def create(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Create a model with new weights, on the default device.

    Nothing is downloaded, loaded or read: `arguments` are those of the architecture's constructor.
    """
    known = constructor_names(name)
    for argument in arguments:
        if argument not in known:
            raise ModelError(
                f"{argument} is not an argument of {name}'s constructor, which describes only an "
                "architecture",
                nearest(argument, known) or f"Its arguments are {', '.join(known)}.",
            )
    check_arguments(name, arguments)
    try:
        with _limited_size(name):
            return _plain(name, arguments)
    except (ModelError, NotImplementedError):  # the latter: no values on the meta device
        raise
    except Exception as error:  # constructors raise many types of errors
        reason, library = str(error) or type(error).__name__, _library(name)
        raise ModelError(
            f"{library} cannot build {name} with {dict(arguments)}: {reason}",
            f"Check these values against {library}'s documentation of the model.",
        ) from error


def is_transformers(name: str) -> bool:
    """Return whether a name is that of a model of Hugging Face transformers."""
    return is_language(name) or is_vision(name)


def _library(name: str) -> str:
    if is_transformers(name):
        return "transformers"
    return "torchvision" if name.startswith(TORCHVISION) else "timm"


def _plain(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    if is_language(name):
        return create_language(name, arguments)
    if is_vision(name):
        return create_vision(name, arguments)
    if not name.startswith(TORCHVISION):
        return cast(nn.Module, timm.create_model(name, pretrained=False, **arguments))
    model = torchvision.models.get_model(name.removeprefix(TORCHVISION), weights=None, **arguments)
    layers = [path for path, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    model.num_classes = arguments.get("num_classes", 1000)
    model.pretrained_cfg = {  # as timm describes its models
        "architecture": name,
        "input_size": (3, 224, 224),
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "classifier": layers[-1],
    }
    return cast(nn.Module, model)


def create_filled(
    name: str, arguments: Mapping[str, Any], state: Mapping[str, Tensor], where: str
) -> nn.Module:
    """Create a timm model with these weights. Memory is taken only once their shapes fit."""
    with torch.device("meta"):
        check_tensors(name, create(name, arguments).state_dict(), state, where)
    model = create(name, arguments)
    model.load_state_dict(state)
    return model


def check_tensors(
    model: object, wanted: Mapping[str, Tensor], state: Mapping[str, Tensor], where: str
) -> None:
    """Refuse a state dict whose names, shapes or kinds of numbers are not those of `wanted`."""
    expected = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    for name in [*expected, *(name for name in found if name not in expected)]:
        if expected.get(name) != found.get(name):
            raise CheckpointError(
                f"{name} is {found.get(name, 'missing')} in {where} and "
                f"{expected.get(name, 'missing')} in {model}",
                "The weights must have exactly this architecture, width and image size. Give "
                "differences from timm's defaults as model_args or --model-kwargs.",
            )
    for name, tensor in wanted.items():
        if tensor.is_floating_point() != state[name].is_floating_point():
            raise CheckpointError(
                f"{name} has dtype {state[name].dtype} in {where}", "Use floating-point weights."
            )


@cache
def constructor_names(name: str) -> tuple[str, ...]:
    """Return the arguments that the constructor of an architecture and of its bases takes."""
    if is_language(name):
        return language_arguments(name)
    library, short = _library(name), name.removeprefix(TORCHVISION).removeprefix(TRANSFORMERS)
    match library:
        case "transformers":
            names, exists = [*TYPES], short in TYPES
        case "torchvision":
            names = torchvision.models.list_models(module=torchvision.models)
            exists = short in names
        case _:
            names, exists = timm.list_models(), timm.is_model(name)
    if not _NAME.fullmatch(short) or not exists:
        lists = f"{library}'s list_models() lists the names."
        if library == "transformers":
            lists = f"Known classifiers are {', '.join(TYPES)}."
        raise ModelError(
            f"{library} has no model called {short[:100]!r}", nearest(short, names) or lists
        )
    if library == "transformers":
        return vision_arguments(name)
    bases = inspect.getmro(type(outline(partial(_plain, name, {}))))
    arguments = [
        argument.name
        for base in bases[: bases.index(nn.Module)]
        for argument in inspect.signature(base).parameters.values()
        if argument.kind in (argument.POSITIONAL_OR_KEYWORD, argument.KEYWORD_ONLY)
    ]
    return tuple(dict.fromkeys(name for name in arguments if name not in _NOT_ARCHITECTURE))


@contextmanager
def _limited_size(name: str) -> Iterator[None]:
    """Refuse a model with too many modules or parameters while it is being built."""
    parts = parameters = 0

    def count(_module: nn.Module, _name: str, part: nn.Module | nn.Parameter | None) -> None:
        nonlocal parts, parameters
        parts += 1
        parameters += part.numel() if isinstance(part, Tensor) else 0
        if parts > MOST_PARTS or parameters > MOST_PARAMETERS:
            raise ModelError(
                f"{name} with these arguments has more than {MOST_PARTS:,} modules or "
                f"{MOST_PARAMETERS:.0e} parameters",
                "Give it a smaller depth or width.",
            )

    hooks = [
        register_module_module_registration_hook(count),
        register_module_parameter_registration_hook(count),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
