"""The report page, in a real browser; and what is read for it, from whole and broken folders."""

import json
import shutil
import threading
from http.client import HTTPConnection
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from rbdc.cli import main
from rbdc.errors import RbdcError, RunError
from rbdc.experiments.statistics import statistics_of
from rbdc.report.page import read_state, render, write_report
from rbdc.report.read import read_run
from rbdc.report.serve import make_server
from tests.experiments.test_compare import finished_comparison
from tests.report.browsing import EVIL, Visit, visit
from tests.support import change


@pytest.fixture(scope="module")
def trained(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(finished, tmp_path_factory.mktemp("runs") / "trained"))


@pytest.fixture(scope="module")
def comparison(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_comparison(folder, tmp_path_factory)


def test_a_run_is_drawn_and_can_be_looked_into(
    browser: Browser, trained: Path, tmp_path: Path
) -> None:
    seen = visit(browser, [trained], tmp_path)
    assert seen.page.locator("svg.tree .node").count() == 7 + 3 + 1  # models, couplings, standard
    result = json.loads((trained / "result.json").read_text())
    assert f"{100 * result['metrics']['top1']:.2f} %" in seen.text("#verdict")
    target = seen.page.locator("svg.tree .node[aria-label^='target']")
    assert " → " in (target.text_content() or "")
    target.click()
    assert "warmup epochs" in seen.text("#node")
    assert seen.points("node")
    target.press("Enter")  # again, by the keyboard: closed
    assert seen.page.inner_text("#node") == ""
    assert "standard training" in seen.text("#budget") and "the whole tree" in seen.text("#budget")
    assert seen.problems == []


def test_curves_are_switched(browser: Browser, trained: Path, tmp_path: Path) -> None:
    seen = visit(browser, [trained], tmp_path)
    run = read_run(trained)
    target = next(node for node in run["nodes"].values() if node["name"] == "target")
    ends = {}
    for axis in ("epochs", "flops", "time"):
        seen.page.select_option("#curves [data-choice=against]", axis)
        ends[axis] = max(
            x for trace in seen.points("curves") if trace["name"] == "width 1" for x in trace["x"]
        )
    assert ends["epochs"] == pytest.approx(1 + 2 + 4)
    assert ends["flops"] == pytest.approx(
        target["history"]["flops"][-1] / run["about"]["baseline_flops"]
    )
    assert ends["time"] == pytest.approx(
        (target["seconds_before"] + target["history"]["seconds"][-1]) / 60
    )
    assert len(seen.points("curves")) == 8
    seen.page.select_option("#curves [data-choice=show]", "2")
    assert len(seen.points("curves")) == 4
    seen.page.select_option("#curves [data-choice=show]", "path")
    seen.page.select_option("#curves [data-choice=what]", "lr")
    assert [trace["name"] for trace in seen.points("curves")] == [
        "width 0.25",
        "width 0.5",
        "width 1",
        "standard",
    ]
    assert seen.problems == []


def axis_range(seen: Visit, chart: str) -> list[float]:
    script = f"document.querySelector('[data-chart={chart}]')._fullLayout.yaxis.range"
    return list(seen.page.evaluate(script))


def test_curves_are_against_flops_within_what_a_metric_can_be(
    browser: Browser, trained: Path, tmp_path: Path
) -> None:
    seen = visit(browser, [trained], tmp_path)
    assert seen.page.input_value("#curves [data-choice=against]") == "flops"
    low, high = axis_range(seen, "curves")
    best = max(y for trace in seen.points("curves") for y in trace["y"])
    assert 0 <= low < best <= high <= 100 and high < best + 20  # and not all that it can be
    assert "blocks" in seen.text("#tree") and "[object" not in seen.text("#tree")
    chart = seen.page.locator("[data-chart=curves]")
    chart.hover()
    bar, legend = (chart.locator(name).bounding_box() for name in (".modebar", ".legend"))
    assert bar and legend and legend["x"] + legend["width"] <= bar["x"]


def test_several_runs_are_laid_over_each_other(
    browser: Browser, trained: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(trained, tmp_path / "other"))
    seen = visit(browser, [trained, other], tmp_path)
    names = ["trained", "trained, standard", "other", "other, standard"]
    assert [trace["name"] for trace in seen.points("overlay")] == names
    target = next(n for n in read_run(other)["nodes"].values() if n["name"] == "target")
    assert seen.points("overlay")[2]["x"][-1] == target["history"]["flops"][-1]
    seen.page.select_option("#runs [data-choice=cost]", "time")
    minutes = (target["seconds_before"] + target["history"]["seconds"][-1]) / 60
    assert seen.points("overlay")[2]["x"][-1] == pytest.approx(minutes)
    assert seen.problems == []


def test_blocks_of_the_weights(browser: Browser, trained: Path, tmp_path: Path) -> None:
    seen = visit(browser, [trained], tmp_path)
    grown = {trace["name"]: trace["y"] for trace in seen.points("grown")}
    assert grown.keys() == {"1.0", "1.1", "target", "standard"}
    assert grown["target"][0] == 0 < grown["target"][-1]  # nothing yet, right after the coupling
    assert grown["standard"][0] == pytest.approx(1, abs=0.4)
    (blocks,) = seen.points("blocks")
    assert len(blocks["z"]) == 4  # the target has four leaves
    seen.page.locator("#weights input[type=range]").fill("0")
    first = seen.points("blocks")[0]["z"]
    assert first[0][0] > 0 == first[0][2] == first[3][0]
    seen.page.select_option("#weights [data-choice=model]", label="1.0")
    assert len(seen.points("blocks")[0]["z"]) == 2
    assert seen.problems == []


def test_a_comparison_is_shown(browser: Browser, comparison: Path, tmp_path: Path) -> None:
    seen = visit(browser, [comparison], tmp_path)
    summary = json.loads((comparison / "result.json").read_text())
    text = seen.text("#compare")
    for line in summary["lines"]:
        assert line["protocol"] in text and f"{100 * line['score']:.2f} %" in text
    assert "to reach standard" in text and "tuned on held-out" not in text.lower()
    assert seen.points("trade")
    seen.page.select_option("#compare [data-choice=against]", "time")
    traces = [t for t in seen.points("trade") if not t["name"].endswith(", seeds")]
    drawn = {trace["name"]: trace["x"] for trace in traces}
    for protocol, times in drawn.items():
        own = [line["time"] for line in summary["lines"] if line["protocol"] == protocol]
        assert sorted(times) == pytest.approx(sorted(own))
    assert 1.0 in [round(time, 9) for time in drawn["standard"]]
    titles = seen.page.locator("#tree select option").all_inner_texts()
    assert len(titles) == len(summary["rows"])
    seen.page.select_option("#tree select", label=titles[-1])
    assert seen.page.locator("svg.tree .node").count() >= 1
    assert seen.problems == []


def test_a_comparison_without_standard_training_has_no_times(
    browser: Browser, comparison: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(comparison, tmp_path / "copy"))
    summary = json.loads((copy / "result.json").read_text())
    rows = [row for row in summary["rows"] if row["protocol"] != "standard"]
    change(copy / "result.json", **statistics_of(rows))
    seen = visit(browser, [comparison, copy], tmp_path)
    seen.page.select_option("#compare [data-choice=against]", "time")
    seen.page.click("#runs button >> text=copy")
    options = seen.page.locator("#compare [data-choice=against] option").all_inner_texts()
    assert options == ["FLOPs"] and len(seen.points("trade")[0]["x"]) == 2
    assert "time to reach" not in seen.text("#compare") and seen.problems == []


def test_several_runs_on_one_page(
    browser: Browser, trained: Path, comparison: Path, tmp_path: Path
) -> None:
    seen = visit(browser, [trained, comparison], tmp_path)
    assert "time to reach" not in seen.text("#compare")
    seen.page.click("#runs button >> text=comparison")
    assert "time to reach" in seen.text("#compare")
    assert seen.problems == []


def test_dark_light_and_a_phone(browser: Browser, trained: Path, tmp_path: Path) -> None:
    phone = {"width": 390, "height": 800}
    seen = visit(browser, [trained], tmp_path, color_scheme="dark", viewport=phone)

    def ground() -> str:
        return str(seen.page.evaluate("getComputedStyle(document.body).backgroundColor"))

    assert ground() == "rgb(20, 23, 26)"
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= 390  # nothing sticks out
    seen.page.click("#theme")
    assert ground() == "rgb(255, 255, 255)"
    seen.page.click("#theme")
    assert ground() == "rgb(20, 23, 26)"
    seen.page.emulate_media(media="print")
    assert seen.page.locator("#theme").is_hidden()
    assert len(seen.page.pdf()) > 10_000
    assert seen.problems == []


def test_names_from_data_are_text(browser: Browser, trained: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    run = json.loads((copy / "run.json").read_text())
    run["data"] |= {"class_names": [EVIL, "b"], "name": EVIL}
    run["command"] += [EVIL]
    for node in run["nodes"]:
        node["name"] += EVIL
    change(copy / "run.json", **run)
    evil = copy.rename(tmp_path / "<img src=x onerror=hurt()>")
    seen = visit(browser, [evil], tmp_path)
    seen.page.locator("svg.tree .node").first.click()
    assert EVIL in seen.text("#repeat") and EVIL in seen.text("#node")
    assert "hurt" not in seen.page.title().replace("onerror=hurt()", "")
    assert seen.page.locator("img").count() == 0
    assert seen.problems == []


def test_a_broken_run_says_what_is_missing(browser: Browser, trained: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    target = next(
        job
        for job in copy.glob("jobs/resnet18d-w1-*")
        if (job / "saved_for_growth").exists() is False
    )
    (target / "log.jsonl").write_text((target / "log.jsonl").read_text()[:-20])
    (target / "summary.csv").write_bytes(b"\xff\xfe")
    (target / "blocks.jsonl").unlink()
    couplings = list(copy.glob("jobs/coupling-*"))
    (couplings[0] / "result.json").write_text('{"half"')
    shutil.rmtree(couplings[1])
    (copy / "result.json").unlink()
    seen = visit(browser, [copy], tmp_path)
    text = seen.text("#verdict .missing")
    for name in ("log.jsonl: line", "summary.csv: it cannot be read", "result.json cannot be read"):
        assert name in text
    assert seen.page.locator("svg.tree .node.unreadable").count() == 1
    assert seen.page.locator("svg.tree .node.waiting").count() == 1
    assert seen.problems == []
    shutil.rmtree(copy / "jobs")
    (copy / "result.json").write_text('{"metrics": {"top1": 0.5}}')
    assert "is gone" in visit(browser, [copy], tmp_path).text("#verdict .missing")
    (copy / "run.json").write_text("[")
    assert "run.json cannot be read" in visit(browser, [copy], tmp_path).text("#verdict .missing")


def test_what_is_not_finite_is_a_gap(browser: Browser, trained: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    for summary in copy.glob("jobs/resnet18d-*/summary.csv"):
        head, *rows = summary.read_text().splitlines()
        numbers = dict(zip(head.split(","), rows[0].split(","), strict=True)) | {"loss": "nan"}
        summary.write_text("\n".join([head, ",".join(numbers.values()), *rows[1:]]))
        result = json.loads((summary.parent / "result.json").read_text())
        result["metrics"]["loss"] = float("inf")
        change(summary.parent / "result.json", **result)
    seen = visit(browser, [copy], tmp_path)
    seen.page.select_option("#curves [data-choice=what]", "loss")
    assert any(None in trace["y"] for trace in seen.points("curves"))
    assert seen.problems == []


def test_a_training_under_way_has_its_time_and_accuracy(trained: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    for result in copy.glob("jobs/resnet18d-*/result.json"):
        result.unlink()
    levels = read_run(copy)["levels"]
    assert all(level["seconds"] > 0 for level in levels)
    done = read_run(trained)
    for key, node in read_run(copy)["nodes"].items():
        assert node["metrics"] == pytest.approx(done["nodes"][key]["metrics"])
        if node["kind"] == "train":
            assert node["state"] == "stopped" and node["seconds"] > 0


def test_a_served_page_follows_the_run(browser: Browser, trained: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    result = copy / "result.json"
    kept = result.read_text()
    result.unlink()
    with make_server([copy]) as server:
        host, port = server.server_address[:2]
        assert host == "127.0.0.1"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        seen = Visit(browser.new_page(), f"http://127.0.0.1:{port}/")
        assert "top-1" not in seen.text("#verdict")
        seen.page.select_option("#curves [data-choice=against]", "flops")
        result.write_text(kept)
        seen.page.wait_for_function(
            "document.querySelector('#verdict').innerText.includes('top-1')"
        )
        assert seen.page.input_value("#curves [data-choice=against]") == "flops"  # stays chosen
        assert seen.problems == []
        assert _status(port, "/", host="evil.example") == 403  # a name that was made to lead here
        assert _status(port, "/../run.json") == 404
        assert _status(port, "/", method="POST") == 501
        server.shutdown()


def _status(port: int, path: str, host: str = "localhost", method: str = "GET") -> int:
    connection = HTTPConnection("127.0.0.1", port)
    connection.request(method, path, headers={"Host": f"{host}:{port}"})
    status = connection.getresponse().status
    connection.close()
    return status


def test_the_command(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["report", str(trained), "--output", str(page)]) == 0
    assert str(page) in capsys.readouterr().out
    assert page.read_text().startswith("<!doctype html>")
    assert main(["report", str(trained), "--output", str(page)]) == 0  # a report is replaced
    page.write_text("my thesis")
    for arguments, said in (
        ([str(trained), "--output", str(page)], "exists and is no report"),
        ([str(trained), "--output", str(tmp_path / "no" / "page.html")], "is not a folder"),
        ([str(trained), "--output", str(tmp_path)], "is not a page's name"),
        ([str(tmp_path)], "holds no run"),
        ([str(tmp_path / "nowhere")], "holds no run"),
        ([str(tmp_path), "--serve"], "holds no run"),
        ([str(trained), "--serve", "--port", "99999"], "port 99999 cannot be used"),
    ):
        assert main(["report", *arguments]) == 2
        error = capsys.readouterr().err
        assert said in error and len(error.splitlines()) == 2
    assert page.read_text() == "my thesis"


def test_figures_for_a_paper(
    trained: Path, comparison: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of a tree, and of a comparison, in three formats."""
    page, figures = str(tmp_path / "page.html"), tmp_path / "figures"
    arguments = ["--output", page, "--figures", str(figures)]
    assert main(["report", str(trained), str(comparison), *arguments]) == 0
    names = {str(path.relative_to(figures)) for path in figures.rglob("*.*")}
    tree = ("curves", "learning-rate", "budget", "blocks-1.0", "blocks-1.1", "blocks-target")
    assert names == {
        f"{place}.{end}"
        for place in (
            *(f"1-trained/{name}" for name in tree),
            *(f"2-comparison/{name}" for name in ("accuracy-flops", "accuracy-time")),
        )
        for end in ("png", "svg", "pdf")
    }
    assert capsys.readouterr().out.count("figure ") == len(names)
    assert all(path.stat().st_size > 1000 for path in figures.rglob("*.*"))
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        arguments = ["--output", page, "--figures", str(place)]
        assert main(["report", str(trained), *arguments]) == 2
        assert "not a folder one may write to" in capsys.readouterr().err


def test_nothing_is_fetched(trained: Path) -> None:
    """One file, which opens without a network."""
    page = render(read_state([trained]))
    for word in ('<link rel="stylesheet"', "<script src", "@import", "url("):
        assert word not in page


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no run"):
        read_run(tmp_path)
    with pytest.raises(RbdcError):
        write_report([tmp_path], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()
