"""Read the folders that transformers writes: config.json, weights in one file or in shards.

Nothing in a folder is run: its configuration is read as data, by the fields that the architecture's
own class in transformers has, and weights are safetensors.
"""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import Field, with_config
from torch import Tensor
from typing_extensions import TypedDict

from rbdc.coupling import class_names
from rbdc.disk import SHAPE, read_bytes, read_json
from rbdc.errors import CheckpointError
from rbdc.models.build import build_meta
from rbdc.models.config import CONFIG, WEIGHTS, FileName
from rbdc.models.hugging_face import config_fields
from rbdc.models.language import NAMES
from rbdc.models.outline import tied_names
from rbdc.models.spec import ModelSpec
from rbdc.models.vision import (
    TRANSFORMERS,
    TYPES,
    arguments_of,
    class_labels,
    is_vision,
    loaded_state,
)
from rbdc.models.weights import read_weights

TOKENIZER = "tokenizer"
"""Entry of a model's record with the files of its tokenizer, by name."""
INDEX = "model.safetensors.index.json"
PREPROCESSOR = "preprocessor_config.json"
_REMEDY = "Use a folder that transformers' save_pretrained wrote, undamaged."


@with_config(SHAPE)
class HubConfig(TypedDict):
    """transformers' config.json, of which other fields belong to the architecture."""

    model_type: str
    auto_map: NotRequired[Any]
    id2label: NotRequired[dict[Annotated[str, Field(pattern=r"^\d{1,7}$")], str] | None]
    quantization_config: NotRequired[Any]


@with_config(SHAPE)
class Preprocessor(TypedDict):
    """transformers' preprocessor_config.json, of which other fields do not matter here."""

    image_mean: NotRequired[list[float]]
    image_std: NotRequired[list[float]]


@with_config(SHAPE)
class Index(TypedDict):
    """The list of a sharded model's tensors, each with its file."""

    weight_map: Annotated[dict[str, FileName], Field(min_length=1, max_length=10**6)]


def is_hub_folder(folder: Path) -> bool:
    """Return whether a folder has a config.json of transformers, not one of timm."""
    try:
        config = read_json(folder / CONFIG, dict[str, Any], CheckpointError, _REMEDY)
    except CheckpointError:
        return False
    return config is not None and "model_type" in config and "architecture" not in config


def is_language_folder(folder: Path) -> bool:
    """Return whether a folder holds a model of transformers other than an image classifier."""
    return folder.is_dir() and is_hub_folder(folder) and not is_vision(hub_spec(folder).name)


def hub_spec(folder: Path) -> ModelSpec:
    """Return the spec of the model that a folder's config.json describes."""
    read_json(folder / CONFIG, HubConfig, CheckpointError, _REMEDY)
    config = read_json(folder / CONFIG, dict[str, Any], CheckpointError, _REMEDY) or {}
    name = config["model_type"]
    if "auto_map" in config:
        raise CheckpointError(
            f"the model in {folder} needs code of its own (auto_map in {CONFIG}), which "
            "transformers runs only with trust_remote_code",
            "That would run a stranger's program with your rights, so it is never done here. Use a "
            "model whose architecture transformers itself has.",
        )
    if config.get("quantization_config"):
        raise CheckpointError(
            f"the weights in {folder} are quantized", "Couple and train full-precision weights."
        )
    if name in TYPES:
        return ModelSpec(name=TRANSFORMERS + name, arguments=arguments_of(config))
    if name not in NAMES:
        raise CheckpointError(
            f"{folder} has a model of type {str(name)[:50]!r}, which is not among the known ones",
            f"Known are {', '.join((*NAMES, *TYPES))}; in Python, rbdc.couple takes any model and "
            "an example.",
        )
    known = (*config_fields(name), *_OLD_FIELDS)
    arguments = {k: config[k] for k in known if config.get(k) is not None}
    return ModelSpec(name=name, arguments=arguments)


def hub_about(folder: Path) -> dict[str, Any]:
    """Return what a folder says of its model's inputs and outputs, as timm's records call it."""
    config = read_json(folder / CONFIG, dict[str, Any], CheckpointError, _REMEDY) or {}
    if config["model_type"] not in TYPES:
        return {TOKENIZER: read_tokenizer(folder)}
    images = read_json(folder / PREPROCESSOR, Preprocessor, CheckpointError, _REMEDY) or {}
    names = class_labels(config)
    unnamed = names == [f"LABEL_{n}" for n in range(len(names))]  # as transformers fills in
    about: dict[str, Any] = {"label_names": None if unnamed else names}
    for key in ("mean", "std"):
        about[key] = images.get(f"image_{key}")
    return about


def save_hub(model: Any, folder: Path) -> None:
    """Write a model as transformers does, with its tokenizer, or its class names and pixels."""
    record, names = model.pretrained_cfg, class_names(model)
    if names:
        model.config.id2label = dict(enumerate(names))
        model.config.label2id = {name: n for n, name in enumerate(names)}
    model.save_pretrained(folder, max_shard_size="1000TB")  # one file, whose checksum is recorded
    for name, text in (record.get(TOKENIZER) or {}).items():
        (folder / name).write_text(text)
    if "input_size" in record:
        _channels, height, width = record["input_size"]
        images = {
            "image_processor_type": "ViTImageProcessor",
            "size": {"height": height, "width": width},
            "image_mean": list(record["mean"]),
            "image_std": list(record["std"]),
        }
        (folder / PREPROCESSOR).write_text(json.dumps(images, indent=2))


def known_config(folder: Path) -> dict[str, Any]:
    """Return those fields of config.json that describe the model, or say how it was written.

    Others are not copied to models that are made of it: transformers reads names of files, of code
    and of kernels to fetch from some of them.
    """
    config = read_json(folder / CONFIG, dict[str, Any], CheckpointError, _REMEDY) or {}
    known = {*config_fields(config["model_type"]), *_OLD_FIELDS, *_WRITTEN_BY}
    return {key: value for key, value in config.items() if key in known}


_OLD_FIELDS = ("rope_theta", "rope_scaling")  # by older versions of transformers
_WRITTEN_BY = ("model_type", "architectures", "dtype", "torch_dtype", "use_cache", "id2label",
               "label2id", "transformers_version")  # fmt: skip


def hub_state(spec: ModelSpec, folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a folder by the names of the model's state dict."""
    state: dict[str, Tensor] = {}
    for path in weight_files(folder):
        state |= read_weights(path)
    if is_vision(spec.name):
        return loaded_state(build_meta(spec), state, str(folder))
    names = hub_names(spec, state)
    return {name: state[source] for name, source in names.items()}


def weight_files(folder: Path) -> list[Path]:
    """Return the files with a folder's weights; refuse an index that names a missing file."""
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    index = read_json(folder / INDEX, Index, CheckpointError, _REMEDY)
    if index is None:
        raise CheckpointError(
            f"{folder} has neither {WEIGHTS} nor {INDEX}",
            "Save the model with safetensors: model.save_pretrained(folder).",
        )
    files = [folder / name for name in dict.fromkeys(index["weight_map"].values())]
    for path in files:
        if not path.is_file():
            raise CheckpointError(
                f"{INDEX} names {path.name}, which is not in {folder}",
                "Fetch all files of the model again.",
            )
    return files


def hub_names(spec: ModelSpec, found: Collection[str]) -> dict[str, str]:
    """Return for each tensor of the model its name in the files.

    Files may leave out the name of the model inside (GPT-2's do) and the second name of a tied
    tensor, and contain buffers that the model computes. Unknown names are kept, for the check of
    names and shapes to refuse.
    """
    model: Any = build_meta(spec)
    wanted, prefix = model.state_dict(), f"{model.base_model_prefix}."
    names = {}
    for name in found:
        if name in wanted or prefix + name in wanted:
            names[name if name in wanted else prefix + name] = name
        elif not name.endswith(_COMPUTED):
            names[name] = name
    for name, first in tied_names(model).items():
        known = names.get(first, names.get(name))
        if known is not None:
            names[name] = names[first] = known
    return names


_COMPUTED = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias",
             "rotary_emb.inv_freq")  # fmt: skip

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "vocab.txt", "chat_template.jinja",
)  # fmt: skip


SIDE_FILES = (*_TOKENIZER_FILES, "tokenizer.model", "generation_config.json")
"""Files beside a model that stay as they are when it gets wider."""


def side_files(folder: Path, names: Collection[str] = SIDE_FILES) -> list[Path]:
    """Return the files beside a folder's model; refuse a link to a file that is none of its own.

    They are copied into models that are made of it, and a stranger's link could add any file. In
    the cache of Hugging Face, a snapshot has links to the files of its repository.
    """
    here = folder.resolve()
    found = [folder / name for name in names if (folder / name).is_file()]
    for path in found:
        target = path.resolve()
        if here not in target.parents and target.parent != here.parent.parent / "blobs":
            raise CheckpointError(
                f"{path} is a link to {target}, outside of the model's folder",
                "Copy the file itself there if it belongs to the model, or remove the link.",
            )
    return found


def read_tokenizer(folder: Path, names: Collection[str] = _TOKENIZER_FILES) -> dict[str, str]:
    """Return the text files of a folder's tokenizer, by name."""
    try:
        return {path.name: read_bytes(path).decode() for path in side_files(folder, names)}
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the tokenizer in {folder} cannot be read: {error}", _REMEDY
        ) from None
