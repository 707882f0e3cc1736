"""`rbdc export`: the model as it was trained, and a card that says what was measured."""

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import yaml
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

import rbdc
from rbdc.cli import main
from rbdc.data import open_data
from rbdc.errors import RbdcError
from rbdc.experiments.train import prepare
from rbdc.metrics import METRICS
from rbdc.report import card
from rbdc.report.card import export_run
from rbdc.report.figures import plotted_scores
from rbdc.report.read import read_run
from rbdc.settings import read_recipe, split_settings
from tests.report.conftest import small_run
from tests.support import QUICK, change, images, logits, started
from tests.support import forked as in_another_process

FILES = {
    "README.md",
    "config.json",
    "figures",
    "figures/budget.png",
    "figures/curves.png",
    "model.safetensors",
    "rbdc.json",
    "recipe.yaml",
}


@pytest.fixture(scope="module")
def exported(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_run(finished, tmp_path_factory.mktemp("exports") / "model")


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A run that may be changed."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def contents(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def front_of(folder: Path) -> dict[str, Any]:
    text = (folder / "README.md").read_text()
    return dict(yaml.safe_load(text.split("---\n")[1]))


def test_timm_loads_the_very_weights_of_the_run(finished: Path, exported: Path) -> None:
    assert contents(exported) == FILES
    for name in ("model.safetensors", "config.json", "rbdc.json"):
        assert (exported / name).read_bytes() == (finished / "model" / name).read_bytes()
    ours = rbdc.load(finished / "model")
    loaded = timm.create_model(f"local-dir:{exported}", pretrained=True)
    assert torch.equal(logits(loaded, images(ours)), logits(ours, images(ours)))


def test_with_timms_own_transform_it_is_as_good_as_the_card_says(
    folder: Path, exported: Path
) -> None:
    """So mean, standard deviation and crop went along."""
    model = timm.create_model(f"local-dir:{exported}", pretrained=True)
    config = timm.data.resolve_model_data_config(model)
    assert tuple(config["mean"]) == (0.286,) * 3 and config["crop_pct"] == 1.0
    transform = timm.data.create_transform(**config)
    test = open_data(str(folder)).test
    batch = torch.stack([transform(test.read(i).convert("RGB")) for i in range(len(test))])
    right = logits(model, batch).argmax(dim=1) == torch.as_tensor(test.labels)
    measured = front_of(exported)["model-index"][0]["results"][0]["metrics"][0]["value"]
    assert right.float().mean().item() == pytest.approx(measured)


def test_config_claims_nothing_of_timms_own_weights(exported: Path) -> None:
    record = json.loads((exported / "config.json").read_text())["pretrained_cfg"]
    assert not {"tag", "license", "origin_url", "test_input_size"} & record.keys()


def test_the_front_matter_is_what_the_hub_reads(
    finished: Path, exported: Path, tmp_path: Path
) -> None:
    front = front_of(exported)
    assert front["library_name"] == "timm" and front["pipeline_tag"] == "image-classification"
    assert "license" not in front and "datasets" not in front
    read: Any = ModelCard((exported / "README.md").read_text())
    first, _ = read.data.eval_results
    result = json.loads((finished / "result.json").read_text())
    assert first.metric_type == "accuracy" and first.metric_value == round(
        result["metrics"]["top1"], 6
    )
    assert ModelCard(str(read)).data.to_dict() == read.data.to_dict()
    licensed = export_run(finished, tmp_path / "licensed", license="cc-by-4.0")
    assert front_of(licensed)["license"] == "cc-by-4.0"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hf:some-one/birds", ["some-one/birds"]),
        ("cifar10", ["uoft-cs/cifar10"]),
        ("photos", None),
        ("hf:../birds", None),
        ("hf:a/b/c", None),
    ],
)
def test_data_of_the_hub_is_named(
    name: str, expected: list[str] | None, copied: Path, tmp_path: Path
) -> None:
    data = json.loads((copied / "run.json").read_text())["data"]
    change(copied / "run.json", data={**data, "name": name})
    output = export_run(copied, tmp_path / "out")
    assert front_of(output).get("datasets") == expected
    repeated = yaml.safe_load((output / "recipe.yaml").read_text()).get("data")
    assert repeated == (name if expected else None)
    text = (output / "README.md").read_text()
    assert ("recipe.yaml --data PATH --output" in text) is (expected is None)
    assert ("recipe.yaml --output" in text) is (expected is not None)


def test_the_card_says_how_it_was_trained(finished: Path, exported: Path) -> None:
    text = (exported / "README.md").read_text()
    run = json.loads((finished / "run.json").read_text())
    result = json.loads((finished / "result.json").read_text())
    for node in run["nodes"]:
        if node["kind"] == "train":
            scores = result["nodes"][node["name"]]["metrics"]
            row = next(line for line in text.splitlines() if line.startswith(f"| {node['name']} |"))
            assert str(node["seed"]) in row and f"{scores['top1']:.2%}" in row
    assert f"| {result['nodes']['coupling target']['metrics']['top1']:.2%} |" in text
    assert run["data"]["fingerprint"] in text and f"torch {torch.__version__}"[:9] in text
    for setting in ("| `lr` | `0.001` |", "| `crop_padding` | `2` |", "| `batch_size` | `8` |"):
        assert setting in text
    assert "| `opt` |" not in text  # as by default
    assert "| 2 | 4 | 0.25 | 1 |" in text and "| 0 (target) | 1 | 1 | 4 |" in text
    assert f"{result['best']['top1']:.2%} (epoch {result['best']['epoch']:.4g})" in text
    for figure in re.findall(r"\]\((figures/\w+\.png)\)", text):
        assert (exported / figure).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("theirs", "words"),
    [(0.2, "10.00 points more for this"), (0.5, "20.00 points less"), (0.3, "No difference")],
)
def test_the_card_says_who_won_whoever_it_was(
    theirs: float, words: str, copied: Path, tmp_path: Path
) -> None:
    result = json.loads((copied / "result.json").read_text())
    standard = {**result["standard"], "metrics": {**result["standard"]["metrics"], "top1": theirs}}
    ours = {**result["metrics"], "top1": 0.3}
    change(copied / "result.json", metrics=ours, standard=standard)
    text = (export_run(copied, tmp_path / "out") / "README.md").read_text()
    assert words in text and f"{theirs:.2%}" in text


class Shown(HTMLParser):
    """What a reader sees: the text, and the kinds of elements."""

    def __init__(self, markdown: str) -> None:
        super().__init__()
        self.text, self.tags = "", set[str]()
        self.feed(MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        assert not [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.text += data


EVIL = [
    "</script><img src=x onerror=alert(1)>",
    "</details>|pipes|",
    "*stars* _lines_ **both**",
    "[a link](https://example.org)",
    "https://example.org and www.example.org",
    "`code` ``` and \\`more\\`",
    "&lt;b&gt; &amp; <!-- a comment -->",
    "{{ run }} {% raw %} $$x$$",
    "# no heading",
    "two\nlines\r\n---\n\x1b[31mand\u2028a third",
]


def test_names_are_shown_as_text_whatever_they_are(copied: Path, tmp_path: Path) -> None:
    data = json.loads((copied / "run.json").read_text())["data"]
    change(copied / "run.json", data={**data, "class_names": EVIL, "name": EVIL[0] + "\n---\nx: y"})
    output = export_run(copied, tmp_path / "out")
    assert front_of(output)["library_name"] == "timm" and "x" not in front_of(output)
    body = (output / "README.md").read_text().split("\n---\n", 1)[1]
    shown = Shown(body)
    for name in EVIL[:-1]:
        assert name in shown.text, name
    assert "two lines --- [31mand a third" in shown.text
    plain = Shown(re.sub("## Classes.*?##", "##", body, flags=re.DOTALL))
    assert shown.tags == plain.tags  # nothing but text came of the names
    assert "script" not in shown.tags and "<!--" not in body


def test_names_that_no_text_can_hold_are_shown_all_the_same(copied: Path, tmp_path: Path) -> None:
    data = json.loads((copied / "run.json").read_text())["data"]
    names = ["caf\udce9", "", *map(str, range(8))]  # a file's name that is not UTF-8
    change(copied / "run.json", data={**data, "class_names": names})
    text = (export_run(copied, tmp_path / "out") / "README.md").read_text()
    assert "`0` caf?, `1` , `2` 0" in text


def run_snippet(folder: Path, picture: Path) -> dict[str, float]:
    """The card's own example, with a picture and without the hub."""
    text = (folder / "README.md").read_text()
    snippet = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[0]
    snippet = snippet.replace("hf-hub:USER/NAME", f"local-dir:{folder}")
    snippet = snippet.replace('"FOLDER"', repr(str(folder))).replace("image.jpg", str(picture))
    printed: list[dict[str, float]] = []
    exec(snippet, {"print": printed.append})
    return printed[0]


def test_the_cards_example_works(folder: Path, exported: Path) -> None:
    picture = next(folder.glob("val/*/*.png"))
    found = run_snippet(exported, picture)
    names = json.loads((exported / "config.json").read_text())["label_names"]
    assert len(found) == 5 and set(found) <= set(names) and 0 < sum(found.values()) <= 1.0001


def test_a_model_that_timm_cannot_build(folder: Path, tmp_path: Path) -> None:
    """And that was trained without narrower ones before it, and whose weights were averaged."""
    kwargs = {"img_size": 28, "channels": [4, 4, 8, 8]}
    settings: dict[str, Any] = {"model": "resnet18", "model_kwargs": kwargs, "width": 2.0}
    settings |= {"steps": 0, "epochs": 1.0, "with_baseline": False}
    ema = {"model_ema": True, "model_ema_decay": 0.5}
    started(
        small_run(folder, ema, **settings),
        tmp_path / "run",
        machine=QUICK,
        watch=lambda _event: None,
        jobs=1,
    )
    output = export_run(tmp_path / "run", tmp_path / "out")
    text = (output / "README.md").read_text()
    assert front_of(output)["library_name"] == "rbdc" and "timm" not in front_of(output)["tags"]
    assert "trained in the standard way" in text and "points" not in text
    assert "The weights here are the EMA weights after the last step" in text
    (node,) = read_run(tmp_path / "run")["nodes"].values()
    last = plotted_scores(node, METRICS["top1"])[-1]
    assert last == 100 * node["history"]["ema_top1"][-1] == 100 * node["metrics"]["top1"]
    assert f"top-1 {node['metrics']['top1']:.2%}" in text
    assert len(run_snippet(output, next(folder.glob("val/*/*.png")))) == 5
    assert ModelCard(text).data.to_dict()["library_name"] == "rbdc"


def test_the_cards_command_repeats_the_run(
    folder: Path, finished: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (command,) = re.findall(r"```sh\n(.*?)```", (exported / "README.md").read_text(), re.S)
    program, *words = command.replace("PATH", str(folder)).split()
    assert program == "rbdc"
    shutil.copy(exported / "recipe.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main([*words, "--jobs", "1", "--threads", "1", "--workers", "0"]) == 0
    again, first = (run / "model/model.safetensors" for run in (tmp_path / words[-1], finished))
    assert again.read_bytes() == first.read_bytes()


def test_a_card_without_a_baseline_compares_with_none(
    copied: Path, finished: Path, tmp_path: Path
) -> None:
    request = json.loads((finished / "run.json").read_text())["request"]
    change(copied / "run.json", request={**request, "with_baseline": False})
    output = export_run(copied, tmp_path / "out")
    text = (output / "README.md").read_text()
    assert "of standard training for" not in text and "relative FLOPs" not in text
    assert "relative FLOPs" in (export_run(finished, tmp_path / "x") / "README.md").read_text()


def test_the_settings_repeat_the_run(folder: Path, finished: Path, exported: Path) -> None:
    """The same jobs, by their keys: the hash of all that decides a result."""
    given = {"data": str(folder), "in_memory": True}
    again = prepare(*split_settings(read_recipe(str(exported / "recipe.yaml")), given))
    nodes = json.loads((finished / "run.json").read_text())["nodes"]
    assert [node.job.key for node in again.nodes] == [node["key"] for node in nodes]


def unfinished(run: Path) -> Path:
    (run / "result.json").unlink()
    target = next(
        n for n in json.loads((run / "run.json").read_text())["nodes"] if n["name"] == "target"
    )
    (run / target["folder"] / "result.json").unlink()
    return run


def comparison(run: Path) -> Path:
    change(run / "run.json", kind="compare")
    return run


def without(name: str, run: Path) -> Path:
    (run / name).unlink()
    return run


def damaged(run: Path) -> Path:
    weights = run / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    return run


def unreadable(run: Path) -> Path:
    next(run.glob("jobs/resnet18d-w1-*/summary.csv")).write_text("epoch\none\n")
    return run


RUNS: dict[str, tuple[Any, str]] = {
    "nothing": (lambda run: run / "nowhere", "holds no run"),
    "no run": (lambda run: run / "jobs", "holds no run"),
    "unfinished": (unfinished, "is not finished: 7 of 8 models are trained, 28.6% of the FLOPs"),
    "its end missing": (lambda run: without("result.json", run), "is not finished: 8 of 8"),
    "no model": (lambda run: without("model/config.json", run), "has no config.json"),
    "a comparison": (comparison, "is a comparison of many models"),
    "damaged weights": (damaged, "does not have the checksum"),
    "damaged logs": (unreadable, "cannot be read whole: jobs/resnet18d-w1-"),
}


@pytest.mark.parametrize(("spoil", "expected"), RUNS.values(), ids=RUNS)
def test_a_run_that_cannot_be_exported_is_two_lines_and_nothing_is_written(
    spoil: Any, expected: str, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = spoil(copied)
    before = contents(tmp_path)
    assert main(["export", str(run), f"--output={tmp_path / 'out'}"]) == 2
    errors = capsys.readouterr().err
    assert expected in errors and len(errors.strip().splitlines()) == 2
    assert contents(tmp_path) == before


def test_outputs_that_are_refused(finished: Path, exported: Path, tmp_path: Path) -> None:
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "thesis.tex").write_text("years of work")
    model = tmp_path / "model"
    shutil.copytree(finished / "model", model)
    more = tmp_path / "more"
    shutil.copytree(exported, more)
    (more / "figures" / "mine.png").write_text("years of work")
    (tmp_path / "file").write_text("")
    before = contents(tmp_path)
    for folder in (thesis, model, more, finished, finished / "model"):
        with pytest.raises(RbdcError, match="exists and is not empty"):
            export_run(finished, folder)
        with pytest.raises(RbdcError, match="is not just what an export wrote"):
            export_run(finished, folder, force=True)
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RbdcError, match="cannot be written"):
            export_run(finished, folder, force=True)
    for license in ("MIT", "", "my: own", "---"):
        with pytest.raises(RbdcError, match="is no name of a licence"):
            export_run(finished, tmp_path / "out", license=license)
    assert contents(tmp_path) == before


def test_an_earlier_export_is_replaced_by_force(
    finished: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "deep" / "down" / "model"
    words = ["export", str(finished), f"--output={output}"]
    assert main([*words, "--license=mit"]) == 0
    printed = capsys.readouterr().out
    assert f"local-dir:{output}" in printed and f"hf upload USER/NAME {output}" in printed
    assert main(words) == 2
    assert main([*words, "--force"]) == 0
    assert (output / "README.md").read_text() == (exported / "README.md").read_text()
    assert contents(tmp_path / "deep" / "down") == {"model", *(f"model/{name}" for name in FILES)}
    (tmp_path / "empty").mkdir()
    assert contents(export_run(finished, tmp_path / "empty")) == FILES


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_export_that_is_cut_short_leaves_what_was_there(
    error: BaseException,
    finished: Path,
    exported: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_args: Any, **_options: Any) -> None:
        raise error

    shutil.copytree(exported, tmp_path / "old")
    before = (tmp_path / "old" / "README.md").stat().st_mtime_ns
    monkeypatch.setattr(card, "card_text", fails)
    for name in ("new", "old"):
        with pytest.raises(type(error)):
            export_run(finished, tmp_path / name, force=True)
    assert contents(tmp_path) == {"old", *(f"old/{name}" for name in FILES)}
    assert (tmp_path / "old" / "README.md").stat().st_mtime_ns == before


def _export_and_hang(finished: Path, output: Path) -> None:
    def hang(*_args: Any, **_options: Any) -> str:
        signal.pause()
        return ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(card, "card_text", hang)
        export_run(finished, output)


def test_a_killed_export_leaves_no_folder_that_looks_whole(finished: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    process = in_another_process(_export_and_hang, finished, output)
    while not any(_written(tmp_path)) and process.is_alive():
        time.sleep(0.01)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert any(_written(tmp_path)) and not output.exists()
    assert contents(export_run(finished, output)) == FILES


def _written(folder: Path) -> Iterator[Path]:
    return folder.glob("*out*/model.safetensors")
