"""Write the text of a model card and its recipe: what `rbdc export` says about a finished run.

Names of classes, data sets and anything else that comes from a run may hold any text. So every
value in the template is escaped, unless this module made it as Markdown.
"""

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from statistics import fmean
from typing import Any

from jinja2 import Environment, StrictUndefined

from rbdc.data.sources import NAMES
from rbdc.metrics import METRICS, Metric, find_metric
from rbdc.models import ModelSpec, build_meta
from rbdc.report.units import readable_duration, readable_flops
from rbdc.settings import Recipe, Request

_ON_THE_HUB = {
    "cifar10": "uoft-cs/cifar10",
    "cifar100": "uoft-cs/cifar100",
    "fashion-mnist": "zalando-datasets/fashion_mnist",
}
_ELSEWHERE = ("data", "data_dir", "data_download")  # paths of one machine
# Characters with a meaning in Markdown or HTML; addresses would become links.
_MEANINGFUL = re.compile(r"[&<>\"\\`*_{}\[\]#|~$@!^]|(?<=:)/|(?<=www)\.", re.IGNORECASE)
_PLAIN_CODE = re.compile(r"[\w .,:;+/()=\[\]{}\"'-]*")


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
        data={**run["data"], "title": _data_title(run), "named": named_data(run["data"]["name"])},
        images=images,
        figures=figures,
        parameters=sum(tensor.numel() for tensor in model.parameters()),
        trained=_trained(run),
        settings=_settings(run),
    )


def _metrics(result: Mapping[str, Any]) -> list[Metric]:
    """Return the metrics that the card shows, the primary one first."""
    known = [METRICS[name] for name in dict.fromkeys((result["metric"], *result["metrics"]))]
    return [metric for metric in known if metric.hub_type]


def front_matter(run: Mapping[str, Any], license: str | None) -> str:
    """Return the YAML that Hugging Face reads, with the measured scores."""
    from huggingface_hub import EvalResult, ModelCardData  # slow to import, and only cards need it

    result, name = run["result"], run["data"]["name"]
    hub = hub_name(name) or _ON_THE_HUB.get(name)
    library = "timm" if result["timm_loads"] else "rbdc"
    metrics = _metrics(result)
    found = [
        EvalResult(
            task_type="image-classification",
            task_name="Image Classification",
            dataset_type=hub or one_line(name),
            dataset_name=_data_title(run),
            dataset_split="test",
            metric_type=metric.hub_type,
            metric_name=metric.title,
            metric_value=round(result["metrics"][metric.name], 6),
        )
        for metric in metrics
    ]
    data = ModelCardData(
        library_name=library,
        pipeline_tag="image-classification",
        license=license,
        tags=["image-classification", library, "rbdc"],
        datasets=[hub] if hub else None,
        metrics=list(dict.fromkeys(metric.hub_type for metric in metrics)),
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
