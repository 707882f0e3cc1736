"""A metric of which less is better: its table, its plots, its page, and the end of a run."""

import json
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from playwright.sync_api import Browser
from rich.console import Console

from rbdc.experiments.statistics import statistics_of
from rbdc.metrics import METRICS
from rbdc.report.card import export_run
from rbdc.report.compare import comparison_table, notes, save_comparison_plots
from rbdc.report.figures import draw_curves
from rbdc.report.read import read_run
from rbdc.report.run import result_lines, run_status, status_table
from tests.experiments.test_statistics import perplexity_rows
from tests.report.browsing import visit
from tests.report.test_figures import drawn
from tests.support import change

PERPLEXITY = METRICS["perplexity"]
BEST_LAST = ["slow", "standard", "fast", "at once"]


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "model": {"name": "gpt"},
        "metric": "perplexity",
        "baseline_flops": 1e12,
        "baseline_epochs": 4.0,
        **statistics_of(rows),
        "published": {"standard 1": 21.5},
        "tuning": [],
    }


@pytest.fixture
def summary() -> dict[str, Any]:
    return summary_of(perplexity_rows())


def test_the_table(summary: dict[str, Any]) -> None:
    console = Console(width=140, file=StringIO(), record=True, force_terminal=True)
    console.print(comparison_table(summary))
    styled, text = console.export_text(styles=True, clear=False), console.export_text()
    assert (
        "perplexity" in text and "lower is better" in text and "%" not in text.split("FLOPs of")[0]
    )
    assert "16.00 ± 2.48" in text and "-5.00 ± 0.00" in text and "21.50" in text
    green, red = "\x1b[32m", "\x1b[31m"
    assert f"{green} -5.00 ± 0.00" in styled and f"{red}+10.00 ± 0.00" in styled
    reached = "fast reaches standard training's best perplexity at 0.75 of the FLOPs"
    assert f"{reached} and 0.75 of the time" in text
    assert "slow does not reach standard training's best perplexity" in text
    assert "at once is better than standard training's best perplexity already at its" in text


def test_what_is_not_finished_is_not_judged() -> None:
    rows = perplexity_rows()
    last = max(row["budget"] for row in rows if row["protocol"] == "slow")
    one = next(r for r in rows if (r["protocol"], r["budget"]) == ("slow", last))
    one["score"] = None
    lines = notes(summary_of(rows))
    goal = "standard training's best perplexity"
    assert f"slow has not reached {goal} yet (1 trial unfinished)" in lines
    assert any(line.startswith("fast reaches") for line in lines)
    one["failed"] = True  # it will not come
    assert any(line.startswith("slow does not reach") for line in notes(summary_of(rows)))
    next(r for r in rows if r["protocol"] == "standard")["score"] = None
    assert not any(line.startswith("fast reaches") for line in notes(summary_of(rows)))


def test_two_seeds_are_shown_as_points_with_their_range(figures: list[Any], tmp_path: Path) -> None:
    two = summary_of([row for row in perplexity_rows() if row["seed"] < 2])
    console = Console(width=140, file=StringIO(), record=True)
    console.print(comparison_table(two))
    text = console.export_text()
    assert "±" not in text and "(15.00 to 16.00)" in text and "95 %" not in text
    save_comparison_plots(two, tmp_path, ends=("png",))
    curves = figures[0].axes[0]
    dots = [line for line in curves.lines if line.get_marker() == "."]
    assert sum(len(line.get_ydata()) for line in dots) == len(two["rows"])


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures instead of their files."""
    kept: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_args, **_more: kept.append(figure))
    return kept


def test_the_plots(summary: dict[str, Any], figures: list[Any], tmp_path: Path) -> None:
    save_comparison_plots(summary, tmp_path, ends=("png",))
    for figure in figures:
        assert figure.axes[0].get_ylabel() == "perplexity (lower is better)"
    curves = {box.get_label(): box.lines[0].get_ydata() for box in figures[0].axes[0].containers}
    assert list(curves["fast"]) == [26.0, 16.0]  # not in percent
    assert len(figures) == 2 and "time" in figures[1].axes[0].get_xlabel()
    times = {box.get_label(): box.lines[0].get_xdata() for box in figures[1].axes[0].containers}
    assert list(times["standard"]) == [0.5, 1.0]  # not in minutes


def test_the_best_is_on_top(summary: dict[str, Any], figures: list[Any], tmp_path: Path) -> None:
    one = summary_of([row for row in summary["rows"] if row["budget"] == 1.0])
    save_comparison_plots(one, tmp_path, ends=("png",))
    labels = [label.get_text() for label in figures[0].axes[0].get_yticklabels()]
    assert labels == [f"{name} (1)" for name in BEST_LAST]
    top1 = {**one, "metric": "top1"}
    save_comparison_plots(top1, tmp_path, ends=("png",))
    labels = [label.get_text() for label in figures[2].axes[0].get_yticklabels()]
    assert labels == [f"{name} (1)" for name in reversed(BEST_LAST)]


@pytest.fixture
def by_perplexity(finished: Path, tmp_path: Path) -> Path:
    """The finished run as one of a language model: its perplexity follows from its loss."""
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    nodes = json.loads((run / "run.json").read_text())["nodes"]
    change(run / "run.json", nodes=[{**node, "metrics": ["perplexity"]} for node in nodes])
    result = json.loads((run / "result.json").read_text())
    for node in nodes:
        folder = run / node["folder"]
        own = json.loads((folder / "result.json").read_text())
        values = {"perplexity": 10 + own["metrics"]["loss"], "loss": own["metrics"]["loss"]}
        best = {"step": 5, "epoch": 1.0, "perplexity": 9.75}
        change(folder / "result.json", metrics=values, best=best)
        result["nodes"][node["name"]] |= {"metrics": values, "best": best}
        if (log := folder / "summary.csv").exists():
            head, *rows = log.read_text().splitlines()
            log.write_text("\n".join([head.replace("top1", "perplexity"), *rows]))
    ours, theirs = {"perplexity": 10.0}, {"perplexity": 12.5}
    best = {"step": 5, "epoch": 1.0, "perplexity": 9.75}
    standard = {**result["standard"], "metrics": theirs, "best": best}
    change(run / "result.json", nodes=result["nodes"], metrics=ours, metric="perplexity",
           standard=standard, best=best, relative_time=1.324)  # fmt: skip
    return run


def test_the_end_of_a_run(by_perplexity: Path, tmp_path: Path) -> None:
    result = json.loads((by_perplexity / "result.json").read_text())
    text = "\n".join(result_lines(result, tmp_path))
    assert "RBDC:      perplexity 10.00 with" in text and "standard:  perplexity 12.50" in text
    assert "2.50 less (better) for RBDC at the same FLOPs, in 1.32 times the time\n" in text
    half = "\n".join(result_lines({**result, "relative_flops": 0.5}, tmp_path))
    assert "for RBDC with 0.50 of its FLOPs, in 1.32 times the time\n" in half
    old = "\n".join(result_lines({**result, "relative_time": None}, tmp_path))
    assert "2.50 less (better) for RBDC at the same FLOPs\n" in old
    console = Console(width=110, file=StringIO(), record=True)
    console.print(status_table(run_status(by_perplexity)))
    table = console.export_text()
    assert "perplexity" in table and "top-1" not in table
    card = (export_run(by_perplexity, tmp_path / "out") / "README.md").read_text()
    assert "2.50 less (better) for this model" in card and "type: perplexity" in card
    assert "at the same FLOPs, in 1.32 times the time: one" in card
    assert "best perplexity during training" in card and "top-1" not in card


def test_curves(by_perplexity: Path) -> None:
    run = read_run(by_perplexity)
    axes = drawn(draw_curves(run["nodes"].values(), baseline_flops=1.0)).axes[0]
    assert axes.get_ylabel() == "perplexity (lower is better)"
    target = next(node for node in run["nodes"].values() if node["name"] == "target")
    assert any(line.get_ydata()[0] == target["start"]["perplexity"] for line in axes.lines)


def test_the_page_of_a_run(browser: Browser, by_perplexity: Path, tmp_path: Path) -> None:
    seen = visit(browser, [by_perplexity], tmp_path)
    assert "RBDC: perplexity 10.00 with" in seen.text("#verdict")
    assert (
        "; 2.50 less (better) for RBDC with 1.00 of its FLOPs, in 1.32 times the time."
        in seen.text("#verdict")
    )
    run = read_run(by_perplexity)
    target = next(node for node in run["nodes"].values() if node["name"] == "target")
    start, end = (target[which]["perplexity"] for which in ("start", "metrics"))
    drawn = seen.page.locator("svg.tree .node[aria-label^='target']")
    assert f"{start:.2f} → {end:.2f}" in (drawn.text_content() or "")
    whats = seen.page.locator("#curves [data-choice=what] option").all_inner_texts()
    assert whats == ["perplexity", "top-5 accuracy", "test loss", "training loss", "learning rate"]
    traces = [trace for trace in seen.points("curves") if trace["name"] == "width 1"]
    assert traces[0]["y"] == pytest.approx([start, *target["history"]["perplexity"]])
    drawn.click()
    assert "best perplexity\t9.75 at epoch 1" in seen.text("#node")
    assert seen.points("node")[-1]["name"] == "perplexity (lower is better)"
    assert "top-1" not in seen.text("main") and seen.problems == []


def test_the_page_of_a_comparison(
    browser: Browser, by_perplexity: Path, summary: dict[str, Any], tmp_path: Path
) -> None:
    change(by_perplexity / "run.json", kind="compare")
    (by_perplexity / "result.json").write_text(json.dumps(summary))
    seen = visit(browser, [by_perplexity], tmp_path)
    rows = seen.page.locator("#compare table").first.locator("tbody tr").all()
    cells = {tuple(row.locator("td").all_inner_texts()[:2]): row for row in rows}
    fast, slow = cells["fast", "1.000"], cells["slow", "1.000"]
    # at equal FLOPs, and at equal time, which is the same here
    assert fast.locator(".better").all_inner_texts() == ["−5.00 ± 0.00"] * 2
    assert slow.locator(".worse").all_inner_texts() == ["+10.00 ± 0.00"] * 2
    assert (
        "16.00 ± 2.48" in fast.inner_text() and "21.50" in cells["standard", "1.000"].inner_text()
    )
    assert "FLOPs and time to reach standard training's best perplexity" in seen.text("#compare")
    curves = {trace["name"]: trace["y"] for trace in seen.points("trade")}
    assert curves["fast"] == [26.0, 16.0]
    one = summary_of([row for row in summary["rows"] if row["budget"] == 1.0])
    (by_perplexity / "result.json").write_text(json.dumps(one))
    again = visit(browser, [by_perplexity], tmp_path)
    (forest,) = again.points("trade")
    assert forest["y"] == [f"{name} (1)" for name in BEST_LAST]  # Plotly draws upwards
    assert seen.problems == again.problems == []
