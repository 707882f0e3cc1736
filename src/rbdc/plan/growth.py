"""The models of a plan's stages: what is narrower, shallower or of lower resolution at each level.

By default every level down has half the width (`width`), half the blocks, rounded up (`depth`), and
smaller images (`resolution`). A recipe file can give every stage in full instead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, isclose
from typing import Any, cast

from rbdc.errors import PlanError, WidthError
from rbdc.models import (
    ModelSpec,
    check_steps,
    depths,
    family,
    image_side,
    patch_side,
    size_argument,
    sized,
)
from rbdc.models.language import SEQUENCE
from rbdc.settings import Axis, Request, StageSettings

PARENTS = 2  # of a coupled model
FINEST = 8  # levels of resolution differ by a power of two of at most 1/8 of the side


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """What grows from stage to stage."""

    axes: tuple[Axis, ...] = ("width",)
    narrow_size: float = Request.narrow_size
    """Image side, or tokens per sequence, of a level over the next one's, where it grows."""
    stages: tuple[StageSettings, ...] = ()
    """Every stage in full, leaves first; empty: they follow from the axes."""

    @classmethod
    def of(cls, request: Request, spec: ModelSpec) -> "Growth":
        """Return the growth that a request asks for, of this target."""
        stages = tuple(StageSettings(**stage) for stage in request.stages)
        asked = family(spec).grow if request.grow == ("auto",) else request.grow
        growth = cls(
            axes=cast(tuple[Axis, ...], asked), narrow_size=request.narrow_size, stages=stages
        )
        if request.grow != ("auto",):
            return growth
        able = (axis for axis in growth.axes if axis == "width" or growth._shrinks(spec, axis))
        return replace(growth, axes=tuple(able))

    def _shrinks(self, spec: ModelSpec, axis: Axis) -> bool:
        """Return whether the model is smaller along an axis one level down."""
        return replace(self, axes=(axis,))._level(spec, 1) != spec

    @property
    def shares(self) -> list[float] | None:
        """Shares of the FLOPs by level, target first; None if the ratio decides."""
        given = [stage.share for stage in reversed(self.stages)]
        known = [share for share in given if share is not None]
        if not known:
            return None
        if len(known) < len(given) or not isclose(sum(known), 1, abs_tol=1e-3):
            raise PlanError(
                f"the shares of the stages are {', '.join(str(share) for share in given[::-1])}",
                "Give every stage a share, 1 in all, or none of them.",
            )
        return [share / sum(known) for share in known]

    def levels(self, spec: ModelSpec, steps: int) -> list[ModelSpec]:
        """Return the model of each level, target first, after checking that they can be grown."""
        if self.stages:
            found = [_stage_model(spec, stage) for stage in reversed(self.stages)]
            if found[0] != spec:
                raise PlanError(
                    f"the last stage is {describe(found[0])}, and the target {describe(spec)}",
                    "Leave width, depth and input size out of the last stage.",
                )
        else:
            if "width" in self.axes:
                check_steps(spec, steps)
            found = [self._level(spec, level) for level in range(steps + 1)]
            self._check_axes(spec, found)
        for wide, narrow in pairwise(found):
            _check_growth(narrow, wide)
        return found

    def most_steps(self, spec: ModelSpec) -> int:
        """Return how often the model can be halved."""
        if self.stages or "width" not in self.axes:
            raise PlanError(
                "the number of steps has no limit of its own without growth in width",
                "Give --steps N.",
            )
        steps = 0
        while True:
            try:
                check_steps(spec, steps + 1)
            except WidthError:
                return steps
            steps += 1

    def _level(self, spec: ModelSpec, level: int) -> ModelSpec:
        if not level:
            return spec
        model = spec.scaled(PARENTS**-level) if "width" in self.axes else spec
        if "depth" in self.axes:
            _check_depth(spec)
            model = _with(model, _shallower(depths(spec), level))
        if "resolution" in self.axes:
            side = image_side(spec) * self.narrow_size**level
            grain = patch_side(spec) or 1 << max(0, (image_side(spec) // FINEST).bit_length() - 1)
            model = sized(model, max(1, round(side / grain)) * grain)
        return model

    def _check_axes(self, spec: ModelSpec, found: Sequence[ModelSpec]) -> None:
        """Refuse an axis along which nothing grows."""
        if len(found) == 1:
            return
        if "depth" in self.axes and depths(found[-1]) == depths(spec):
            raise PlanError(
                f"{spec} has {depth_of(spec)} blocks, which cannot be halved",
                "Leave depth out of --grow, or choose a deeper model.",
            )
        if "resolution" in self.axes and image_side(found[-1]) == image_side(spec):
            raise PlanError(
                f"{spec} takes inputs of {size_of(spec)}, and its leaves would, too",
                f"Give a smaller --narrow-size than {self.narrow_size:g}, or leave resolution out "
                "of --grow.",
            )


def models_of(levels: Sequence[ModelSpec]) -> list[int]:
    """Return the number of models of each level, target first: twice as many at half the width."""
    return [round(levels[0].width / level.width) for level in levels]


def changes(before: ModelSpec, after: ModelSpec) -> tuple[Axis, ...]:
    """Return the axes along which a model grows into the next stage's."""
    found: list[Axis] = []
    if before.width != after.width:
        found.append("width")
    if depths(before) != depths(after):
        found.append("depth")
    if image_side(before) != image_side(after):
        found.append("resolution")
    return tuple(found)


def describe(spec: ModelSpec) -> str:
    """Return a model's width, depth and resolution for people."""
    blocks = depth_of(spec)
    return f"width {spec.width:g}, {blocks and f'{blocks} blocks, '}{size_of(spec)}"


def size_of(spec: ModelSpec) -> str:
    """Return the size of a model's inputs for people."""
    unit = "px" if size_argument(spec) == "img_size" else "tokens"
    return f"{image_side(spec)} {unit}"


def depth_of(spec: ModelSpec) -> str:
    """Return the number of blocks for people: 12, or 3-4-6-3; empty if no argument says it."""
    return "-".join(str(number) for value in depths(spec).values() for number in _numbers(value))


def _with(spec: ModelSpec, arguments: Mapping[str, Any]) -> ModelSpec:
    return replace(spec, arguments={**spec.arguments, **arguments})


def _shallower(
    known: Mapping[str, int | tuple[int, ...]], level: int
) -> dict[str, int | tuple[int, ...]]:
    """Halve depths `level` times, rounded up."""

    def halved(blocks: int) -> int:
        return ceil(blocks / (1 << level))

    return {
        name: tuple(map(halved, value)) if isinstance(value, tuple) else halved(value)
        for name, value in known.items()
    }


def _check_depth(spec: ModelSpec) -> None:
    """Refuse an architecture whose constructor does not take the number of its blocks."""
    if not depths(spec):
        raise PlanError(
            f"{spec} has no blocks that repeat, or its constructor does not take their number",
            "Leave depth out of --grow, or choose another model.",
        )


def _stage_model(spec: ModelSpec, stage: StageSettings) -> ModelSpec:
    model = spec.scaled(stage.width)
    if stage.depth is not None:
        _check_depth(spec)
        ((name, known),) = depths(spec).items()
        given = stage.depth
        if isinstance(given, int) and isinstance(known, tuple):
            given = (given,) * len(known)
        if isinstance(given, tuple) != isinstance(known, tuple) or (
            isinstance(given, tuple) and isinstance(known, tuple) and len(given) != len(known)
        ):
            raise PlanError(
                f"a stage has depth {stage.depth}, and {spec} has {depth_of(spec)} blocks",
                "Give as many numbers as the model has, or one for all.",
            )
        if given != known:
            model = _with(model, {name: given})
    sizes = {"img_size": stage.img_size, SEQUENCE: stage.sequence_length}
    size = sizes.pop(size_argument(spec))
    if any(sizes.values()):
        raise PlanError(
            f"a stage has {next(iter(sizes))}, which {spec} does not take",
            f"Give {size_argument(spec)} instead.",
        )
    return model if size in (None, image_side(spec)) else sized(model, size)


def _check_growth(before: ModelSpec, after: ModelSpec) -> None:
    """Refuse a stage that shrinks, grows too fast, or whose images cannot be cut into patches."""
    if after.width / before.width not in (1, PARENTS):
        raise PlanError(
            f"a stage has width {before.width:g} and the next one {after.width:g}",
            "From stage to stage the width stays or doubles.",
        )
    both = zip(depths(before).values(), depths(after).values(), strict=True)
    pairs = [pair for was, now in both for pair in zip(_numbers(was), _numbers(now), strict=True)]
    if any(was > now for was, now in pairs) or image_side(before) > image_side(after):
        raise PlanError(
            f"a stage has {describe(before)}, and the next one {describe(after)}",
            "Stages never shrink: order them from the smallest to the target.",
        )
    patch = patch_side(before)
    if patch and image_side(before) % patch:
        raise PlanError(
            f"images of {image_side(before)} px cannot be cut into patches of {patch} px",
            f"Give a multiple of {patch}.",
        )


def _numbers(value: int | tuple[int, ...]) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else (value,)
