"""Pages, cards and comparisons of language models speak of tokens, and of texts."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from playwright.sync_api import Browser

from rbdc.data.text_sources import embedded_text
from rbdc.experiments.compare import ComparisonSpec, prepare_comparison, run_comparison
from rbdc.experiments.train import Training, prepare
from rbdc.report.card import export_run
from rbdc.report.page import read_state
from rbdc.runs.run import Where
from rbdc.settings import Recipe, Request
from tests.report.browsing import EVIL, visit
from tests.support import QUICK, TINY_TEXT, change, made_once, small_recipe, started

transformers = pytest.importorskip("transformers")


def written(folder: Path) -> Path:
    path = folder / "plays.txt"
    path.write_text(embedded_text()[:3000])
    return path


def asked(text: Path, **settings: Any) -> tuple[Request, Recipe]:
    request = Request(model="gpt2", model_kwargs=TINY_TEXT["gpt2"], data=str(text), **settings)
    return request, small_recipe(smoothing=0.0, warmup_epochs=0.1)


def small_run(text: Path) -> Training:
    options = {"budget": 1.0, "baseline_epochs": 2.0, "rounding": "none", "with_baseline": True}
    return prepare(*asked(text, **options))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nobody may change it."""
    text = written(tmp_path_factory.mktemp("text"))
    return made_once(
        tmp_path_factory, "language", lambda output: started(small_run(text), output, jobs=1)
    )


def test_a_run_records_tokens_and_texts(finished: Path) -> None:
    (run,) = read_state([finished])["runs"]
    assert [metric["name"] for metric in run["metrics"]] == ["loss", "perplexity", "bits_per_byte"]
    assert not run["missing"] and run["data"]["train_tokens"] == 2700
    trained = [node for node in run["nodes"].values() if node["kind"] == "train"]
    assert {node["sequence_length"] for node in trained} == {16}
    for node in trained:
        assert [len(sample["text"]) for sample in node["samples"]] == [120, 120]


def test_the_page_shows_texts_and_none_becomes_html(
    finished: Path, browser: Browser, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    for path in folder.glob("jobs/*/result.json"):
        if "samples" in json.loads(path.read_text()):
            change(path, samples=[{"prompt": EVIL, "text": f"then {EVIL}"}])
    shown = visit(browser, [folder], tmp_path)
    page = shown.text("body")
    assert "Texts that the models write" in page and f"then {EVIL}" in page
    assert "2,700 training and 300 test tokens by characters, in sequences of 16" in page
    assert "AutoModelForCausalLM" in page and "images" not in page
    shown.page.click("[aria-label^='target, done']")
    assert "tokens a second" in shown.text("#node")
    assert not shown.problems and shown.page.title() != "hurt"


def test_damaged_texts_are_named(finished: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    path = next(p for p in folder.glob("jobs/*/result.json") if "samples" in p.read_text())
    change(path, samples=[{"prompt": 3}])
    (run,) = read_state([folder])["runs"]
    assert any("samples" in what for what in run["missing"])


def test_the_card_speaks_of_tokens_and_transformers_loads_its_folder(
    finished: Path, tmp_path: Path
) -> None:
    output = export_run(finished, tmp_path / "model")
    card = (output / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["library_name"] == "transformers" and front["pipeline_tag"] == "text-generation"
    assert front["metrics"] == ["loss", "perplexity", "bits_per_byte"]
    for said in ("2,700 tokens", "300 test tokens", "## Samples", "perplexity", "a sequence"):
        assert said in card
    for absent in ("image", "timm.create_model", "classes", "top-1"):
        assert absent not in card
    model = transformers.AutoModelForCausalLM.from_pretrained(output)
    tokenizer = transformers.AutoTokenizer.from_pretrained(output)
    tokens = tokenizer("First", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(model.generate(tokens, max_new_tokens=9)[0]).startswith("First")
    export_run(finished, output, force=True)  # its tokenizer is no reason to refuse


def test_protocols_compare_with_lower_is_better(tmp_path: Path) -> None:
    protocols = ("standard", "rbdc:1", "net2net", "hypercloning", "stack:1")
    spec = ComparisonSpec(protocols=protocols, budgets=(1.0,), seeds=1)
    where = Where(machine=QUICK, jobs=1)
    request, recipe = asked(written(tmp_path), baseline_epochs=1.0)
    comparison = prepare_comparison(request, recipe, spec, where)
    summary = run_comparison(comparison, tmp_path / "run", where)
    assert {line["protocol"]: line["missing"] for line in summary["lines"]} == dict.fromkeys(
        protocols, 0
    )
    assert summary["metric"] == "loss"
    for row in summary["rows"]:
        assert 0.9 < row["flops"] < 1.1 and row["score"] < 5
    copies = [
        result
        for path in (tmp_path / "run").glob("jobs/*/result.json")
        if (result := json.loads(path.read_text()))["kind"] == "grow" and "proof_error" in result
    ]
    assert len(copies) == 3 and all(result["proof_error"] < 1e-5 for result in copies)
