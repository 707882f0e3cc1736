"""Read checkpoints as training loops leave them: timm's, DeiT's, torchvision's, Lightning's.

They hold the weights under one of several keys, their names behind the prefixes of wrappers, and
beside them what the model was created with. Nothing in a file is run: pickles are read with
`weights_only=True`, and arguments only where a constructor has them.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from torch import Tensor

from rbdc.errors import CheckpointError
from rbdc.models.create import TORCHVISION

_EMA = ("state_dict_ema", "model_ema")
_OF_WRAPPERS = re.compile(r"(^|\.)_orig_mod(?=\.)")  # torch.compile, of the model or a part of it
_COUNTERS = {"n_averaged"}  # of torch's AveragedModel
_LIGHTNING = "pytorch-lightning_version"


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """What a checkpoint says of the training that wrote it."""

    model: str | None = None
    """Name of the architecture, as `rbdc.build` takes it."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that the model was created with, beside those that its tensors show."""
    by: str = ""
    """Who wrote it, for people."""
    has_ema: bool = False


def read_origin(path: Path) -> Origin:
    """Return what a checkpoint says beside its weights; nothing for plain weights.

    Tensors stay on disk. A file that cannot be read says nothing here: reading its weights refuses
    it.
    """
    if path.suffix == ".safetensors":
        return Origin()
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="meta", weights_only=True)
    except Exception:  # any, of a file that somebody else wrote
        return Origin()
    if not isinstance(content, dict):
        return Origin()
    has_ema = any(content.get(key) is not None for key in _EMA)
    if _LIGHTNING in content:
        return Origin(by="Lightning", has_ema=has_ema)
    args = content.get("args")
    given = vars(args) if isinstance(args, argparse.Namespace) else {}
    name = given.get("model") or content.get("arch")
    if not isinstance(name, str):
        return Origin(has_ema=has_ema)
    of_timm = timm.is_model(name)
    theirs = name in torchvision.models.list_models(module=torchvision.models)
    if of_timm and ("arch" in content or "drop_path" in given or not theirs):  # DeiT's has the last
        return Origin(model=name, arguments=_arguments(given), by="timm", has_ema=has_ema)
    if theirs:
        return Origin(model=TORCHVISION + name, by="torchvision", has_ema=has_ema)
    return Origin(has_ema=has_ema)


def _arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the constructor that timm's train.py was given."""
    arguments = dict(given["model_kwargs"]) if isinstance(given.get("model_kwargs"), dict) else {}
    size = given.get("input_size")
    if isinstance(size, Sequence) and len(size) == 3:
        arguments |= {"in_chans": size[0], "img_size": size[1]}
    elif isinstance(size, int):  # DeiT's
        arguments["img_size"] = size
    for name in ("in_chans", "img_size"):
        if isinstance(given.get(name), int):
            arguments.setdefault(name, given[name])
    if isinstance(given.get("gp"), str):
        arguments.setdefault("global_pool", given["gp"])
    return arguments


def unwrapped_state(
    state: Mapping[str, Tensor], wanted: Sequence[str], model: object, where: Path
) -> tuple[dict[str, Tensor], str]:
    """Return the tensors by the model's names, and the prefix that they had in the file.

    Tensors outside of the prefix, such as those of a metric or a loss, are left out. Names that are
    not the model's are kept where there is no prefix: the check of names and shapes refuses them.
    """
    plain = {_OF_WRAPPERS.sub("", k).removeprefix("."): t for k, t in state.items()}
    plain = {name: tensor for name, tensor in plain.items() if name not in _COUNTERS}
    if any(name in plain for name in wanted):
        return plain, ""
    found = {
        name.removesuffix(wanted[0])
        for name in plain
        if name.endswith(f".{wanted[0]}") and _has_all(plain, name.removesuffix(wanted[0]), wanted)
    }
    if len(found) > 1:
        raise CheckpointError(
            f"{where} holds {len(found)} models like {model}: {', '.join(sorted(found))}",
            "Save the state dict of one of them, and give that file.",
        )
    if not found:
        some = ", ".join(list(plain)[:3])
        raise CheckpointError(
            f"{where} has the weights of another module than {model}: it has {some}, ...",
            f"Name the architecture that it was trained with; {wanted[0]} and {len(wanted) - 1} "
            "more were expected, all behind one prefix or none.",
        )
    (prefix,) = found
    return {name: plain[prefix + name] for name in wanted}, prefix


def _has_all(state: Mapping[str, Tensor], prefix: str, wanted: Sequence[str]) -> bool:
    return all(prefix + name in state for name in wanted)
