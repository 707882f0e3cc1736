"""Read and write models in the folder formats of timm and transformers, and read weight files.

`timm.create_model("local-dir:DIR", pretrained=True)` loads an exported folder. It contains
`config.json` (architecture, model_args, label_names), `model.safetensors`, and `rbdc.json` with the
spec, checksums of both and the model's history. Reading never executes code from a file:
only safetensors, JSON, and pickles with `weights_only=True` are read.
"""

import copy
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from timm.models import save_for_hf
from torch import Tensor, nn

from rbdc.coupling import class_names, set_class_names
from rbdc.coupling.layout import heads_of
from rbdc.disk import is_writable, json_text, sha256_of, whole_folder
from rbdc.errors import CheckpointError, ModelError
from rbdc.models.build import (
    as_spec,
    build_empty,
    build_meta,
    family,
    fold_parametrizations,
    shapes_of,
    spec_of,
    timm_arguments,
)
from rbdc.models.checkpoints import read_origin, unwrapped_state
from rbdc.models.config import (
    CONFIG,
    RECORD,
    WEIGHTS,
    constructor_arguments,
    read_config,
    read_record,
)
from rbdc.models.create import TORCHVISION, check_tensors, is_transformers
from rbdc.models.foreign import timm_spec
from rbdc.models.hub import (
    TOKENIZER,
    hub_about,
    hub_spec,
    hub_state,
    is_hub_folder,
    save_hub,
)
from rbdc.models.language import is_language
from rbdc.models.spec import ModelSpec
from rbdc.models.weights import PICKLED_WEIGHTS, read_weights, weights_in
from rbdc.structure import unwrapped

_FILES = {CONFIG, WEIGHTS, PICKLED_WEIGHTS, RECORD}
_HUB_FILES = re.compile(
    r"generation_config\.json|model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|chat_template\.jinja"
    r"|(tokenizer|preprocessor)(_config)?\.json|tokenizer\.model|special_tokens_map\.json|added_tokens\.json"
    r"|vocab\.(json|txt)|merges\.txt"
)
"""Names of the other files in a folder of transformers that has no code of its own."""
_WIDTHS_TO_TRY = (1.0, 0.5, 0.25, 0.125, 0.0625, 2.0, 4.0)


def export(
    model: nn.Module,
    folder: str | Path,
    *,
    arguments: Mapping[str, Any] | None = None,
    record: Mapping[str, Any] | None = None,
    force: bool = False,
) -> Path:
    """Write `model` atomically as a folder in timm's format, and return its path.

    The model is one of `rbdc.build` or `rbdc.load`, or any of `timm.create_model`, with the
    `arguments` that it was given where they cannot be read from it; DDP, `torch.compile` or an
    average around it do not matter. timm can load the folder, except for a ResNet without the deep
    stem at a width other than 1.0, which timm cannot build; `rbdc.load` loads that too. `record` is
    the model's history for rbdc.json. An existing model is replaced only with `force`, after the
    new one is complete.
    """
    target = Path(folder).resolve()
    check_writable(target, force=force)
    model = fold_parametrizations(unwrapped(model))
    known = hasattr(model, "rbdc_spec") and arguments is None
    spec = spec_of(model) if known else timm_spec(model, arguments)
    names = class_names(model)
    check_tensors(spec, shapes_of(spec), model.state_dict(), "the model")
    if names and not is_language(spec.name) and len(names) != model.num_classes:
        raise CheckpointError(
            f"the model has {model.num_classes} classes and {len(names)} class names",
            "Give every class its name, in the order of the logits.",
        )
    if not all(tensor.is_contiguous() for tensor in model.state_dict().values()):
        model = copy.deepcopy(model).to(memory_format=torch.contiguous_format)  # channels_last
    with written_whole(target, spec.to_json(), record or {}) as partial:
        if is_transformers(spec.name):
            save_hub(model, partial)
            return target
        if spec.name.startswith(TORCHVISION):
            _tell_features(model)
        save_for_hf(
            model,
            str(partial),
            model_config={"label_names": list(names)} if names else None,
            model_args=timm_arguments(spec),
            safe_serialization=True,
        )
    return target


def _tell_features(model: Any) -> None:
    """Give a model of torchvision the number that timm's models have of their head's inputs."""
    head = model.get_submodule(model.pretrained_cfg["classifier"])
    model.num_features = getattr(head, "in_features", None) or head.in_channels


def copy_model(source: Path, folder: Path, *, record: Mapping[str, Any]) -> None:
    """Copy an exported model byte for byte, with another record of how it came to be."""
    target = folder.resolve()
    check_writable(target, force=True)
    check_sums(source)
    with written_whole(target, read_record(source)["spec"], record) as partial:
        for path in source.iterdir():
            if path.name in (CONFIG, WEIGHTS) or _HUB_FILES.fullmatch(path.name):
                shutil.copyfile(path, partial / path.name)


@contextmanager
def written_whole(
    target: Path, spec: Mapping[str, Any], record: Mapping[str, Any]
) -> Iterator[Path]:
    """Yield a temporary folder, add rbdc.json, and put it in the place of `target`."""
    try:
        with whole_folder(target) as partial:
            yield partial
            sums: dict[str, Any] = {"config_sha256": sha256_of(partial / CONFIG)}
            if (partial / WEIGHTS).exists():
                sums["sha256"] = sha256_of(partial / WEIGHTS)
            else:
                sums["shards"] = {p.name: sha256_of(p) for p in partial.glob("*.safetensors")}
            (partial / RECORD).write_text(json_text({**record, "spec": spec, **sums}))
    except SafetensorError as error:  # raised for a full disk
        raise CheckpointError(
            f"{target} could not be written: {error}", "Make room, or choose another folder."
        ) from error


def check_writable(folder: Path, *, force: bool) -> None:
    """Refuse a folder that `export` would refuse, before any work is done."""
    folder = folder.resolve()
    if folder.is_dir():
        content = {path.name for path in folder.iterdir()}
        if content and not force:
            raise CheckpointError(
                f"{folder} exists and is not empty", "Choose another folder, or use force."
            )
        foreign = (name for name in content - _FILES if not _HUB_FILES.fullmatch(name))
        if content and (CONFIG not in content or any(foreign)):
            raise CheckpointError(
                f"{folder} contains more than an exported model, so even force does not replace it",
                "Choose another folder, or remove this one yourself.",
            )
    if not is_writable(folder):
        raise CheckpointError(
            f"{folder} cannot be written: its parent is not a writable folder",
            "Choose another folder.",
        )


def load(
    path: str | Path,
    *,
    model: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    use_ema: bool = True,
) -> nn.Module:
    """Load a model from an exported folder, or from a checkpoint and an architecture's name.

    timm's and torchvision's checkpoints name their model themselves. The prefixes of DDP,
    `torch.compile` and Lightning modules are taken off the names of weights. The width and number
    of classes of a weight file are read from its tensors. Other differences from the architecture's
    defaults (img_size, depth, ...) are given as `arguments`. If a training checkpoint has raw
    weights and EMA weights, the EMA weights are used, as timm does, unless `use_ema` is False.
    Weights are converted to fp32.
    """
    return load_noted(path, model=model, arguments=arguments, use_ema=use_ema)[0]


def load_noted(
    path: str | Path,
    *,
    model: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    use_ema: bool = True,
) -> tuple[nn.Module, str]:
    """Load a model as `load` does, and return it with what was read, for people."""
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist", "Name a folder or a weight file.")
    if path.is_dir():
        if model is not None or arguments:
            raise CheckpointError(
                f"{path} is a folder, which already names its model",
                "Give a model name and arguments only with weight files.",
            )
        spec, about = folder_spec(path)
        if is_transformers(spec.name):
            state = hub_state(spec, path)
        else:
            wanted = list(shapes_of(spec))  # transformers' wrapper of timm's models has a prefix
            state, _ = unwrapped_state(read_weights(weights_in(path), use_ema), wanted, spec, path)
        check_sums(path)  # after it: what is no file has no checksum
        note = str(spec)
    else:
        spec, state, note = _read_checkpoint(path, model, arguments, use_ema)
        about = {}
    check_tensors(spec, shapes_of(spec), state, str(path))  # before memory is taken
    result = build_empty(spec)
    # Copy, do not assign: tensors of a memory-mapped file have the file's alignment, and kernels
    # round differently on it. The file may also be replaced while the model is in use.
    result.load_state_dict(state)
    _restore_metadata(result, about)
    return result, f"{path}: {note}"


def _read_checkpoint(
    path: Path, name: str | None, given: Mapping[str, Any] | None, use_ema: bool
) -> tuple[ModelSpec, dict[str, Tensor], str]:
    """Return the spec and the weights in a file, and what was read from it, for people."""
    state = read_weights(path, use_ema)  # first: it refuses what is no file
    origin = read_origin(path)
    if name is None and origin.model is None:
        raise CheckpointError(
            f"{path} contains only weights, and not the name of their model",
            "Name the architecture: --model NAME (Python: load(path, model=NAME)).",
        )
    said = origin.arguments if name in (None, origin.model) else {}
    name, arguments = str(name or origin.model), {**said, **(given or {})}
    wanted = list(build_meta(as_spec(name, **arguments)).state_dict())
    state, prefix = unwrapped_state(state, wanted, name, path)
    spec = _spec_of_state(name, arguments, state)
    words = [
        str(spec),
        *(f"{key} {value}" for key, value in said.items() if value is not None),
        *([f"as {origin.by} wrote it"] if origin.by else []),
        *([f"{'EMA' if use_ema else 'raw'} weights"] if origin.has_ema else []),
        *([f"without the prefix {prefix}"] if prefix else []),
    ]
    return spec, state, ", ".join(words)


def _restore_metadata(model: Any, about: Mapping[str, Any]) -> None:
    """Restore the class names and image preprocessing, which weights do not contain."""
    if is_language(spec_of(model).name):
        model.pretrained_cfg[TOKENIZER] = about.get(TOKENIZER)
        return
    set_class_names(model, about.get("label_names"))
    record = model.pretrained_cfg
    for key in ("mean", "std"):
        values = about.get(key)  # timm writes three for any number of channels: ignore those
        if isinstance(values, list) and len(values) == record["input_size"][0]:
            record[key] = tuple(values)
    record.update({key: about[key] for key in ("crop_pct", "interpolation") if key in about})


def folder_spec(folder: Path) -> tuple[ModelSpec, dict[str, Any]]:
    """Return the spec of the model in a folder, and its `pretrained_cfg` with class names."""
    if is_hub_folder(folder):
        spec = hub_spec(folder)
        known = read_record(folder).get("spec")
        return ModelSpec(**known) if known else spec, hub_about(folder)
    config, record = read_config(folder), read_record(folder)
    data = config.get("pretrained_cfg") or {}
    about = {**data, "label_names": config.get("label_names") or data.get("label_names")}
    if "spec" in record:
        return ModelSpec(**record["spec"]), about
    name, arguments = config["architecture"], constructor_arguments(config)
    size = data.get("input_size")
    if size and not family(as_spec(name)).takes_image_size:
        arguments.setdefault("img_size", size[-1])
    return ModelSpec(name=name, arguments=arguments), about


def _spec_of_state(name: str, arguments: dict[str, Any], state: Mapping[str, Tensor]) -> ModelSpec:
    """Return the architecture at the width whose shapes fit these weights best."""
    head = f"{heads_of(build_meta(as_spec(name, **arguments)))[0]}.weight"
    if head in state:
        arguments.setdefault("num_classes", state[head].shape[0])
    candidates = []
    for width in _WIDTHS_TO_TRY:
        spec = as_spec(name, width, **arguments)
        try:
            shapes = shapes_of(spec)
        except ModelError:
            continue
        fit = sum(key in shapes and t.shape == shapes[key].shape for key, t in state.items())
        if fit == len(state):
            return spec
        candidates.append((fit, spec))
    # if none fits fully, the nearest gives the most useful error message
    return max(candidates, key=lambda candidate: candidate[0])[1]


def check_sums(folder: Path) -> None:
    """Refuse a folder whose weights or config.json are not those that rbdc.json was written for."""
    record = read_record(folder)
    for name, expected in (
        (weights_in(folder).name, record.get("sha256")),
        (CONFIG, record.get("config_sha256")),
        *record.get("shards", {}).items(),
    ):
        if expected and (not (folder / name).is_file() or expected != sha256_of(folder / name)):
            raise CheckpointError(
                f"{folder / name} does not have the checksum written in {RECORD}",
                "It is damaged or was changed. Write the model again; of a run, rbdc doctor RUN "
                "--repair removes it and the run's command computes it again.",
            )
