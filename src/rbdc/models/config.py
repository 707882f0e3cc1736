"""Read what a folder says about its model: timm's config.json, and rbdc.json beside it."""

from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import AllowInfNan, Field, with_config
from typing_extensions import TypedDict

from rbdc.disk import SHAPE, read_json
from rbdc.errors import CheckpointError

CONFIG, WEIGHTS, RECORD = "config.json", "model.safetensors", "rbdc.json"
_REMEDY = "Use a folder that timm or rbdc wrote, undamaged."

FileName = Annotated[str, Field(pattern=r"^\w[\w.-]{0,199}$")]
"""Name of a file in the folder itself."""
_Size = Annotated[int, Field(ge=1, le=2**20)]
_Channel = Annotated[float, AllowInfNan(False)]
_Deviation = Annotated[_Channel, Field(gt=0)]
_Names = list[str] | dict[Annotated[str, Field(pattern=r"^\d{1,7}$")], str]  # or by index


@with_config(SHAPE)
class Images(TypedDict, total=False):
    """How images are prepared: timm's `pretrained_cfg`."""

    input_size: Annotated[list[_Size], Field(min_length=3, max_length=3)] | None
    mean: list[_Channel] | None
    std: list[_Deviation] | None
    crop_pct: Annotated[float, Field(gt=0, le=2)] | None
    interpolation: Annotated[str, Field(pattern="^[a-z]{0,20}$")] | None
    label_names: _Names | None


@with_config(SHAPE)
class Config(TypedDict):
    """timm's config.json."""

    architecture: str
    num_classes: NotRequired[Annotated[int, Field(ge=0, le=2**20)] | None]
    model_args: NotRequired[dict[str, Any] | None]
    label_names: NotRequired[_Names | None]
    pretrained_cfg: NotRequired[Images | None]


@with_config({**SHAPE, "extra": "forbid"})
class Spec(TypedDict):
    """A ModelSpec as JSON."""

    name: str
    width: NotRequired[float]
    arguments: NotRequired[dict[str, Any]]


@with_config(SHAPE)
class Record(TypedDict, total=False):
    """rbdc.json: the spec, checksums, and how the model came to be."""

    spec: Spec
    sha256: str
    """SHA-256 of the weights."""
    config_sha256: str
    """SHA-256 of config.json, which has the classes, means and deviations."""
    shards: dict[FileName, str]
    """SHA-256 of each file, if the weights are in several."""


def read_config(folder: Path) -> Config:
    """Return the content of a folder's config.json."""
    config = read_json(folder / CONFIG, Config, CheckpointError, _REMEDY)
    if config is None:
        raise CheckpointError(
            f"{folder / CONFIG} does not exist",
            f"An exported folder has {CONFIG} and {WEIGHTS}.",
        )
    return config


def read_record(folder: Path) -> Record:
    """Return the content of a folder's rbdc.json, which is empty for a folder of timm's."""
    return read_json(folder / RECORD, Record, CheckpointError, _REMEDY) or {}


def constructor_arguments(config: Config) -> dict[str, Any]:
    """Return the arguments of timm's constructor that config.json gives."""
    arguments = dict(config.get("model_args") or {})
    if config.get("num_classes") is not None:
        arguments.setdefault("num_classes", config["num_classes"])
    return arguments
