"""Metrics as data: what a score is called, which way is better, and how it is printed.

Tables, statistics, figures and the page ask a metric, and know none of them by name. A new metric
is one entry in `METRICS`. Nothing here needs torch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from rbdc.errors import RbdcError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One way to measure how good a model is."""

    name: str
    """Its key in results, logs and tables."""
    label: str
    """Its short name for people, as a table's column or a line of the terminal has it."""
    title: str
    """Its long name, as a plot or a model card has it."""
    higher_is_better: bool = True
    unit: str = ""
    """Printed behind a value."""
    scale: float = 1.0
    """Factor from the stored value to the printed one: 100 for a share printed in percent."""
    decimals: int = 2
    """Digits printed behind the point."""
    limits: tuple[float | None, float | None] = (0.0, None)
    """Smallest and largest value that it can have; None where there is no end."""
    hub_type: str = ""
    """Its identifier in a Hugging Face model card; empty keeps it out of the card."""

    @property
    def axis(self) -> str:
        """Label of a plot's axis: the title with its unit, and a note where lower is better."""
        notes = [self.unit, "" if self.higher_is_better else "lower is better"]
        known = ", ".join(filter(None, notes))
        return f"{self.title} ({known})" if known else self.title

    def is_better(self, value: float, than: float) -> bool:
        """Return whether `value` is strictly better than `than`."""
        return value > than if self.higher_is_better else value < than

    def best(self, items: Iterable[T], score: Callable[[T], float]) -> T:
        """Return the item with the best score, the first of equal ones."""
        return (max if self.higher_is_better else min)(items, key=score)

    def worst_first(self, items: Iterable[T], score: Callable[[T], float]) -> list[T]:
        """Return the items sorted by score, the best one last."""
        return sorted(items, key=score, reverse=not self.higher_is_better)

    def text(
        self,
        value: float | None,
        interval: float | None = None,
        ends: Sequence[float] | None = None,
        absent: str = "",
    ) -> str:
        """Return a value as people read it: '74.60% ± 1.20'; `absent` if there is none.

        Without an interval its range is shown, where that is known: '74.60% (73.90 to 75.30)'.
        """
        if value is None:
            return absent
        return f"{self._number(value)}{self.unit}{self._spread(interval, ends)}"

    def difference(
        self,
        gap: float | None,
        interval: float | None = None,
        ends: Sequence[float] | None = None,
    ) -> str:
        """Return a difference with its sign: '+1.20 ± 0.30', or '+1.20 (-0.10 to +2.50)'."""
        if gap is None:
            return ""
        return f"{self._number(gap, '+')}{self._spread(interval, ends, '+')}"

    def compared(self, ours: float, theirs: float) -> str:
        """Return how far `ours` is from `theirs`: '0.55 points more', '1.20 less (better)'."""
        gap = ours - theirs
        if gap == 0:
            return "no difference"
        points = " points" if self.unit == "%" else ""
        verdict = f" ({'better' if gap < 0 else 'worse'})" if not self.higher_is_better else ""
        return f"{self._number(abs(gap))}{points} {'more' if gap > 0 else 'less'}{verdict}"

    def to_json(self) -> dict[str, Any]:
        """Return all fields and the axis label, for the page's JavaScript."""
        return {**asdict(self), "axis": self.axis}

    def _number(self, value: float, sign: str = "") -> str:
        return f"{self.scale * value:{sign}.{self.decimals}f}"

    def _spread(
        self, half_width: float | None, ends: Sequence[float] | None, sign: str = ""
    ) -> str:
        if half_width is not None:
            return f" ± {self._number(half_width)}"
        return f" ({' to '.join(self._number(end, sign) for end in ends)})" if ends else ""


def _share(name: str, label: str, title: str, hub_type: str = "") -> Metric:
    """Return a metric between 0 and 1, printed in percent."""
    return Metric(
        name=name,
        label=label,
        title=title,
        unit="%",
        scale=100.0,
        limits=(0.0, 1.0),
        hub_type=hub_type,
    )


METRICS = {
    metric.name: metric
    for metric in (
        _share("top1", "top-1", "top-1 accuracy", "accuracy"),
        _share("top5", "top-5", "top-5 accuracy", "accuracy"),
        _share("mask_map", "mask mAP", "mask mAP"),
        _share("box_map", "box mAP", "box mAP"),
        Metric(name="loss", label="test loss", title="test loss", decimals=3,
               higher_is_better=False),
        Metric(name="perplexity", label="perplexity", title="perplexity",
               higher_is_better=False, hub_type="perplexity"),
        Metric(name="bits_per_byte", label="bits/byte", title="bits per byte", decimals=3,
               higher_is_better=False, hub_type="bits_per_byte"),
    )
}  # fmt: skip


def find_metric(name: str) -> Metric:
    """Return the metric of this name; refuse an unknown one."""
    if name not in METRICS:
        raise RbdcError(f"{name!r} is no known metric", f"Known are {', '.join(METRICS)}.")
    return METRICS[name]


def final_scores(row: Mapping[str, Any], names: Iterable[str] = METRICS) -> dict[str, Any]:
    """Return the metrics of one evaluation: those of the EMA weights, where there are any."""
    return {name: row.get(f"ema_{name}", row[name]) for name in names if name in row}
