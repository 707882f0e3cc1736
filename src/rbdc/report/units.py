"""Format numbers as people read them."""

from collections.abc import Mapping
from math import ceil
from typing import Any

WAITED_SHARE = 0.15  # of the time, below which a loader keeps up
WAITED_STEPS = 20  # at the start, batches are waited for in any case

_UNITS = ((1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def readable_flops(flops: float) -> str:
    """Return FLOPs with a unit: '35.17 GFLOPs', '1.4 ZFLOPs'."""
    return f"{scaled(flops)}FLOPs"


def scaled(value: float) -> str:
    """Return a number with four digits and its SI prefix: '35.17 G'."""
    for size, prefix in _UNITS:
        if value >= size:
            return f"{value / size:.4g} {prefix}"
    return f"{value:.0f} "


def readable_duration(seconds: float) -> str:
    """Return minutes and seconds, and hours if there are any: '4:05', '12:00:00'."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def speed_text(images_per_second: float, sequence_length: int | None) -> str:
    """Return a training's speed: '412 images/s', or '52,736 tokens/s' for sequences of tokens."""
    unit = "tokens" if sequence_length else "images"
    return f"{images_per_second * (sequence_length or 1):,.0f} {unit}/s"


def counted(number: int, what: str) -> str:
    """Return a number of things: '1 device', '1,024 devices'."""
    return f"{number:,} {what}{'s' if number != 1 else ''}"


def loader_note(progress: Mapping[str, Any]) -> str:
    """Return what to do if a training waits for its images; empty if it does not.

    The device could take what it takes now, divided by the share of the time that it works.
    """
    waited, speed, workers = (
        progress.get(k, 0) for k in ("waited", "images_per_second", "workers")
    )
    if progress["step"] < WAITED_STEPS or waited < WAITED_SHARE or not speed:
        return ""
    could = speed / max(1 - waited, 1e-3)
    more = max(1, ceil(max(workers, 1) * (could / speed - 1)))
    return (
        f"loader-bound: {speed:,.0f} of {could:,.0f} images/s; {counted(more, 'more worker')} "
        f"(--workers {workers + more}), or --in-memory"
    )
