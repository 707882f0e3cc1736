"""Implement `rbdc export`: write a finished run's model with its card, ready for a model hub.

OUTPUT/
  model.safetensors, config.json, rbdc.json   the run's model, as timm loads it
  README.md                                   the model card
  recipe.yaml                                 every setting, to repeat the run with
  figures/budget.png, figures/curves.png      the card's figures

Names of classes, data sets and anything else that comes from a run may hold any text. So every
value in the card's template is escaped, unless this module made it as Markdown.
"""

import json
import re
import shutil
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined, UndefinedError

from rbdc.data.sources import NAMES
from rbdc.disk import is_writable, whole_folder
from rbdc.errors import RunError
from rbdc.jobs.layout import MODEL, RESULT
from rbdc.jobs.records import read_run_result
from rbdc.metrics import METRICS, Metric, find_metric
from rbdc.models import ModelSpec, build_meta
from rbdc.models.config import CONFIG, RECORD, WEIGHTS, read_config
from rbdc.models.folder import check_sums
from rbdc.models.hub import SIDE_FILES
from rbdc.report.figures import draw_budget, draw_curves, save_each
from rbdc.report.read import read_run
from rbdc.report.run import cost_text, how_to_load, run_status
from rbdc.report.units import readable_duration, readable_flops
from rbdc.settings import Recipe, Request

CARD, SETTINGS, FIGURES = "README.md", "recipe.yaml", "figures"
_MODEL_FILES = (WEIGHTS, CONFIG, RECORD)
_LANGUAGE = "text-generation"  # the hub's name of the task; else image-classification
_OURS = {*_MODEL_FILES, CARD, SETTINGS, FIGURES}
_ON_THE_HUB = {
    "cifar10": "uoft-cs/cifar10",
    "cifar100": "uoft-cs/cifar100",
    "fashion-mnist": "zalando-datasets/fashion_mnist",
}
_ELSEWHERE = ("data", "data_dir", "data_download")  # paths of one machine
# Characters with a meaning in Markdown or HTML; addresses would become links.
_MEANINGFUL = re.compile(r"[&<>\"\\`*_{}\[\]#|~$@!^]|(?<=:)/|(?<=www)\.", re.IGNORECASE)
_PLAIN_CODE = re.compile(r"[\w .,:;+/()=\[\]{}\"'-]*")


def export_run(run: Path, output: Path, *, license: str | None = None, force: bool = False) -> Path:
    """Write the model of a finished run with its card, whole or not at all; return the folder.

    Weights are copied byte for byte. `license` is Hugging Face's identifier of a licence; the card
    names none unless it is given. `force` replaces an earlier export, and nothing else.
    """
    if license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", license):
        raise RunError(
            f"{license!r} is no name of a licence",
            "Use Hugging Face's, in small letters: apache-2.0, mit, cc-by-4.0, other.",
        )
    _check_finished(run)
    output = output.resolve()
    _check_output(output, force=force)
    content = read_run(run)
    if content["missing"]:
        raise RunError(
            f"{run} cannot be read whole: {content['missing'][0]}",
            "Give the run's command again, then export it.",
        )
    with whole_folder(output) as partial:
        _write(partial, run, content, license)
    return output


def export_lines(run: Path, output: Path) -> list[str]:
    """Return the lines that say how to read, load and upload the folder."""
    timm_loads = (read_run_result(run / RESULT) or {})["timm_loads"]
    return [
        f"read         {output / CARD}",
        f"load with    {how_to_load(output, timm_loads=timm_loads)}",
        f"upload with  hf upload USER/NAME {output}",
    ]


def _write(folder: Path, run: Path, content: Mapping[str, Any], license: str | None) -> None:
    (folder / FIGURES).mkdir()
    for name in (*_MODEL_FILES, *SIDE_FILES):  # a language model has its tokenizer, too
        if (run / MODEL / name).is_file():
            shutil.copyfile(run / MODEL / name, folder / name)
    check_sums(folder)
    settings = yaml.safe_dump(repeat_settings(content), sort_keys=False)
    (folder / SETTINGS).write_text(settings, encoding="utf-8")
    (folder / CARD).write_text(_card(folder, run, content, license), encoding="utf-8")


def _card(folder: Path, run: Path, content: Mapping[str, Any], license: str | None) -> str:
    """Draw the card's figures, and return its text."""
    images = {} if is_text(content) else read_config(folder).get("pretrained_cfg") or {}
    try:
        scale = content["about"].get("baseline_flops")  # unknown where nobody named a baseline
        figures = {  # None where the logs are gone
            "budget": draw_budget(content["levels"], baseline_flops=scale),
            "curves": draw_curves(content["nodes"].values(), baseline_flops=scale),
        }
        drawn = [path.name for path in save_each(figures, folder / FIGURES, ["png"])]
        return card_text(content, images, license, drawn)
    except (LookupError, TypeError, ArithmeticError, UndefinedError) as error:
        raise RunError(
            f"{run} lacks what the card says of it: {error}",
            "Export a run that rbdc train wrote, undamaged.",
        ) from error


def _check_finished(run: Path) -> None:
    """Refuse a run that has no model to export, and say how far it is."""
    status = run_status(run)
    if status["kind"] == "transfer":
        raise RunError(
            f"{run} holds detectors, and timm has none: there is no timm model to export",
            "rbdc.transfer.load_detector loads them from its jobs/*/model.",
        )
    if status["kind"] == "compare":
        raise RunError(
            f"{run} is a comparison of many models: it has no one model",
            "Name the folder of one `rbdc train`; models of a comparison lie in its jobs/*/model.",
        )
    nodes, result = status["nodes"], status["result"] or {"nodes": {}}
    if not all(node["state"] == "done" and node["name"] in result["nodes"] for node in nodes):
        trainings = [node for node in nodes if node["kind"] == "train"]
        done = sum(node["state"] == "done" for node in trainings)
        share = status["spent_flops"] / status["planned_flops"]
        failed = [f", and {node['name']} failed" for node in nodes if node["state"] == "failed"]
        raise RunError(
            f"{run} is not finished: {done} of {len(trainings)} models are trained, "
            f"{share:.1%} of the FLOPs are spent{''.join(failed[:1])}",
            "Wait until it is: rbdc status --watch."
            if status["running"]
            else "Give the run's command again to go on with it.",
        )
    if lost := [name for name in _MODEL_FILES if not (run / MODEL / name).is_file()]:
        raise RunError(f"{run / MODEL} has no {lost[0]}", "Give the run's command again.")


def _check_output(output: Path, *, force: bool) -> None:
    if output.is_dir() and (content := {path.name for path in output.iterdir()}):
        if not force:
            raise RunError(
                f"{output} exists and is not empty", "Choose another folder, or use --force."
            )
        drawn = {path.name for path in (output / FIGURES).glob("*")}
        if content - {*SIDE_FILES} != _OURS or not drawn <= {"budget.png", "curves.png"}:
            raise RunError(
                f"{output} is not just what an export wrote, so it is not replaced even by force",
                "Choose another folder, or remove this one yourself.",
            )
    if not is_writable(output.parent) or (output.exists() and not output.is_dir()):
        raise RunError(
            f"{output} cannot be written: where it is to be is not a folder one may write to",
            "Choose another folder.",
        )


class Markdown(str):
    """Text that is Markdown already."""


def escaped(value: object) -> Markdown:
    """Return Markdown that shows just this text, on one line."""
    return Markdown(_MEANINGFUL.sub(lambda found: f"&#{ord(found[0])};", one_line(str(value))))


def one_line(text: str) -> str:
    """Return the text without line breaks, control characters and what UTF-8 cannot encode."""
    plain = "".join(" " if unicodedata.category(c) in ("Cc", "Zl", "Zp") else c for c in text)
    return " ".join(plain.encode(errors="replace").decode().split())


def code(value: object) -> Markdown:
    """Return the text as Markdown code if it has no special characters, else escaped."""
    text = one_line(str(value))
    return Markdown(f"`{text}`") if text and _PLAIN_CODE.fullmatch(text) else escaped(text)


def card_text(
    run: Mapping[str, Any], images: Mapping[str, Any], license: str | None, figures: Sequence[str]
) -> str:
    """Return the README of an exported model, with Hugging Face's front matter.

    `run` is what `read_run` returns for a finished run, `images` timm's record of how images are
    prepared, `figures` the names of the figures in the folder beside it.
    """
    result = run["result"]
    model = build_meta(ModelSpec(**run["about"]["model"]))
    environment = Environment(
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: value if isinstance(value, Markdown) else escaped(value),
    )
    environment.filters |= {
        "code": code,
        "score": lambda values, metric: metric.text(values[metric.name]),
        "mean": lambda rows, metric: {metric.name: fmean(row[metric.name] for row in rows)},
        "number": lambda number: f"{number:.4g}",
        "count": lambda number: f"{number:,}",
        "flops": readable_flops,
        "duration": readable_duration,
    }
    template = environment.from_string((files("rbdc.report") / "card.md.j2").read_text("utf-8"))
    return template.render(
        front=Markdown(front_matter(run, license)),
        run=run,
        plan=run["about"],
        result=result,
        metrics=_metrics(result),
        metric=find_metric(result["metric"]),
        standard=result.get("standard"),
        cost=cost_text(result),
        data={**run["data"], "title": _data_title(run), "named": named_data(run["data"]["name"])},
        images=images,
        text=is_text(run),
        tested=Markdown(_tested(run["data"])),
        samples=_samples(run),
        figures=figures,
        parameters=sum(tensor.numel() for tensor in model.parameters()),
        trained=_trained(run),
        settings=_settings(run),
    )


def _metrics(result: Mapping[str, Any]) -> list[Metric]:
    """Return the metrics that the card shows, the primary one first."""
    known = [METRICS[name] for name in dict.fromkeys((result["metric"], *result["metrics"]))]
    return [metric for metric in known if metric.hub_type or metric.name == result["metric"]]


def is_text(run: Mapping[str, Any]) -> bool:
    """Return whether a run trained a language model."""
    return run["data"].get("train_tokens") is not None


def _tested(data: Mapping[str, Any]) -> str:
    """Return what the scores were measured on."""
    tokens = data.get("test_tokens")
    return f"{data['test_images']:,} test images" if tokens is None else f"{tokens:,} test tokens"


def _samples(run: Mapping[str, Any]) -> list[Mapping[str, str]]:
    """Return the texts that the run's model has written."""
    trained = [node for node in _trained(run) if node["name"] != "standard"]
    return list(trained[0]["samples"]) if trained else []


def front_matter(run: Mapping[str, Any], license: str | None) -> str:
    """Return the YAML that Hugging Face reads, with the measured scores."""
    from huggingface_hub import EvalResult, ModelCardData  # slow to import, and only cards need it

    result, name = run["result"], run["data"]["name"]
    hub = hub_name(name) or _ON_THE_HUB.get(name)
    library = "timm" if result["timm_loads"] else "rbdc"
    task = "image-classification"
    if is_text(run):
        library, task = "transformers", _LANGUAGE
    metrics = _metrics(result)
    found = [
        EvalResult(
            task_type=task,
            task_name=task.replace("-", " ").title(),
            dataset_type=hub or one_line(name),
            dataset_name=_data_title(run),
            dataset_split="test",
            metric_type=metric.hub_type or metric.name,
            metric_name=metric.title,
            metric_value=round(result["metrics"][metric.name], 6),
        )
        for metric in metrics
    ]
    data = ModelCardData(
        library_name=library,
        pipeline_tag=task,
        license=license,
        tags=[task, library, "rbdc"],
        datasets=[hub] if hub else None,
        metrics=list(dict.fromkeys(metric.hub_type or metric.name for metric in metrics)),
        model_name=run["about"]["model"]["name"],
        eval_results=found,
    )
    return str(data.to_yaml())


def repeat_settings(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe file's content: the request as it was asked for.

    `run` is what `read_run` gives. Defaults are included: they may change. The data is named where
    it has a name; a path means nothing elsewhere.
    """
    request = {k: v for k, v in run["request"].items() if k not in _ELSEWHERE}
    name = named_data(run["data"]["name"])
    return {**({"data": name} if name else {}), **request}


def named_data(name: str) -> str | None:
    """Return what `--data` takes for a data set that has a name; None for a path."""
    return name if name in NAMES or hub_name(name) else None


def hub_name(name: str) -> str | None:
    """Return the name of a data set on the Hugging Face hub."""
    match = re.fullmatch(r"hf:(\w[\w.-]*(?:/\w[\w.-]*)?)", name)
    return match[1] if match else None


def _data_title(run: Mapping[str, Any]) -> str:
    name = one_line(run["data"]["name"])
    if name == "embedded" and is_text(run):
        return "tiny Shakespeare (the text that comes with rbdc)"
    return "Fashion-MNIST (the 12,000 images that come with rbdc)" if name == "embedded" else name


def _trained(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every trained model, the target first, with its coupling and parents."""
    nodes = run["nodes"]
    trained = []
    for node in nodes.values():
        if node["kind"] != "train":
            continue
        coupling = next((nodes[key] for key in node["parents"] if key in nodes), None)
        parents = [nodes[key] for key in coupling["parents"]] if coupling else []
        trained.append({**node, "coupling": coupling, "from": parents})
    return sorted(trained, key=lambda node: (node["name"] == "standard", node["level"]))


def _settings(run: Mapping[str, Any]) -> list[tuple[str, Markdown]]:
    """Return the settings of the recipe and the transition that differ from their defaults."""
    defaults = {**asdict(Request()), **asdict(Recipe())}
    asked = {name: run["asked"][name] for name in run["asked"] if name in defaults}
    return [
        (name, code(_value(value)))
        for name, value in {**asked, **run["recipe"]}.items()
        if name != "seed" and _value(value) != _value(defaults.get(name))
    ]


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
