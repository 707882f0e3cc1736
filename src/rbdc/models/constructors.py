"""Change the arguments of constructors while a model is built, so that it gets another width.

A width is a fraction of the full one: 1/2, 1/4, or 2 for a model of twice the width.
"""

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import wraps
from typing import Any, cast
from weakref import WeakKeyDictionary

import timm.layers
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torchvision.models._utils import _make_divisible as torchvision_make_divisible

from rbdc.errors import WidthError
from rbdc.models.outline import Factory, outline

Given = dict[str, Any]
Class = type[nn.Module]

_WIDTHS = re.compile(
    r"embed_dims?|dims?|hidden_(dim|size|features)|mlp_dim|channels?|num_\dx\d_[abc]|inc"
    r"|(\w+_)?chans|chs|planes|widths?|base_dim|stem_(chs|width|size|channels|dim)|num_features"
    r"|head_hidden_size|growth_rate|num_init_features|inplanes|\w+_(chs|dims|channels?|planes)"
    r"|head_(conv|dim)s?_out|(in|out|input|output)_dim|dim_(in|out)|(in|out)_features|inp|oup"
)
"""Names of constructor arguments that are widths, or numbers of heads."""
_KEPT = re.compile(r"head_chs|head_dims?|img_dims?")
"""Names among these that are none."""
_OF_IMAGES = re.compile(r"(in|input)_(chans|channels)")
"""Names of the number of channels of an image, among the arguments of a whole model."""
_HEADS = re.compile(r"num_(kv_)?heads|heads|nhead|(crpe_)?window\[\]")
_GROUPS = re.compile(r"(num_)?groups|cardinality")
_LIBRARIES = ("timm", "torchvision")


def scaled(size: int, width: Fraction, what: str) -> int:
    """Return a size at a fraction of the full width; refuse one that is not whole."""
    result = size * width
    if result.denominator != 1 or result < 1:
        raise WidthError(f"{what} is {size}, which {1 / width} does not divide", "")
    return int(result)


def scaled_heads(size: int, width: Fraction, name: str) -> int:
    """Return a size, or a number of heads, of which a single one is left as it is."""
    return size if size == 1 and width < 1 else scaled(size, width, name)


def change_widths(value: Any, name: str, change: Callable[[str, int], int]) -> Any:
    """Return an argument with every positive number in it changed that `change` wants to."""
    if isinstance(value, int) and not isinstance(value, bool):
        return change(name, value) if value > 0 else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f.name for f in dataclasses.fields(value) if f.init]
        items = {n: change_widths(getattr(value, n), n, change) for n in fields}
        same = all(item is getattr(value, n) for n, item in items.items())
        return value if same else replace(value, **items)
    if isinstance(value, dict):
        names = {key: key if isinstance(key, str) else f"{name}[]" for key in value}
        items = {key: change_widths(item, names[key], change) for key, item in value.items()}
        return value if all(items[key] is value[key] for key in items) else items
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        found = [change_widths(item, name, change) for item in value]
        same = all(a is b for a, b in zip(found, value, strict=True))
        return value if same else type(value)(found)
    return value


def is_width(name: str) -> bool:
    """Return whether an argument is a width, or a number of heads, by its name."""
    return bool(_WIDTHS.fullmatch(name) or _HEADS.fullmatch(name)) and not _KEPT.fullmatch(name)


@contextmanager
def constructors_changed(
    classes: Iterable[Class], change: Callable[[Class, Given], None]
) -> Iterator[None]:
    """Let `change` see, and change, the arguments of every constructor of these classes."""

    def changed(owner: Any) -> Any:
        original = owner.__dict__["__init__"]
        signature = inspect.signature(original)

        @wraps(original)
        def build(self: Any, *args: Any, **kwargs: Any) -> None:
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            change(owner, bound.arguments)
            original(*bound.args, **bound.kwargs)

        return build

    with ExitStack() as restore:
        for owner in classes:
            own = owner.__dict__["__init__"]
            setattr(owner, "__init__", changed(owner))  # noqa: B010 - mypy refuses the assignment
            restore.callback(setattr, owner, "__init__", own)
        yield


# The arguments of the model itself


def constructor_of(model_class: Class) -> Class:
    """Return the class whose constructor a class has: its own, or a base's."""
    return next(base for base in inspect.getmro(model_class) if "__init__" in base.__dict__)


def constructor_arguments(create: Factory, model_class: Class) -> Given:
    """Return the arguments, defaults included, that `create` builds a model of this class with."""
    found: Given = {}

    def see(_owner: Class, given: Given) -> None:
        if not found:
            found.update(given)

    with constructors_changed([constructor_of(model_class)], see):
        outline(create)
    return found


@contextmanager
def arguments_scaled(
    model_class: Class, width: Fraction, skipped: Collection[str] = ()
) -> Iterator[Given]:
    """Scale the width arguments of the first model of this class that is built; yield them."""
    changed: Given = {}
    begun = False

    def scale(name: str, size: int) -> int:
        kept = name in skipped or _OF_IMAGES.fullmatch(name) or not is_width(name)
        if kept or (size == 1 and not _HEADS.fullmatch(name)):
            return size
        return scaled_heads(size, width, name)

    def change(_owner: Class, given: Given) -> None:
        nonlocal begun
        if begun:  # models inside this one are built from scaled arguments
            return
        begun = True
        for name, value in list(given.items())[1:]:
            found = change_widths(value, name, scale)
            if found is not value:
                given[name] = changed[name] = found

    with constructors_changed([constructor_of(model_class)], change):
        yield changed


@contextmanager
def rounding_scaled(width: Fraction) -> Iterator[None]:
    """Let timm and torchvision round a scaled number of channels to what the full one gets."""

    def changed(original: Callable[..., int]) -> Callable[..., int]:
        def round_channels(v: float, *args: Any, **kwargs: Any) -> int:
            full = original(float(v / width), *args, **kwargs)
            return scaled(full, width, "a rounded number of channels")

        return round_channels

    functions = {f: changed(f) for f in (timm.layers.make_divisible, torchvision_make_divisible)}
    with ExitStack() as restore:
        for module in [m for name, m in sys.modules.items() if name.startswith(_LIBRARIES)]:
            for name in ("make_divisible", "_make_divisible"):
                if (original := vars(module).get(name)) in functions:
                    setattr(module, name, functions[original])
                    restore.callback(setattr, module, name, original)
        yield


# The arguments of the modules inside it

_CHANNELS = ("in_channels", "out_channels")
_LAYERS: dict[Class, tuple[str, ...]] = {
    nn.Conv1d: _CHANNELS, nn.Conv2d: _CHANNELS, nn.Conv3d: _CHANNELS,
    nn.ConvTranspose2d: _CHANNELS, nn.Linear: ("in_features", "out_features"),
    _NormBase: ("num_features",), nn.LayerNorm: ("normalized_shape",),
    nn.RMSNorm: ("normalized_shape",), nn.GroupNorm: ("num_channels",),
    nn.RNNBase: ("input_size", "hidden_size"), nn.PReLU: ("num_parameters",),
}  # fmt: skip
"""Layers that scale their own sizes, and the arguments that are sizes."""
_SMALLEST = 8  # a layer of fewer channels that the constructor does not scale reads coordinates


@contextmanager
def layers_scaled(
    create: Factory,
    full: nn.Module,
    width: Fraction,
    *,
    modules: bool,
    skipped: Collection[str] = (),
) -> Iterator[None]:
    """Build each layer as it is built at full width, but with scaled sizes.

    With `modules`, the width arguments of all modules are scaled as well. Modules are built in the
    same order at any width, so the arguments at full width are known by counting.
    """
    owners = [*_LAYERS, *(_classes_of(full) if modules else ())]
    known = _CALLS.setdefault(full, {})
    if modules not in known:
        known[modules] = _calls_of(create, owners)
    calls = iter(known[modules])
    heads = _classifiers(full)
    of_heads, of_others = (sizes_to_keep(full, classes=classes) for classes in (True, False))

    def whole(size: int) -> int:
        return int(size * width) if (size * width).denominator == 1 else size

    def scale(name: str, size: int) -> int:
        """Scale an argument of a module; a small one is scaled by who gives it, or not at all."""
        if _HEADS.fullmatch(name):
            return size if name in skipped else scaled_heads(size, width, name)
        if _GROUPS.fullmatch(name) and size > 1:
            return whole(size)
        return whole(size) if is_width(name) and size >= _SMALLEST and size not in keep else size

    keep: frozenset[int] = frozenset()

    def change(owner: Class, given: Given) -> None:
        nonlocal keep
        call = next(calls, None)
        if call is None or call.owner is not owner:
            raise WidthError("its layers are others than at full width", "")
        keep = of_heads if call.path.startswith(heads) else of_others
        if owner in _LAYERS:
            now = dict(given) if modules else {}
            given.update({name: v for name, v in call.given.items() if name != "self"})
            _scale_layer(given, now, _LAYERS[owner], lambda n: n if n in keep else whole(n))
            return
        for name, value in list(call.given.items())[1:]:
            found = change_widths(value, name, scale)
            if found is not value:
                given[name] = found

    with constructors_changed(owners, change):
        yield


def _scale_layer(
    given: Given, now: Given, names: tuple[str, ...], scale: Callable[[int], int]
) -> None:
    """Scale the sizes of a layer, and its number of groups: a group keeps its size."""
    scales = False
    for name in names:
        many = isinstance(given[name], list | tuple)
        sizes = list(given[name]) if many else [given[name]]
        single = now.get(name) in (sizes[0], sizes, tuple(sizes)) and sizes[0] < _SMALLEST
        found = sizes if single else [scale(size) for size in sizes]
        given[name], scales = found if many else found[0], scales or found != sizes
    for name in given:
        if _GROUPS.fullmatch(name) and given[name] > 1 and scales:
            given[name] = scale(given[name])


_ATTRIBUTES = re.compile(r"\w*(dim|dims|heads|chs|channels|features)")
_KEPT_ATTRIBUTES = re.compile(r"\w*(head_dims?|key_dim|head_features)|dim_head|embed_len")


def scale_attributes(model: nn.Module, full: nn.Module, width: Fraction) -> None:
    """Scale the widths that modules remember, of a model whose layers have scaled their sizes."""
    keep = sizes_to_keep(full)

    def scale(name: str, size: int) -> int:
        if _HEADS.fullmatch(name):
            return scaled_heads(size, width, name)
        wanted = _ATTRIBUTES.fullmatch(name) and not _KEPT_ATTRIBUTES.fullmatch(name)
        whole = (size * width).denominator == 1 and size not in keep
        return int(size * width) if wanted and whole else size

    for module, known in zip(model.modules(), full.modules(), strict=True):
        if not isinstance(module, tuple(_LAYERS)):
            for name, value in vars(known).items():
                found = change_widths(value, name, scale) if not name.startswith("_") else value
                if found is not value:
                    setattr(module, name, found)


def _classes_of(full: nn.Module) -> list[Class]:
    """Return the classes of a model's modules, and their bases, that have a constructor."""
    bases = [base for m in full.modules() for base in inspect.getmro(type(m))]
    known = (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict)
    return [
        base
        for base in dict.fromkeys(bases)
        if "__init__" in base.__dict__
        and issubclass(base, nn.Module)
        and base not in known
        and not issubclass(base, tuple(_LAYERS))
    ]


@dataclass(frozen=True, slots=True)
class _Call:
    """A constructor that is called to build a model."""

    owner: Class
    given: Given
    """Its arguments, `self` first."""
    path: str = ""
    """Path, in the model, of the module that it builds."""


_CALLS: WeakKeyDictionary[nn.Module, dict[bool, list[_Call]]] = WeakKeyDictionary()
"""The constructors that were called for a full-width model, with those of all modules or not."""


def _calls_of(create: Factory, classes: list[Class]) -> list[_Call]:
    """Return the constructors that are called to build a model, in order."""
    found: list[_Call] = []

    def build() -> nn.Module:
        found.clear()  # a model that the meta device cannot have is built a second time
        return create()

    with constructors_changed(classes, lambda o, given: found.append(_Call(o, dict(given)))):
        model = outline(build)
    paths = {id(module): path for path, module in model.named_modules()}
    return [replace(call, path=paths.get(id(call.given["self"]), "")) for call in found]


def _classifiers(full: nn.Module) -> tuple[str, ...]:
    """Return the paths of the layers whose outputs are classes; all layers if none is known."""
    names = getattr(full, "pretrained_cfg", {}).get("classifier") or ("",)
    return (names,) if isinstance(names, str) else tuple(names)


def sizes_to_keep(full: nn.Module, *, classes: bool = True) -> frozenset[int]:
    """Return the sizes that are no widths: those of images and, if wanted, of classes."""
    channels = getattr(full, "pretrained_cfg", {}).get("input_size", (3,))[0]
    heads = [m.out_features for m in full.modules() if isinstance(m, nn.Linear)]
    number = getattr(full, "num_classes", heads[-1] if heads else 1)
    return frozenset({1, channels, *({cast(int, number)} if classes else ())})
