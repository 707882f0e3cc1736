"""Training speeds of a plan's levels on one device, and the seconds that follow from them.

The models of a level train in turn, or side by side, on one device. If they share their batches,
each image is decoded once for all of them, else once for each. So a level takes

    seconds = max(models x epochs x images / images per second of the device,
                  passes decoded x images / images per second of the loader)
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite
from typing import Any, Literal

from rbdc.errors import PlanError
from rbdc.models import ModelSpec
from rbdc.plan.schedule import TRAINING_PASSES

CACHED = "measured before"  # the detail of a measured speed that was read, not measured now
Source = Literal["measured", "table", "interpolated", "extrapolated", "given", "assumed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelSpeed:
    """How fast one device trains the models of one level."""

    model: ModelSpec
    images_per_second: float
    source: Source
    detail: str = ""
    """Where the speed comes from, for people: which rows of a table, or how it was measured."""
    batch_size: int | None = None
    """Images per step that the speed was measured with; None if unknown."""
    memory_bytes: int | None = None
    """Peak memory of a training step with this batch; None if unknown."""

    def __post_init__(self) -> None:
        check_positive("images per second", self.images_per_second)


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """Speeds of the levels on one device, target first."""

    device: str
    """The device for people: its name, or the table that the speeds are from."""
    levels: tuple[LevelSpeed, ...]
    loader: float | None = None
    """Images per second that the data loader gives; None: never the limit."""
    peak_flops_per_second: float | None = None
    """FLOP/s of a large matrix product on the device; None if unknown."""
    dtype: str = ""
    """Data type of the measured training and of the matrix product."""

    def __post_init__(self) -> None:
        if self.loader is not None:
            check_positive("the loader's images per second", self.loader)

    @property
    def images_per_second(self) -> tuple[float, ...]:
        """Images per second of each level, target first."""
        return tuple(level.images_per_second for level in self.levels)

    def seconds(self, level: int, models: int, images: float, *, shared: bool) -> float:
        """Return the seconds to train `models` models of a level on `images` images each."""
        return max(self._seconds(level, models, images, shared=shared))

    def total_seconds(
        self, models: Sequence[int], epochs: Sequence[float], images: int, *, shared: bool
    ) -> float:
        """Return the seconds of all levels, from models and epochs per level, target first."""
        return sum(
            self.seconds(level, number, count * images, shared=shared)
            for level, (number, count) in enumerate(zip(models, epochs, strict=True))
        )

    def loader_bound(self, level: int, models: int, images: float, *, shared: bool) -> bool:
        """Return whether the loader, not the device, decides how long a level takes."""
        compute, decoding = self._seconds(level, models, images, shared=shared)
        return decoding > compute

    def _seconds(
        self, level: int, models: int, images: float, *, shared: bool
    ) -> tuple[float, float]:
        decoded = images if shared else models * images
        compute = models * images / self.levels[level].images_per_second
        return compute, decoded / (self.loader or inf)

    def peak_share(self, level: int, forward_flops: int) -> float | None:
        """Return the FLOP/s of a level's training over the device's peak; None if unknown."""
        if self.peak_flops_per_second is None:
            return None
        speed = self.levels[level].images_per_second
        return TRAINING_PASSES * forward_flops * speed / self.peak_flops_per_second

    def to_json(self) -> dict[str, Any]:
        """Return the speeds as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Speeds":
        """Return the speeds that `to_json` wrote."""
        levels = tuple(
            LevelSpeed(**{**level, "model": ModelSpec(**level["model"])})
            for level in content["levels"]
        )
        return cls(**{**content, "levels": levels})


def assumed_speeds(
    levels: Sequence[ModelSpec],
    forward_flops: Sequence[int],
    given: Sequence[float] = (),
    *,
    flops_per_second: float,
    narrow_efficiency: float,
    loader: float | None = None,
) -> Speeds:
    """Return speeds computed from FLOPs where none are given.

    `given` has one number for each level, target first, or only the target's, or none. The target
    runs at `flops_per_second`, and each model at `narrow_efficiency` times the FLOPs per second of
    the next wider model.
    """
    if len(given) not in (0, 1, len(levels)):
        raise PlanError(
            f"images per second has {len(given)} numbers, and the plan has {len(levels)} levels",
            "Give one number, the target's, or one for each level, the target first.",
        )
    first = forward_flops[0]
    target = given[0] if given else flops_per_second / TRAINING_PASSES / first
    found = []
    for level, (model, flops) in enumerate(zip(levels, forward_flops, strict=True)):
        if level < len(given):
            speed = float(given[level])
            found.append(LevelSpeed(model=model, images_per_second=speed, source="given"))
            continue
        found.append(
            LevelSpeed(
                model=model,
                images_per_second=target * first / flops * narrow_efficiency**level,
                source="assumed",
                detail=f"{narrow_efficiency:g} of the FLOP/s of twice its width"
                if level
                else f"{flops_per_second / 1e12:g} TFLOP/s",
            )
        )
    return Speeds(device="one device", levels=tuple(found), loader=loader)


def check_positive(name: str, value: float) -> None:
    """Refuse a number that is not finite or not above 0."""
    if not (isfinite(value) and value > 0):
        raise PlanError(f"{name} is {value:g}, expected more than 0", f"Give a positive {name}.")
