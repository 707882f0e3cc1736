"""A transfer in the report: page, status, figures; finished, under way, broken."""

import base64
import json
import os
import shutil
import socket
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser
from rich.console import Console

import rbdc
from rbdc.cli import main
from rbdc.report.page import MOST_BYTES, add_sheets, read_state, write_report
from rbdc.report.read import read_run
from rbdc.report.run import run_status, status_table
from rbdc.report.watch import watch_run
from rbdc.settings.detection import DetectionRecipe
from rbdc.transfer import load_detector
from rbdc.transfer.coco import open_splits
from rbdc.transfer.jobs import find_backbone
from rbdc.transfer.prepare import prepare_transfer
from tests.report.browsing import EVIL, visit
from tests.support import QUICK, change, made_once, started
from tests.transfer.scenes import classifier, write_split

TREE_ONLY = ("tree", "budget", "weights", "compare")
OTHER = "scratch:standard"


@pytest.fixture(scope="module")
def transfer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two backbones from two seeds. One is called as standard training is, which it is not; a
    class has a name that wants to be a script."""
    return made_once(tmp_path_factory, "transfer", _transfer) / "run"


def _transfer(root: Path) -> None:
    for split in ("train2017", "val2017"):
        write_split(root / "scenes", split, lambda made: made["categories"][0].update(name=EVIL))
    trained = str(rbdc.export(classifier(), root / "standard"))
    recipe = DetectionRecipe(
        epochs=2.0, batch_size=2, min_size=32, max_size=64, channels=8, regions=8, proposals=20,
        warmup_steps=1, lr=1e-3,
    )  # fmt: skip
    both = [find_backbone(trained), find_backbone(f"scratch:{trained}")]
    prepared = prepare_transfer(both, open_splits(root / "scenes"), recipe, seeds=2)
    started(prepared, root / "run", machine=QUICK, watch=lambda _event: None, jobs=1)


@pytest.fixture
def copied(transfer: Path, tmp_path: Path) -> Path:
    """A run that may be changed."""
    return Path(shutil.copytree(transfer, tmp_path / "copy"))


def folders(run: Path) -> list[Path]:
    """Of the detectors: of the first seed, of the second."""
    return [run / node["folder"] for node in json.loads((run / "run.json").read_text())["nodes"]]


def known_scores(run: Path) -> None:
    """Numbers that can be told apart: 20 and 24 percent against 30 and 31; masks half of it."""
    for place, value in zip(folders(run), (0.2, 0.3, 0.24, 0.31), strict=True):
        result = json.loads((place / "result.json").read_text())
        for part, share in (("boxes", 1.0), ("masks", 0.5)):
            result["scores"][part] |= {"ap": share * value, "by_class": {EVIL: share * value}}
        change(place / "result.json", **result)


def cells(seen: Any, row: str) -> list[list[str]]:
    """Of every row of the table that begins so."""
    rows = seen.page.locator("#precision table").first.locator("tr").all()
    texts = [one.locator("td").all_inner_texts() for one in rows]
    return [text[1:] for text in texts if text and text[0] == row]


def test_tables_have_means_spreads_and_differences_of_the_same_seeds(
    browser: Browser, copied: Path, tmp_path: Path
) -> None:
    known_scores(copied)
    seen = visit(browser, [copied], tmp_path)
    boxes, masks = cells(seen, "standard")
    assert (boxes[0], boxes[-1]) == ("22.0 ± 2.8", "2") and masks[0] == "11.0 ± 1.4"
    boxes, more_boxes, masks, more_masks = cells(seen, OTHER)
    assert boxes[0] == "30.5 ± 0.7" and masks[0] == "15.3 ± 0.4"
    assert more_boxes[0] == "+8.5 ± 2.1" and more_masks[0] == "+4.3 ± 1.1"  # 10 and 7, not 8.5
    assert boxes[5] == more_boxes[5] == "–"  # there are no large objects
    assert "4.3 points more mask mAP than standard" in seen.text("#verdict")
    by_class = seen.page.locator("#precision details")
    assert not by_class.locator("table").is_visible()
    by_class.locator("summary").click()
    row = by_class.locator("tbody tr").last.locator("td").all_inner_texts()
    assert row == [EVIL, "22.0", "11.0", "30.5", "15.3"]
    assert seen.problems == []


def test_a_transfer_is_shown_without_a_tree(
    browser: Browser, transfer: Path, tmp_path: Path
) -> None:
    seen = visit(browser, [transfer], tmp_path)
    assert [seen.text(f"#{name}") for name in TREE_ONLY] == [""] * len(TREE_ONLY)
    assert "Mask R-CNN on standard, scratch:standard" in seen.text("#verdict")
    assert "3 training images with 4 objects" in seen.text("#verdict")
    assert "missing" not in seen.text("main") and "top-1" not in seen.text("main")
    cost = json.loads((transfer / "result.json").read_text())["rows"][0]["cost"]
    assert seen.page.locator("#cost tr.title").all_inner_texts() == ["standard, scratch:standard"]
    text = seen.text("#cost")
    assert f"all\t{cost['total_parameters']:,}\t" in text and "mask head" in text
    assert EVIL in (seen.page.locator("#data details").text_content() or "")
    assert seen.page.locator("#detectors tbody tr").count() == 4
    assert seen.text("#detectors").count("✓ done") == 4
    seen.page.click("#detectors button >> nth=1")
    assert "scratch:standard, seed 0" in seen.text("#node") and "mask mAP" in seen.text("#node")
    assert len(seen.points("node")) == 3
    assert seen.page.title() == "run – RBDC" and seen.problems == []


def test_how_to_load_a_detector_is_said(browser: Browser, transfer: Path, tmp_path: Path) -> None:
    seen = visit(browser, [transfer], tmp_path)
    code = seen.page.locator("#repeat pre", has_text="load_detector").inner_text()
    place = json.loads(code.split("load_detector(")[1].split(")")[0])
    detector, class_names = load_detector(place)
    assert EVIL in class_names and detector.backbone is not None
    assert "plan" not in seen.page.locator("#repeat summary").all_inner_texts()


def noise(path: Path, width: int, height: int) -> None:
    """A picture that is hard to compress."""
    pixels = np.random.default_rng(0).integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC).save(path)


def test_the_sheet_of_every_detector_can_be_looked_at(
    browser: Browser, copied: Path, tmp_path: Path
) -> None:
    noise(folders(copied)[3] / "sheet.png", 1920, 1200)
    seen = visit(browser, [copied], tmp_path)
    picture = seen.page.locator("#sheets img")
    sources = set()
    for name in ("standard, seed 0", "scratch:standard, seed 1"):
        seen.page.select_option("#sheets [data-choice=detector]", label=name)
        assert (picture.get_attribute("alt") or "").startswith(f"Predictions of {name}")
        assert name in seen.text("#sheets figcaption")
        assert picture.evaluate("e => e.decode().then(() => e.naturalWidth)") > 400
        sources.add(picture.get_attribute("src"))
    assert len(sources) == 2
    seen.page.select_option("#sheets [data-choice=size]", "full")
    assert picture.evaluate("e => e.width == e.naturalWidth")
    assert seen.problems == []


def test_curves_are_switched(browser: Browser, transfer: Path, tmp_path: Path) -> None:
    seen = visit(browser, [transfer], tmp_path)
    node = next(iter(read_run(transfer)["nodes"].values()))
    ends = {"epochs": 2.0, "flops": node["history"]["flops"][-1]}
    ends["time"] = node["history"]["seconds"][-1] / 60
    for axis, end in ends.items():
        seen.page.select_option("#curves [data-choice=against]", axis)
        first = seen.points("curves")[0]
        assert first["x"][-1] == pytest.approx(end)
        assert first["y"] == pytest.approx([100 * value for value in node["history"]["mask_map"]])
    traces = seen.points("curves")
    assert len(traces) == 4 and len({trace["line"]["color"] for trace in traces}) == 2
    assert [trace["name"] for trace in traces if trace["showlegend"]] == ["standard", OTHER]
    for name, values in (("box_map", node["history"]), ("train", node["steps"])):
        seen.page.select_option("#curves [data-choice=what]", name)
        column = values["loss"] if name == "train" else [100 * v for v in values[name]]
        assert seen.points("curves")[0]["y"] == pytest.approx(column)
    seen.page.select_option("#curves [data-choice=show]", label=OTHER)
    assert [trace["name"] for trace in seen.points("curves")] == [OTHER, OTHER]
    assert seen.problems == []


def test_dark_a_phone_and_paper(browser: Browser, transfer: Path, tmp_path: Path) -> None:
    phone = {"width": 390, "height": 800}
    seen = visit(browser, [transfer], tmp_path, color_scheme="dark", viewport=phone)
    ground = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == "rgb(20, 23, 26)"
    for summary in seen.page.locator("summary").all():
        summary.click()
    seen.page.click("#detectors button >> nth=0")
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= 390  # nothing sticks out
    seen.page.emulate_media(media="print")
    assert seen.page.locator("#sheets img").is_visible() and len(seen.page.pdf()) > 10_000
    assert seen.problems == []


def test_names_from_data_are_text(browser: Browser, copied: Path, tmp_path: Path) -> None:
    run = json.loads((copied / "run.json").read_text())
    for node in run["nodes"]:
        node |= {"name": EVIL + node["name"], "backbone": EVIL + node["backbone"]}
    run["data"]["train"] |= {"annotations": EVIL, "dropped": {EVIL: 3}}
    change(copied / "run.json", **run)
    (folders(copied)[3] / "failed.json").write_text(json.dumps({"error": EVIL}))
    (folders(copied)[3] / "result.json").unlink()
    evil = copied.rename(tmp_path / "<img src=x onerror=hurt()>")
    seen = visit(browser, [evil], tmp_path)
    seen.page.click("#detectors button >> nth=0")
    for section in ("verdict", "precision", "sheets", "detectors", "node", "data"):
        assert EVIL in seen.text(f"#{section}")
    assert f"3 x {EVIL}" in seen.text("#data")
    assert seen.page.locator("img").count() == 1  # the sheet
    assert EVIL in (seen.page.locator("#sheets img").get_attribute("alt") or "")
    assert "hurt" not in seen.page.title().replace("onerror=hurt()", "")
    assert seen.problems == []


def test_a_training_and_a_transfer_on_one_page(
    browser: Browser, finished: Path, transfer: Path, tmp_path: Path
) -> None:
    seen = visit(browser, [finished, transfer], tmp_path)
    assert "top-1" in seen.text("#runs") and "mask mAP" in seen.text("#runs")
    assert seen.page.locator("svg.tree .node").count() > 0 and seen.text("#precision") == ""
    seen.page.select_option("#curves [data-choice=show]", "path")
    seen.page.click("#runs button >> text=run")
    assert seen.page.locator("svg.tree .node").count() == 0 and "mAP" in seen.text("#precision")
    assert len(seen.points("curves")) == 4 and seen.text("#weights") == ""
    seen.page.select_option("#curves [data-choice=what]", "box_map")
    seen.page.click("#runs button >> text=finished")
    assert len(seen.points("curves")) == 8 and seen.text("#sheets") == seen.text("#cost") == ""
    assert seen.problems == []


def begin(run: Path) -> None:
    """As it is before the first result: one detector under way, somebody at work."""
    (run / "result.json").unlink()
    first, *others = folders(run)
    for place in others:
        shutil.rmtree(place)
    (first / "result.json").unlink()
    scores = {"box_map": 0.25, "mask_map": 0.125}
    change_to = {"step": 1, "steps": 2, "scores": scores}
    (first / "progress.json").write_text(json.dumps(change_to))
    who = {"host": socket.gethostname(), "pid": os.getpid()}
    (run / "run.lock").write_text(json.dumps(who))


def table_text(run: Path) -> str:
    console = Console(file=StringIO(), width=110, record=True)
    console.print(status_table(run_status(run)))
    return console.export_text()


def test_status_at_any_time(
    transfer: Path, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run_status(transfer)
    assert {node["state"] for node in done["nodes"]} == {"done"}
    assert done["spent_flops"] == done["planned_flops"] > 0  # with the one called standard
    assert all(list(node["metrics"]) == ["mask_map", "box_map"] for node in done["nodes"])
    text = table_text(transfer)
    assert "mask mAP" in text and "top-1" not in text and "standard training" not in text
    assert text.index("standard, seed 0") < text.index("scratch:standard, seed 1")
    begin(copied)
    text = table_text(copied)
    assert "▶  standard, seed 0" in text and "running 50%" in text
    assert "25.00%" in text and "12.50%" in text and "and 3 waiting" in text
    (copied / "run.lock").unlink()
    assert "stopped 50%" in table_text(copied)
    (folders(copied)[0] / "failed.json").write_text(json.dumps({"error": "the loss is nan"}))
    assert "standard, seed 0: the loss is nan" in table_text(copied)
    assert main(["status", str(copied), "--json"]) == 0
    states = [node["state"] for node in json.loads(capsys.readouterr().out)["nodes"]]
    assert states == ["failed", "waiting", "waiting", "waiting"]
    output = StringIO()
    watch_run(transfer, Console(file=output, width=110))
    watch_run(copied, Console(file=output, width=110), pause=lambda _seconds: None)
    assert output.getvalue().count("mask mAP") == 2


def test_a_page_at_any_time(browser: Browser, copied: Path, tmp_path: Path) -> None:
    kept = shutil.copytree(folders(copied)[1], tmp_path / "kept")
    begin(copied)
    seen = visit(browser, [copied], tmp_path)
    text = seen.text("#detectors")
    assert "▶ running 50 %" in text and text.count("· waiting") == 3
    assert "No detector is trained yet" in seen.text("#precision")
    assert seen.text("#sheets") == "" and "when all detectors are trained" in seen.text("#cost")
    assert len(seen.points("curves")) == 1 and "load_detector" not in seen.text("#repeat")
    (copied / "run.lock").unlink()
    (folders(copied)[0] / "failed.json").write_text(json.dumps({"error": "the loss is nan"}))
    shutil.copytree(kept, folders(copied)[1])  # the second is done, and has nothing to differ from
    later = visit(browser, [copied], tmp_path)
    assert "standard, seed 0: the loss is nan" in later.text("#detectors .missing")
    assert "✗ failed" in later.text("#detectors") and cells(later, OTHER)[0][-1] == "1"
    assert "difference" not in later.text("#precision table")
    shutil.rmtree(copied / "jobs")
    nothing = visit(browser, [copied], tmp_path)
    assert "Nothing is measured yet" in nothing.text("#curves")
    assert nothing.text("#detectors").count("waiting") == 4
    assert not nothing.page.locator("#verdict .missing").count()
    assert seen.problems == later.problems == nothing.problems == []


def test_a_broken_run_says_what_is_missing(
    browser: Browser, transfer: Path, copied: Path, tmp_path: Path
) -> None:
    first, second, third, fourth = folders(copied)
    (first / "result.json").write_text('{"half"')
    (second / "sheet.png").unlink()
    (third / "sheet.png").write_bytes((third / "sheet.png").read_bytes()[:2000])
    (third / "summary.csv").write_bytes(b"\xff\xfe")
    change(third / "result.json", scores={"boxes": None})
    shutil.rmtree(fourth)
    seen = visit(browser, [copied], tmp_path)
    missing = seen.text("#verdict .missing")
    for what in (
        f"{first.name}/result.json cannot be read",
        f"{second.name}/sheet.png: it is not there",
        f"{third.name}/sheet.png: it cannot be read",
        f"{third.name}/summary.csv: it cannot be read",
        f"{third.name}/result.json: it has no scores",
        f"{fourth.name} is gone",
    ):
        assert what in missing
    assert "? unreadable" in seen.text("#detectors") and len(cells(seen, OTHER)) == 2
    change(copied / "result.json", rows=[{"backbone": "standard"}, 3])
    (copied / "run.lock").write_text("{")
    assert "when all detectors" in visit(browser, [copied], tmp_path).text("#cost")
    (copied / "result.json").write_text("[")
    (copied / "run.json").write_text((transfer / "run.json").read_text()[:300])
    torn = visit(browser, [copied], tmp_path)
    assert "run.json cannot be read" in torn.text("#verdict .missing")
    assert seen.problems == torn.problems == []


def test_detectors_that_are_added_are_not_lost(copied: Path) -> None:
    """A finished run that goes on with another backbone still has its old result."""
    run = json.loads((copied / "run.json").read_text())
    added = {"name": "more", "backbone": "more", "key": "0" * 64, "folder": "jobs/more"}
    change(copied / "run.json", nodes=[*run["nodes"], run["nodes"][0] | added])
    content = read_run(copied)
    assert content["missing"] == [] and content["nodes"]["0" * 64]["state"] == "waiting"


def test_large_sheets_are_made_small(copied: Path, tmp_path: Path) -> None:
    for place in folders(copied):
        noise(place / "sheet.png", 1920, 1400)
    state = read_state([copied, copied])
    found = [node["sheet"] for run in state["runs"] for node in run["nodes"].values()]
    assert len(found) == 8 and all(sheet.startswith("data:image/jpeg") for sheet in found)
    assert sum(map(len, found)) <= MOST_BYTES
    picture = Image.open(BytesIO(base64.b64decode(found[0].partition(",")[2])))
    assert picture.width >= 480 and picture.width / picture.height == pytest.approx(1.37, abs=0.01)
    page = write_report([copied], tmp_path / "report.html")
    assert page.stat().st_size < 4_000_000
    run = read_run(copied)
    add_sheets(run, 400)
    assert {node["sheet"] for node in run["nodes"].values()} == {""}  # said on the page


def test_an_export_is_refused(
    transfer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(transfer), "--output", str(tmp_path / "model")]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert "no timm model to export" in errors[0] and "load_detector" in errors[1]
    assert len(errors) == 2 and not (tmp_path / "model").exists()


def test_figures_for_a_paper(
    transfer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "figures"
    page = str(tmp_path / "page.html")
    assert main(["report", str(transfer), "--output", page, "--figures", str(figures)]) == 0
    ends = ("png", "svg", "pdf")
    names = {f"{name}.{end}" for name in ("curves", "precision") for end in ends}
    assert {path.name for path in figures.iterdir()} == names
    assert capsys.readouterr().out.count("figure ") == len(names)
