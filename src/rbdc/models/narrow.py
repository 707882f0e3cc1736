"""Build a model of half the width, or a quarter, from the function that builds it at full width.

Two ways are tried. First, the constructor's arguments that are widths by their name (embed_dim,
num_heads, channels, ...) are divided. Second, the layers divide their own sizes while the model is
built, which suits convolutional networks whose widths are written in code. The result must have the
same tensors, and every axis must keep its size or be divided.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from rbdc.errors import WidthError
from rbdc.structure import evaluating

Factory = Callable[[], nn.Module]

_WIDTHS = re.compile(
    r"embed_dims?|dims?|hidden_(dim|size)|mlp_dim|num_heads|heads|nhead|channels|chans|planes|width"
    r"|widths|base_(dim|width)|stem_(chs|width|size|channels|dim)|num_features|head_hidden_size"
    r"|growth_rate|num_init_features|inplanes|\w+_(chs|dims|channels|planes)|head_(conv|dim)s?_out"
)
"""Names of constructor arguments that are widths, or numbers of heads."""
_DIVIDED = "_divided_arguments"
"""Attribute of a narrow model in which its constructor leaves the divided arguments."""
_KEPT = re.compile(r"in_chans|in_channels|num_classes|head_dim|dim_head|key_dim|img_dims?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Narrowing:
    """How a model is built at a fraction of its width."""

    factor: int
    """Divisor of the width: 2, 4, 8, ..."""
    by: str
    """arguments: the constructor's; layers: they divide their own sizes."""
    skipped: frozenset[str] = frozenset()
    """Constructor arguments that are widths by their name, but keep their values."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Constructor arguments that are divided, with their narrow values."""
    kept: tuple[str, ...] = ()
    """Weights of which an axis that is no image channel and no class keeps its size."""

    def build(self, create: Factory, full: nn.Module) -> nn.Module:
        """Build the narrow model; `full` is the model at full width, on any device."""
        if self.by == "arguments":
            with _arguments_divided(type(full), self.factor, self.skipped):
                return create()
        with _layers_divided(self.factor, _sizes_to_keep(full)):
            return create()


def narrow(create: Factory, factor: int = 2) -> Callable[[], nn.Module]:
    """Return a function that builds the model of `create` at 1 / `factor` of its width.

    `create` takes no arguments and builds the model at full width, for example
    `lambda: timm.create_model("convnext_tiny")`.
    """
    full = outline(create)
    found = find_narrowing(create, full, factor)
    return lambda: found.build(create, full)


def outline(create: Factory) -> nn.Module:
    """Build a model on the meta device, or with weights if its constructor needs values."""
    try:
        with torch.device("meta"):
            return create()
    except NotImplementedError:  # "Cannot copy out of meta tensor"
        return create()


def find_narrowing(create: Factory, full: nn.Module, factor: int = 2) -> Narrowing:
    """Return the way that divides most of the model; refuse a model that no way divides."""
    problems, found = [], []
    for way in _ways(create, full, factor):
        try:
            model = outline(partial(way.build, create, full))
            kept = _check_divided(model, full, factor)
            _check_runs(model, full)
        except Exception as error:  # constructors raise many types of errors
            problem = error.problem if isinstance(error, WidthError) else _first_line(error)
            problems.append(f"by its {way.by}: {problem}")
            continue
        arguments = model.__dict__.pop(_DIVIDED, {})
        found.append(dataclasses.replace(way, arguments=arguments, kept=kept))
        if not kept:
            break
    if not found:
        raise WidthError(
            f"{type(full).__name__} cannot be built at 1/{factor} of its width "
            f"({problems[0]}; {problems[-1]})",
            "Give the model another width or number of heads, so that all of them can be divided.",
        )
    return min(found, key=lambda way: len(way.kept))


def _ways(create: Factory, full: nn.Module, factor: int) -> Iterator[Narrowing]:
    """Yield what is tried: all arguments that are widths, the layers, all arguments but one."""
    every = Narrowing(factor=factor, by="arguments")
    yield every
    yield Narrowing(factor=factor, by="layers")
    names: set[str] = set()
    with _arguments_divided(type(full), 1, frozenset(), names), suppress(Exception):
        outline(create)
    heads = frozenset(name for name in names if "head" in name)
    single = (frozenset({name}) for name in sorted(names - heads))
    for skipped in (*single, heads):  # heads of half the dimension would mix the branches
        if skipped and skipped != names:
            yield dataclasses.replace(every, skipped=skipped)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200] or type(error).__name__


def _check_divided(model: nn.Module, full: nn.Module, factor: int) -> tuple[str, ...]:
    """Refuse a model that is not the full one with divided axes; return weights with kept axes."""
    kept, keep = [], _sizes_to_keep(full)
    state, wanted = model.state_dict(), full.state_dict()
    if state.keys() != wanted.keys():
        raise WidthError("it has other tensors than at full width", "Use another model.")
    for name, tensor in wanted.items():
        pairs = list(zip(state[name].shape, tensor.shape, strict=False))
        if state[name].ndim != tensor.ndim or any(n not in (w, w / factor) for n, w in pairs):
            shapes = tuple(state[name].shape), tuple(tensor.shape)
            raise WidthError(f"{name} becomes {shapes[0]} of {shapes[1]}", "Use another model.")
        same = any(n == w and w not in keep for n, w in pairs[:2])
        if same and tensor.ndim > 1 and name.endswith("weight"):
            kept.append(name)
    sizes = [sum(p.numel() for p in m.parameters()) for m in (model, full)]
    if sizes[0] > 0.7 * sizes[1]:
        raise WidthError(
            f"{sizes[0] / sizes[1]:.0%} of its parameters stay: {', '.join(kept[:3])}",
            "Use another model.",
        )
    return tuple(kept)


def _check_runs(model: nn.Module, full: nn.Module) -> None:
    """Refuse a model that does not run where the full one does."""
    size = getattr(full, "pretrained_cfg", {}).get("input_size", (3, 224, 224))
    image = torch.empty(1, *size, device=next(model.parameters()).device)
    with torch.no_grad():
        for one in (full, model):
            with evaluating(one):
                try:
                    one(image)
                except Exception:  # any error: on the meta device some models cannot run at all
                    if one is full:
                        return
                    raise


def _sizes_to_keep(full: nn.Module) -> frozenset[int]:
    """Return the sizes that are no widths: those of images and of classes."""
    channels = getattr(full, "pretrained_cfg", {}).get("input_size", (3,))[0]
    heads = [m.out_features for m in full.modules() if isinstance(m, nn.Linear)]
    classes = getattr(full, "num_classes", heads[-1] if heads else 1)
    return frozenset({1, channels, classes})


# By the constructor's arguments


@contextmanager
def _arguments_divided(
    model_class: type[nn.Module],
    factor: int,
    skipped: frozenset[str],
    names: set[str] | None = None,
) -> Iterator[None]:
    """Divide the width arguments of the first model of this class that is built.

    `names` receives the names of all of them.
    """
    original = cast(Any, model_class).__init__
    signature = inspect.signature(original)

    def divided(name: str, value: Any) -> Any:
        """Return an argument with every number divided that is a width by its name."""
        if isinstance(value, int) and not isinstance(value, bool):
            if value < 2 or _KEPT.fullmatch(name) or not _WIDTHS.fullmatch(name):
                return value
            if names is not None:
                names.add(name)
            if value % factor and name not in skipped:
                raise WidthError(f"{name} is {value}, which {factor} does not divide", "")
            return value if name in skipped else value // factor
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [f.name for f in dataclasses.fields(value) if f.init]
            return dataclasses.replace(value, **{n: divided(n, getattr(value, n)) for n in fields})
        if isinstance(value, dict):
            return {key: divided(str(key), item) for key, item in value.items()}
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            return type(value)(divided(name, item) for item in value)
        return value

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        restore.close()  # models inside this one are built from divided arguments
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        for name in list(given)[1:]:
            bound.arguments[name] = divided(name, given[name])
        original(*bound.args, **bound.kwargs)
        self.__dict__[_DIVIDED] = {
            name: value for name, value in bound.arguments.items() if value is not given[name]
            and value != given[name]
        }  # fmt: skip

    with ExitStack() as restore:
        restore.enter_context(_constructor(model_class, build))
        yield


def constructor_arguments(create: Factory, model_class: type[nn.Module]) -> dict[str, Any]:
    """Return the arguments, defaults included, that `create` builds a model of this class with."""
    original = cast(Any, model_class).__init__
    found: dict[str, Any] = {}

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        restore.close()
        bound = inspect.signature(original).bind(self, *args, **kwargs)
        bound.apply_defaults()
        found.update(bound.arguments)
        original(self, *args, **kwargs)

    with ExitStack() as restore:
        restore.enter_context(_constructor(model_class, build))
        outline(create)
    return found


@contextmanager
def _constructor(model_class: Any, build: Callable[..., None]) -> Iterator[None]:
    """Replace the constructor of a class for a while."""
    own = model_class.__dict__.get("__init__")
    model_class.__init__ = build
    try:
        yield
    finally:
        if own is None:
            del model_class.__init__
        else:
            model_class.__init__ = own


# By the layers


@contextmanager
def _layers_divided(factor: int, keep: frozenset[int]) -> Iterator[None]:
    """Let convolutions, linear layers and norms divide their sizes when they are built."""

    def divided(size: int) -> int:
        if size in keep or size % 2:
            return size
        if size % factor:
            raise WidthError(f"a layer has {size} channels, which {factor} does not divide", "")
        return size // factor

    def change(original: Any, names: tuple[str, ...]) -> Any:
        signature = inspect.signature(original)

        def build(self: Any, *args: Any, **kwargs: Any) -> None:
            bound = signature.bind(self, *args, **kwargs)
            given = dict(bound.arguments)
            for name in names:
                size = given[name]
                sizes = [divided(n) for n in size] if isinstance(size, list | tuple) else None
                bound.arguments[name] = divided(size) if sizes is None else sizes
            groups = given.get("groups", 1)
            if groups > 1 and bound.arguments["in_channels"] != given["in_channels"]:
                bound.arguments["groups"] = divided(groups) if groups % 2 == 0 else groups
            original(*bound.args, **bound.kwargs)

        return build

    channels = ("in_channels", "out_channels")
    layers: dict[type[nn.Module], tuple[str, ...]] = {
        nn.Conv1d: channels, nn.Conv2d: channels, nn.Conv3d: channels,
        nn.ConvTranspose2d: channels, nn.Linear: ("in_features", "out_features"),
        _NormBase: ("num_features",), nn.LayerNorm: ("normalized_shape",),
        nn.RMSNorm: ("normalized_shape",), nn.GroupNorm: ("num_channels",),
    }  # fmt: skip
    with ExitStack() as stack:
        for layer, names in layers.items():
            stack.enter_context(_constructor(layer, change(cast(Any, layer).__init__, names)))
        yield
