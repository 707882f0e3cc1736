"""Protocols side by side: equal FLOPs, shared jobs, going on, what is missing."""

import csv
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import rbdc
from rbdc.errors import Interrupted, PlanError, RecipeError, RunError, TrainingError
from rbdc.experiments.compare import (
    Comparison,
    ComparisonSpec,
    prepare_comparison,
    run_comparison,
)
from rbdc.experiments.reproduce import (
    experiments,
    imagenet_outline,
    prepare_case,
    read_experiment,
)
from rbdc.experiments.results import flops_of
from rbdc.jobs.engine import Event
from rbdc.jobs.lock import locked
from rbdc.jobs.train import TrainJob
from rbdc.report.compare import comparison_table, save_comparison_plots
from rbdc.report.run import run_status, status_table
from rbdc.runs.run import Where, check
from rbdc.settings import Request
from rbdc.training import Session
from rbdc.training.classification import Classification
from tests.support import QUICK, TINY, own_copy, small_recipe

RESNET = "resnet18d"


def compared(folder: Path, **asked: Any) -> Comparison:
    request = Request(
        model=RESNET,
        model_kwargs=asked.pop("model_kwargs", TINY[RESNET]),
        data=str(folder),
        in_memory=True,
        baseline_epochs=4.0,
        fuse=asked.pop("fuse", "auto"),
    )
    given = {"protocols": ("standard", "rbdc:1", "net2net"), "budgets": (0.5, 1.0), "seeds": 2}
    return prepare_comparison(
        request, small_recipe(lr=asked.pop("lr", 1e-3)), ComparisonSpec(**{**given, **asked})
    )


def run(comparison: Comparison, output: Path, watch: Any = lambda _event: None) -> dict[str, Any]:
    where = Where(machine=QUICK, jobs=1)
    check(comparison.run(), output, where)
    return run_comparison(comparison, output, where, watch)


def finished_comparison(folder: Path, factory: pytest.TempPathFactory) -> Path:
    return own_copy(factory, "comparison", lambda output: run(compared(folder), output))


@pytest.fixture(scope="module")
def done(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    output = finished_comparison(folder, tmp_path_factory)
    return output, run(compared(folder), output)  # nothing is left to train


def test_everyone_spends_the_same(done: tuple[Path, dict[str, Any]]) -> None:
    """All parents are paid for; a training is a whole number of steps, five an epoch."""
    for row in done[1]["rows"]:
        assert row["flops"] == pytest.approx(row["budget"], abs=0.08)
        assert row["flops"] == pytest.approx(sum(row["flops_by_level"].values()))
        assert 0 <= row["score"] <= row["best_score"] <= 1 and row["seconds"] > 0
    by_protocol = {row["protocol"]: row for row in done[1]["rows"] if row["budget"] == 1.0}
    assert by_protocol["standard"]["epochs"] == {"0": [4.0]}
    assert len(by_protocol["rbdc:1"]["epochs"]["1"]) == 2
    assert len(by_protocol["net2net"]["epochs"]["1"]) == 1
    assert by_protocol["net2net"]["epochs"]["0"][0] > by_protocol["rbdc:1"]["epochs"]["0"][0]


def test_results_are_written_for_people_and_programs(done: tuple[Path, dict[str, Any]]) -> None:
    output, summary = done
    lines = [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]
    assert lines == summary["rows"] and len(lines) == 3 * 2 * 2
    with (output / "results.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [float(row["score"]) for row in table] == [row["score"] for row in lines]
    assert (output / lines[0]["target"] / "model" / "model.safetensors").exists()
    pictures = save_comparison_plots(summary, output)
    assert all(path.stat().st_size > 5000 for path in pictures)


def test_the_same_in_a_call(folder: Path, done: tuple[Path, dict[str, Any]]) -> None:
    """On the same folder with the same settings nothing is left to do."""
    recipe = small_recipe()
    fields = {key: value for key, value in recipe.to_json().items() if value is not None}
    given = {"model": RESNET, "model_kwargs": TINY[RESNET], "data": str(folder), "in_memory": True}
    started: list[Event] = []
    summary = rbdc.compare(
        done[0],
        spec=rbdc.ComparisonSpec(protocols=("standard", "rbdc:1", "net2net"), seeds=2),
        machine=QUICK,
        watch=lambda event: started.append(event) if event.kind == "started" else None,
        transition=("carry",),
        baseline_epochs=4.0,
        grow=("width",),
        ratio=2.0,
        **{**fields, **given, "scale": None, "mean": None, "std": None},
    )
    assert not started and summary["rows"] == done[1]["rows"]


def test_the_table_says_it_all(done: tuple[Path, dict[str, Any]]) -> None:

    console = Console(width=140, record=True, file=StringIO())
    console.print(comparison_table(done[1]))
    text = console.export_text()
    assert "net2net" in text and "2×" in text and "missing" not in text
    assert " to " in text and "±" not in text  # of two seeds the range, not an interval
    assert "standard training's best" in text
    titles = text.splitlines()[1].split()
    for line in done[1]["lines"]:
        assert f" {line['relative_time']:.2f} " in text
    assert "time" in titles and titles[-1] == "seeds"
    console.print(status_table(run_status(done[0])))
    assert "100.0%" in console.export_text()


def test_a_model_that_two_protocols_need_is_trained_once(folder: Path, tmp_path: Path) -> None:
    """Also one that looks at images to widen it, which the wide model pays for."""
    comparison = compared(folder, protocols=("net2net", "random", "gradmax"), seeds=1)
    alone, shared = flops_of(comparison.planned)
    assert len(comparison.run().nodes) == 2 * (1 + 3 * 2) and shared < 0.95 * alone
    trained: list[str] = []

    def watch(event: Event) -> None:
        if event.kind == "started":
            trained.append(event.key)

    summary = run(comparison, tmp_path / "run", watch)
    assert len(trained) == len(set(trained)) == len(comparison.run().nodes)
    assert summary["flops_spent"] < summary["flops_counted"]
    assert [row["flops"] for row in summary["rows"]] == pytest.approx(
        [row["budget"] for row in summary["rows"]], abs=0.08
    )  # counted for each of them


def test_siblings_of_a_comparison_train_as_one_if_asked(folder: Path, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"protocols": ("rbdc:1", "rbdc:1:restart"), "seeds": 1}
    comparison = compared(folder, fuse="on", **asked)
    jobs = [node.job for node in comparison.run().nodes if node.level]
    leaves = [job for job in jobs if isinstance(job, TrainJob)]
    assert len(leaves) == 8 and all(leaf.fused == 2 for leaf in leaves)
    assert not {leaf.key for leaf in leaves} & {
        n.job.key for n in compared(folder, **asked).run().nodes
    }
    rows = run(comparison, tmp_path / "run")["rows"]
    assert len(rows) == 4 and all(row["score"] is not None for row in rows)


def test_more_can_be_added_and_nothing_is_done_twice(
    folder: Path, done: tuple[Path, dict[str, Any]]
) -> None:
    output, summary = done
    started: list[str] = []

    def watch(event: Event) -> None:
        if event.kind == "started":
            started.append(event.key)

    more = run(compared(folder, protocols=("standard", "random"), seeds=2), output, watch)
    assert len(started) == 2 * 2 * 2  # random's growths and targets; its parents were net2net's
    old = [row["score"] for row in summary["rows"] if row["protocol"] == "standard"]
    assert [row["score"] for row in more["rows"] if row["protocol"] == "standard"] == old
    kept = {row["protocol"] for row in more["rows"]}
    assert kept == {"standard", "random", "rbdc:1", "net2net"}  # what was there stays


def test_what_is_refused_leaves_the_results_alone(
    folder: Path, done: tuple[Path, dict[str, Any]]
) -> None:
    output, _ = done
    names = ("results.csv", "results.jsonl", "result.json", "run.json")
    before = {name: (output / name).read_bytes() for name in names}
    with pytest.raises(RunError, match=r"recipe\.lr was 0\.001, now 0\.002"):
        run(compared(folder, lr=2e-3), output)
    with locked(output), pytest.raises(RunError, match="in use"):
        run_elsewhere(folder, output)
    assert before == {name: (output / name).read_bytes() for name in names}


def run_elsewhere(folder: Path, output: Path) -> None:
    """In another process: a process may take its own lock again."""
    forks = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(1, forks, torch.set_num_threads, (1,)) as pool:
        pool.submit(_again, folder, output).result()


def _again(folder: Path, output: Path) -> None:
    run(compared(folder), output)


def test_what_is_missing_is_marked(folder: Path, tmp_path: Path) -> None:
    comparison = compared(folder, protocols=("standard", "rbdc:1"), seeds=1)
    finished: list[str] = []

    def stop(event: Event) -> None:
        if event.kind == "finished":
            finished.append(event.key)
        if len(finished) == 2:
            raise Interrupted("enough")

    with pytest.raises(Interrupted):
        run(comparison, tmp_path / "run", stop)
    summary = json.loads((tmp_path / "run" / "result.json").read_text())
    states = {(r["protocol"], r["budget"]): r["score"] is None for r in summary["rows"]}
    assert states[("standard", 0.5)] is False and states[("rbdc:1", 1.0)] is True
    assert {line["missing"] for line in summary["lines"]} == {0, 1}
    whole = run(comparison, tmp_path / "run")
    straight = run(comparison, tmp_path / "straight")
    assert [r["score"] for r in whole["rows"]] == [r["score"] for r in straight["rows"]]
    assert all(line["missing"] == 0 for line in whole["lines"])


def test_rates_are_tuned_for_each_protocol_alike(folder: Path, tmp_path: Path) -> None:
    comparison = compared(
        folder, protocols=("standard", "rbdc:1"), seeds=1, tune=(1e-4, 5e-3), tune_budget=0.5
    )
    summary = run(comparison, tmp_path / "run")
    assert len(summary["tuning"]) == 4
    assert {row["budget"] for row in summary["tuning"]} == {0.5}
    for protocol in ("standard", "rbdc:1"):
        tried = {r["lr"]: r["score"] for r in summary["tuning"] if r["protocol"] == protocol}
        used = {r["lr"] for r in summary["rows"] if r["protocol"] == protocol}
        assert set(tried) == {1e-4, 5e-3}
        assert used == {max(tried, key=lambda lr: tried[lr])}
    # without the images held out an epoch has 4 of its 5 steps
    assert summary["tuning_flops"] == pytest.approx(4 * 0.5 * 4 / 5, abs=0.1)
    asked = {"seeds": 1, "tune": (1e-4, 5e-3), "tune_budget": 0.5, "budgets": (0.5,)}
    more = run(compared(folder, protocols=("standard",), **asked), tmp_path / "run")
    assert {*map(str, more["tuning"])} == {*map(str, summary["tuning"])}  # the others' stay
    assert more["tuning_flops"] == summary["tuning_flops"]


def test_time_is_elapsed_or_that_of_the_cpu(folder: Path, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"protocols": ("standard", "rbdc:1"), "budgets": (1.0,), "seeds": 1}
    for clock, seconds in (("cpu", "cpu_seconds"), ("elapsed", "seconds")):
        summary = run(compared(folder, **asked, clock=clock), tmp_path / "run")
        standard, tree = summary["rows"]
        assert standard["time"] == 1
        assert tree["time"] == pytest.approx(tree[seconds] / standard[seconds])
        console = Console(width=200, file=StringIO(), record=True)
        console.print(comparison_table(summary))
        assert ("CPU time of all models" in console.export_text()) == (clock == "cpu")
    assert standard["seconds"] != standard["cpu_seconds"]


def test_lower_is_better_where_the_metric_says_so(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best model, the tuned rate and the table of a training that is about its loss."""
    monkeypatch.setattr(Classification, "primary_metric", "loss")
    monkeypatch.setattr(TrainJob, "metrics", ("loss",))
    asked: dict[str, Any] = {"protocols": ("standard",), "budgets": (0.5,), "seeds": 1}
    summary = run(compared(folder, **asked, tune=(1e-4, 5e-3)), tmp_path / "run")
    tried = {row["lr"]: row["score"] for row in summary["tuning"]}
    (row,) = summary["rows"]
    assert row["lr"] == min(tried, key=lambda lr: tried[lr]) and summary["metric"] == "loss"
    assert row["score"] == row["metrics"]["loss"] >= row["best_score"]
    with (tmp_path / "run" / row["target"] / "summary.csv").open() as file:
        losses = [float(epoch["loss"]) for epoch in csv.DictReader(file)]
    assert row["best_score"] == min(losses) and len(losses) > 1
    console = Console(width=140, file=StringIO(), record=True)
    console.print(comparison_table(summary))
    assert f"{row['score']:.3f}" in console.export_text()


def test_a_training_that_fails_is_missing_and_the_others_are_done(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = Session.check_losses

    def fail(session: Any) -> None:
        if session.problem.task.model.width == 0.5:
            raise TrainingError("the loss is nan", "Try a lower learning rate.")
        check(session)

    monkeypatch.setattr(Session, "check_losses", fail)
    with pytest.warns(UserWarning, match="a training failed, its result is missing"):
        summary = run(compared(folder, seeds=1, budgets=(1.0,)), tmp_path / "run")
    missing = {row["protocol"] for row in summary["rows"] if row["score"] is None}
    assert missing == {"rbdc:1", "net2net"}
    unknown = {row["protocol"] for row in summary["rows"] if row["seconds"] is None}
    assert unknown == missing  # not the seconds of the jobs that did end


WITH_ATTENTION = {**TINY[RESNET], "block_args": {"attn_layer": "eca"}}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"protocols": ("standart",)}, "no protocol is called 'standart'"),
    "option": ({"protocols": ("rbdc:two",)}, "rbdc got 'two'"),
    "no option": ({"protocols": ("standard:2",)}, "standard got '2', expected no options"),
    "ratio": ({"protocols": ("net2net:half",)}, "net2net got 'half'"),
    "twice": ({"protocols": ("rbdc:1", "rbdc:1")}, "protocols are rbdc:1, rbdc:1"),
    "budget": ({"budgets": (0.0,)}, "budgets are"),
    "not a number": ({"budgets": (float("nan"),)}, "budgets are"),
    "seeds": ({"seeds": 0}, "seeds 0"),
    "too many steps": ({"protocols": ("rbdc:4",)}, "rbdc:4 does not fit"),
    "less than a step": (
        {"budgets": (0.01,)},
        "standard at budget 0.01 would train its target for 0.2 steps",
    ),
    "does not fit": (
        {"protocols": ("net2net",), "model_kwargs": WITH_ATTENTION},
        "net2net does not fit",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("asked", "expected"), BAD.values(), ids=BAD)
def test_mistakes_are_said_before_anything_runs(
    asked: dict[str, Any], expected: str, folder: Path
) -> None:
    with pytest.raises(PlanError) as error:
        compared(folder, **asked)
    assert expected in error.value.problem and error.value.remedy


@pytest.mark.parametrize("name", sorted({*experiments()} - {"attribution"}))
def test_the_papers_experiments_can_be_prepared(name: str) -> None:
    for scale, data in (("small", None), ("paper", imagenet_outline())):
        experiment = read_experiment(name, scale)  # type: ignore[arg-type]
        assert "The paper" in experiment.head
        for case in experiment.cases:
            comparison = prepare_case(case, {}, data=data)
            rows = comparison.planned_rows()
            assert all(row["flops"] == pytest.approx(row["budget"], rel=0.03) for row in rows)
            known = {f"{row['protocol']} {row['budget']:g}" for row in rows}
            assert set(comparison.published) <= known
            assert comparison.setting.transition == ("restart",)


def test_the_attribution_goes_on_in_cases_of_one_name() -> None:
    """Cases of a name are one comparison: the same setting and tuning, more of the rest."""
    seen: dict[str, Comparison] = {}
    for case in read_experiment("attribution", "small").cases:
        comparison = prepare_case(case, {})
        rows = comparison.planned_rows()
        assert all(row["flops"] == pytest.approx(row["budget"], rel=0.03) for row in rows)
        first = seen.setdefault(case.name, comparison)
        assert comparison.setting.to_json() == first.setting.to_json()
        tuned = {entry.trial.target.job.key for entry in comparison.tuning}
        assert tuned & {entry.trial.target.job.key for entry in first.tuning}
        updates = comparison.setting.baseline_epochs * comparison.setting.steps_per_epoch
        assert updates >= 12_000 and comparison.spec.seeds == 3
    assert {*seen} == {"deit", "resnet"}
    with pytest.raises(RecipeError, match="has no scale 'paper'"):
        read_experiment("attribution", "paper")


def test_the_growth_experiment_has_the_papers_epochs_and_numbers() -> None:
    (case,) = read_experiment("growth", "paper").cases
    comparison = prepare_case(case, {}, data=imagenet_outline())
    rows = {row["protocol"]: row for row in comparison.planned_rows() if row["budget"] == 0.61}
    assert [round(rows["rbdc:1"]["epochs"][level][0]) for level in ("1", "0")] == [22, 44]
    assert [round(rows["rbdc:2"]["epochs"][level][0]) for level in "210"] == [10, 21, 42]
    members, wide = rows["mixture-growth"]["epochs"]["1"], rows["mixture-growth"]["epochs"]["0"]
    assert [round(count) for count in (*members, *wide)] == [89, 73, 14]  # 0.615 is 90, 74, 14
    assert comparison.published["standard 1"] == 0.7779
    assert comparison.published["rbdc:3 0.61"] == 0.7755


def test_padding_takes_the_papers_narrow_epochs() -> None:
    case = read_experiment("padding", "paper").cases[1]
    comparison = prepare_case(case, {}, data=imagenet_outline())
    epochs = [row["epochs"] for row in comparison.planned_rows() if row["protocol"] == "rbdc:1"]
    for found, (narrow, wide) in zip(
        epochs, [(50, 100), (75, 150), (100, 200), (300, 600)], strict=True
    ):
        assert found["1"] == pytest.approx([narrow] * 2) and found["0"] == pytest.approx([wide])
