"""The settings that a finished run can be repeated with, whoever began it and however."""

import re
from collections.abc import Mapping
from typing import Any

from rbdc.data.sources import NAMES

_ELSEWHERE = ("data", "data_dir", "data_download")  # paths of one machine


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
