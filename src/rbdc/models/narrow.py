"""Build a model of half the width, a quarter or twice the width, from what builds it at full width.

Three ways are tried. First, the constructor's arguments that are widths by their name (embed_dim,
num_heads, channels, ...) are scaled. Second, those of every module inside the model are, and layers
scale their own sizes. Third, the layers alone do, or also the numbers that modules remember. The
result must have the same tensors, and every axis must keep its size or be scaled.
"""

import dataclasses
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import nn

from rbdc.errors import CouplingError, WidthError
from rbdc.models.constructors import (
    arguments_scaled,
    change_widths,
    constructor_arguments,
    is_width,
    layers_scaled,
    rounding_scaled,
    scale_attributes,
    sizes_to_keep,
)
from rbdc.models.outline import Factory, outline, zeros
from rbdc.structure import evaluating, find_structure

HALF = Fraction(1, 2)
_HEADS_INSIDE = frozenset({"num_heads", "heads"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Narrowing:
    """How a model is built at a fraction of its width, or at a multiple."""

    width: Fraction
    """Width, relative to the full one: 1/2, 1/4, 2, ..."""
    by: str
    """arguments: the constructor's; modules: those of all modules inside it; layers: their own;
    attributes: those of layers, and the numbers that modules remember."""
    skipped: Collection[str] = frozenset()
    """Constructor arguments that are widths by their name, but keep their values."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Constructor arguments that are scaled, with their values."""
    kept: tuple[str, ...] = ()
    """Weights of which an axis that is no image channel and no class keeps its size."""

    def build(self, create: Factory, full: nn.Module) -> nn.Module:
        """Build the model at this width; `full` is the one at full width, on any device."""
        return self._build(create, full)[0]

    def way(self) -> dict[str, Any]:
        """Return what is the same for all widths, as JSON values."""
        return {"by": self.by, "skipped": sorted(self.skipped)}

    def _build(self, create: Factory, full: nn.Module) -> tuple[nn.Module, Mapping[str, Any]]:
        arguments: Mapping[str, Any] = {}
        with ExitStack() as stack:
            if self.by == "arguments":
                scaling = arguments_scaled(type(full), self.width, self.skipped)
                arguments = stack.enter_context(scaling)
            else:
                modules = self.by == "modules"
                scaling_ = layers_scaled(
                    create, full, self.width, modules=modules, skipped=self.skipped
                )
                stack.enter_context(scaling_)
            if self.by in ("arguments", "modules"):
                stack.enter_context(rounding_scaled(self.width))
            model = create()
        if self.by == "attributes":
            scale_attributes(model, full, self.width)
        return model, arguments

    def tried(self, create: Factory, full: nn.Module) -> "Narrowing":
        """Return what the model keeps at this width; refuse it if the model is then another."""
        try:
            return self._tried(create, full)
        except Exception as error:  # constructors raise many types of errors
            raise _refusal(full, self.width, [self.problem_of(error)]) from error

    def problem_of(self, error: Exception) -> str:
        """Say in a line what is wrong with this way."""
        first = (str(error).splitlines() or [""])[0][:200] or type(error).__name__
        return f"by its {self.by}: {error.problem if isinstance(error, WidthError) else first}"

    def _tried(self, create: Factory, full: nn.Module) -> "Narrowing":
        arguments: list[Mapping[str, Any]] = []

        def build() -> nn.Module:
            model, found = self._build(create, full)
            arguments.append(found)
            return model

        model = outline(build)
        kept = kept_axes(model, full, self.width)
        _check_runs(model, full)
        return dataclasses.replace(self, arguments=arguments[-1], kept=kept)


def narrow(create: Factory, factor: int | Fraction = 2) -> Callable[[], nn.Module]:
    """Return a function that builds the model of `create` at 1 / `factor` of its width.

    `create` takes no arguments and builds the model at full width, for example
    `lambda: timm.create_model("convnext_tiny")`. A `factor` of `Fraction(1, 2)` doubles it.
    """
    full = outline(create)
    found = find_narrowing(create, full, 1 / Fraction(factor))
    return lambda: found.build(create, full)


def find_narrowing(create: Factory, full: nn.Module, width: Fraction = HALF) -> Narrowing:
    """Return the way in which the model couples best; refuse a model that no way scales.

    All widths below the full one are built in one way, and all above it.
    """
    ways = sorted(_possible(create, full, HALF if width < 1 else 1 / HALF), key=_number_kept)
    best, fewest = ways[0], _NO_WAY
    for way in ways if len(ways) > 1 else ():
        troubles = _troubles(create, full, way)
        if troubles < fewest:
            best, fewest = way, troubles
        if not any(troubles):
            break
    if best.width == width:
        return best
    return dataclasses.replace(best, width=width).tried(create, full)


def _number_kept(way: Narrowing) -> int:
    return len(way.kept)


def _possible(create: Factory, full: nn.Module, width: Fraction) -> list[Narrowing]:
    """Return the ways that scale the model, up to the first that scales all of it."""
    problems, found = [], []
    for way in _ways(create, full, width):
        try:
            found.append(way._tried(create, full))
        except Exception as error:  # as above
            problems.append(way.problem_of(error))
            continue
        if not found[-1].kept:
            break
    if not found:
        raise _refusal(full, width, problems[:4])
    return found


def _refusal(full: nn.Module, width: Fraction, problems: list[str]) -> WidthError:
    remedy = "Give the model another width or number of heads, so that all can be divided"
    also = ", or train it at twice its width (--width 2), from models of its own width"
    return WidthError(
        f"{type(full).__name__} cannot be built at {width} of its width "
        f"({'; '.join(dict.fromkeys(problems))})",
        f"{remedy}{also if width < 1 else ''}.",
    )


_NO_WAY = (sys.maxsize, 0)


def _troubles(create: Factory, full: nn.Module, way: Narrowing) -> tuple[int, int]:
    """Return how many conflicts and causes of an error a way of scaling has."""
    size = getattr(full, "pretrained_cfg", {}).get("input_size")
    if size is None:  # the inputs of the model are not known
        return 0, 0
    try:
        with torch.device("cpu"):
            twins = [zeros(create), zeros(partial(way.build, create, full))]
            narrow, wide = twins[::-1] if way.width < 1 else twins
            found = find_structure(narrow, wide, torch.zeros(1, *size))
    except CouplingError:  # the twins do not run the same operations
        return _NO_WAY
    return len(found.conflicts), len(found.inexact)


def _ways(create: Factory, full: nn.Module, width: Fraction) -> Iterator[Narrowing]:
    """Yield what is tried: all arguments that are widths, the layers, all arguments but one."""
    every = Narrowing(width=width, by="arguments")
    yield every
    yield dataclasses.replace(every, by="modules")
    yield dataclasses.replace(every, by="layers")
    yield dataclasses.replace(every, by="attributes")
    names: set[str] = set()

    def see(name: str, size: int) -> int:
        names.update({name} if is_width(name) else ())
        return size

    for name, value in list(constructor_arguments(create, type(full)).items())[1:]:
        change_widths(value, name, see)
    heads = frozenset(name for name in names if "head" in name)
    single = (frozenset({name}) for name in sorted(names - heads))
    for skipped in (*single, heads):  # heads of half the dimension would mix the branches
        if skipped and skipped != names:
            yield dataclasses.replace(every, skipped=skipped)
    yield dataclasses.replace(every, by="modules", skipped=heads | _HEADS_INSIDE)


def kept_axes(model: nn.Module, full: nn.Module, width: Fraction) -> tuple[str, ...]:
    """Refuse a model that is not the full one with scaled axes; return weights with kept axes."""
    keep = sizes_to_keep(full)
    state, wanted = model.state_dict(), full.state_dict()
    if state.keys() != wanted.keys():
        raise WidthError("it has other tensors than at full width", "Use another model.")
    kept = _kept_groups(model, full)
    for name, tensor in wanted.items():
        pairs = list(zip(state[name].shape, tensor.shape, strict=False))
        if state[name].ndim != tensor.ndim or any(n not in (w, w * width) for n, w in pairs):
            shapes = tuple(state[name].shape), tuple(tensor.shape)
            raise WidthError(f"{name} becomes {shapes[0]} of {shapes[1]}", "Use another model.")
        same = any(n == w and w not in keep for n, w in pairs[:2])
        if same and tensor.ndim > 1 and name.endswith("weight"):
            kept.append(name)
    sizes = [sum(p.numel() for p in m.parameters()) for m in (model, full)]
    if min(sizes) > 0.7 * max(sizes):
        raise WidthError(
            f"it has {sizes[0] / sizes[1]:.0%} of its parameters: {', '.join(kept[:3])} stay",
            "Use another model.",
        )
    return tuple(kept)


def _kept_groups(model: nn.Module, full: nn.Module) -> list[str]:
    """Return the norms whose groups have another size than at full width."""
    mine: dict[str, Any] = dict(model.named_modules())
    return [
        path
        for path, norm in full.named_modules()
        if isinstance(norm, nn.GroupNorm) and norm.num_groups > 1
        and mine[path].num_channels * norm.num_groups != norm.num_channels * mine[path].num_groups
    ]  # fmt: skip


def _check_runs(model: nn.Module, full: nn.Module) -> None:
    """Refuse a model that does not run where the full one does."""
    size = getattr(full, "pretrained_cfg", {}).get("input_size", (3, 224, 224))
    image = torch.empty(1, *size, device=next(model.parameters()).device)
    try:
        _run(model, image)
    except Exception:  # forward passes raise many types of errors
        try:
            _run(full, image)
        except Exception:  # on the meta device some models cannot run at all
            return
        raise


@torch.no_grad()
def _run(model: nn.Module, image: torch.Tensor) -> None:
    with evaluating(model):
        model(image)
