"""The text of a model card: what `rbdc export` says of a finished run.

Names of classes, of data sets and of whatever else comes from a run may hold anything. So every
value that the template shows is escaped, unless it was made here to be Markdown.
"""

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined

from rbdc.models import ModelSpec, build_meta
from rbdc.report.repeat import hub_name, named_data
from rbdc.report.units import readable_duration, readable_flops
from rbdc.settings import Recipe, Request

_ON_THE_HUB = {
    "cifar10": "uoft-cs/cifar10",
    "cifar100": "uoft-cs/cifar100",
    "fashion-mnist": "zalando-datasets/fashion_mnist",
}
# What Markdown or HTML may take for more than itself; addresses would become links.
_MEANINGFUL = re.compile(r"[&<>\"\\`*_{}\[\]#|~$@!^]|(?<=:)/|(?<=www)\.", re.IGNORECASE)
_PLAIN_CODE = re.compile(r"[\w .,:;+/()=\[\]{}\"'-]*")


class Markdown(str):
    """Text that is Markdown already."""


def escaped(value: object) -> Markdown:
    """Any text as Markdown that shows just this text, on one line."""
    return Markdown(_MEANINGFUL.sub(lambda found: f"&#{ord(found[0])};", one_line(str(value))))


def one_line(text: str) -> str:
    """Without line breaks and control characters, and with nothing that UTF-8 cannot say."""
    plain = "".join(" " if unicodedata.category(c) in ("Cc", "Zl", "Zp") else c for c in text)
    return " ".join(plain.encode(errors="replace").decode().split())


def code(value: object) -> Markdown:
    """In the font of code, where the text is harmless; else escaped."""
    text = one_line(str(value))
    return Markdown(f"`{text}`") if text and _PLAIN_CODE.fullmatch(text) else escaped(text)


def card_text(
    run: Mapping[str, Any],
    images: Mapping[str, Any],
    *,
    license: str | None = None,
    figures: Sequence[str] = (),
) -> str:
    """The README of an exported model: Hugging Face's front matter, and what a reader wants.

    `run` is what `read_run` gives of a finished run, `images` timm's record of how images are
    prepared, `figures` those that stand in the folder beside it.
    """
    environment = Environment(
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: value if isinstance(value, Markdown) else escaped(value),
    )
    environment.filters |= {
        "code": code,
        "percent": lambda share: f"{share:.2%}",
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
        result=run["result"],
        data={**run["data"], "title": _data_title(run), "named": named_data(run["data"]["name"])},
        images=images,
        figures=figures,
        parameters=_parameters(run["about"]["model"]),
        levels=_levels(run),
        trained=_trained(run),
        settings=_settings(run),
        **_compared(run["result"]),
    )


def front_matter(run: Mapping[str, Any], license: str | None) -> str:
    """The YAML that Hugging Face reads, with the accuracy that was measured."""
    result, name = run["result"], run["data"]["name"]
    hub = hub_name(name) or _ON_THE_HUB.get(name)
    library = "timm" if result["timm_loads"] else "rbdc"
    scores = [
        {"type": "accuracy", "name": f"top-{k} accuracy", "value": round(result[f"top{k}"], 6)}
        for k in (1, 5)
    ]
    found = {
        "task": {"type": "image-classification", "name": "Image Classification"},
        "dataset": {"type": hub or one_line(name), "name": _data_title(run), "split": "test"},
        "metrics": scores,
    }
    content = {
        "library_name": library,
        "pipeline_tag": "image-classification",
        **({"license": license} if license else {}),
        "tags": list(dict.fromkeys(["image-classification", library, "rbdc"])),
        **({"datasets": [hub]} if hub else {}),
        "metrics": ["accuracy"],
        "model-index": [{"name": run["about"]["model"]["name"], "results": [found]}],
    }
    return str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True)).strip()


def _data_title(run: Mapping[str, Any]) -> str:
    name = one_line(run["data"]["name"])
    return "Fashion-MNIST (the 12,000 images that come with rbdc)" if name == "embedded" else name


def _parameters(model: Mapping[str, Any]) -> int:
    return sum(tensor.numel() for tensor in build_meta(ModelSpec(**model)).parameters())


def _trained(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every trained model, the target first; where it was coupled, from whom and how well."""
    nodes = run["nodes"]
    trained = []
    for node in nodes.values():
        if node["kind"] != "train":
            continue
        coupling = next((nodes[key] for key in node["parents"] if key in nodes), None)
        parents = [nodes[key] for key in coupling["parents"]] if coupling else []
        trained.append({**node, "coupling": coupling, "from": parents})
    return sorted(trained, key=lambda node: (node["name"] == "standard", node["level"]))


def _levels(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The plan's levels, the target first, with means over their models."""
    levels = []
    for stage in reversed(run["about"]["stages"]):
        here = [
            node
            for node in _trained(run)
            if node["level"] == stage["level"] and node["name"] != "standard"
        ]
        levels.append(
            {
                **stage,
                "spent_flops": sum(node["flops"] for node in here),
                "parents_top1": _mean([p["top1"] for node in here for p in node["from"]]),
                "start_top1": _mean([n["start_top1"] for n in here if n["coupling"]]),
                "top1": _mean([node["top1"] for node in here]),
            }
        )
    return levels


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _settings(run: Mapping[str, Any]) -> list[tuple[str, Markdown]]:
    """What was set otherwise than by default, of the recipe and of the transition."""
    defaults = {**asdict(Request()), **asdict(Recipe())}
    asked = {name: run["asked"][name] for name in run["asked"] if name in defaults}
    return [
        (name, code(_value(value)))
        for name, value in {**asked, **run["recipe"]}.items()
        if name != "seed" and _value(value) != _value(defaults.get(name))
    ]


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _compared(result: Mapping[str, Any]) -> dict[str, Any]:
    """Standard training beside it, whoever won."""
    standard = result.get("standard")
    gap = 100 * (result["top1"] - standard["top1"]) if standard else 0.0
    return {"standard": standard, "gap": gap}
