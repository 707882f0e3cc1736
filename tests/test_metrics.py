"""Metrics: which way is better, and how a score is printed."""

import pytest

from rbdc.errors import RbdcError
from rbdc.metrics import METRICS, Metric, final_scores, find_metric

TOP1, PERPLEXITY = METRICS["top1"], METRICS["perplexity"]


@pytest.mark.parametrize(("metric", "best"), [(TOP1, 3.0), (PERPLEXITY, 1.0)])
def test_the_metric_says_which_way_is_better(metric: Metric, best: float) -> None:
    values = [2.0, 1.0, 3.0]
    assert metric.best(values, float) == best == metric.worst_first(values, float)[-1]
    assert metric.is_better(best, 2.0) and not metric.is_better(2.0, best)
    assert not metric.is_better(best, best)
    tied = [("first", 1.0), ("second", 1.0)]
    assert metric.best(tied, lambda item: item[1])[0] == "first"


def test_scores_as_people_read_them() -> None:
    assert TOP1.text(0.8875, 0.0123) == "88.75% ± 1.23" and TOP1.text(None, absent="–") == "–"
    assert TOP1.difference(-0.005, 0.001) == "-0.50 ± 0.10" and TOP1.difference(None) == ""
    assert TOP1.axis == "top-1 accuracy (%)"
    assert PERPLEXITY.text(12.346) == "12.35"
    assert PERPLEXITY.difference(1.5) == "+1.50"
    assert PERPLEXITY.axis == "perplexity (lower is better)"
    assert PERPLEXITY.to_json()["axis"] == PERPLEXITY.axis


def test_two_scores_compared() -> None:
    assert TOP1.compared(0.3, 0.2) == "10.00 points more"
    assert TOP1.compared(0.3, 0.5) == "20.00 points less"
    assert TOP1.compared(0.3, 0.3) == "no difference"
    assert PERPLEXITY.compared(10.0, 12.5) == "2.50 less (better)"
    assert PERPLEXITY.compared(12.5, 10.0) == "2.50 more (worse)"


def test_the_scores_of_ema_weights_come_first() -> None:
    row = {"step": 3, "loss": 1.0, "top1": 0.5, "ema_top1": 0.6}
    assert final_scores(row) == {"top1": 0.6, "loss": 1.0}
    assert final_scores(row, ["loss", "top5"]) == {"loss": 1.0}


def test_an_unknown_metric_is_refused() -> None:
    with pytest.raises(RbdcError, match="'speed' is no known metric\\nKnown are top1, top5"):
        find_metric("speed")
