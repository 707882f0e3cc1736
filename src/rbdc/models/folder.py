"""Read and write models in timm's folder format, and read weight files.

`timm.create_model("local-dir:DIR", pretrained=True)` loads an exported folder. It contains
`config.json` (architecture, model_args, label_names), `model.safetensors`, and `rbdc.json` with the
spec, checksums of both and the model's history. Reading never executes code from a file:
only safetensors, JSON, and pickles with `weights_only=True` are read.
"""

import copy
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from timm.models import load_state_dict, save_for_hf
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
from rbdc.models.config import (
    CONFIG,
    RECORD,
    WEIGHTS,
    constructor_arguments,
    read_config,
    read_record,
)
from rbdc.models.create import check_tensors
from rbdc.models.spec import ModelSpec

PICKLED_WEIGHTS = "pytorch_model.bin"  # what timm writes without safe_serialization
_FILES = {CONFIG, WEIGHTS, PICKLED_WEIGHTS, RECORD}
_WIDTHS_TO_TRY = (1.0, 0.5, 0.25, 0.125, 0.0625, 2.0, 4.0)


def export(
    model: nn.Module,
    folder: str | Path,
    *,
    record: Mapping[str, Any] | None = None,
    force: bool = False,
) -> Path:
    """Write `model` atomically as a folder in timm's format, and return its path.

    timm can load it, except for a ResNet without the deep stem at a width other than 1.0, which
    timm cannot build; `rbdc.load` loads that too. `record` is the model's history for rbdc.json. An
    existing model is replaced only with `force`, after the new one is complete.
    """
    target = Path(folder).resolve()
    check_writable(target, force=force)
    model = fold_parametrizations(model)
    spec, names = spec_of(model), class_names(model)
    check_tensors(spec, shapes_of(spec), model.state_dict(), "the model")
    if names and len(names) != model.num_classes:
        raise CheckpointError(
            f"the model has {model.num_classes} classes and {len(names)} class names",
            "Give every class its name, in the order of the logits.",
        )
    if not all(tensor.is_contiguous() for tensor in model.state_dict().values()):
        model = copy.deepcopy(model).to(memory_format=torch.contiguous_format)  # channels_last
    with _written_whole(target, spec.to_json(), record or {}) as partial:
        save_for_hf(
            model,
            str(partial),
            model_config={"label_names": list(names)} if names else None,
            model_args=timm_arguments(spec),
            safe_serialization=True,
        )
    return target


def copy_model(source: Path, folder: Path, *, record: Mapping[str, Any]) -> None:
    """Copy an exported model byte for byte, with another record of how it came to be."""
    target = folder.resolve()
    check_writable(target, force=True)
    check_sums(source)
    with _written_whole(target, read_record(source)["spec"], record) as partial:
        for name in (CONFIG, WEIGHTS):
            shutil.copyfile(source / name, partial / name)


@contextmanager
def _written_whole(
    target: Path, spec: Mapping[str, Any], record: Mapping[str, Any]
) -> Iterator[Path]:
    """Yield a temporary folder, add rbdc.json, and put it in the place of `target`."""
    try:
        with whole_folder(target) as partial:
            yield partial
            sums = {
                "sha256": sha256_of(partial / WEIGHTS),
                "config_sha256": sha256_of(partial / CONFIG),
            }
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
        if content and (CONFIG not in content or content - _FILES):
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
    """Load a model from an exported folder, or from a weight file and an architecture's name.

    The width and number of classes of a weight file are read from its tensors. Other differences
    from the architecture's defaults (img_size, depth, ...) are given as `arguments`. If a training
    checkpoint has raw weights and EMA weights, the EMA weights are used, as timm does, unless
    `use_ema` is False. Weights are converted to fp32.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist", "Name a folder or a weight file.")
    if path.is_dir():
        if model is not None or arguments:
            raise CheckpointError(
                f"{path} is a folder, which already names its model",
                "Give a model name and arguments only with weight files.",
            )
        spec, about = _folder_spec(path)
        state = read_weights(weights_in(path), use_ema)
        check_sums(path)  # after it: what is no file has no checksum
    else:
        if model is None:
            raise CheckpointError(
                f"{path} contains only weights, and not the name of their model",
                "Name the architecture: --model NAME (Python: load(path, model=NAME)).",
            )
        state, about = read_weights(path, use_ema), {}
        spec = _spec_of_state(model, dict(arguments or {}), state)
    check_tensors(spec, shapes_of(spec), state, str(path))  # before memory is taken
    result = build_empty(spec)
    # Copy, do not assign: tensors of a memory-mapped file have the file's alignment, and kernels
    # round differently on it. The file may also be replaced while the model is in use.
    result.load_state_dict(state)
    _restore_metadata(result, about)
    return result


def _restore_metadata(model: Any, about: Mapping[str, Any]) -> None:
    """Restore the class names and image preprocessing, which weights do not contain."""
    set_class_names(model, about.get("label_names"))
    record = model.pretrained_cfg
    for key in ("mean", "std"):
        values = about.get(key)  # timm writes three for any number of channels: ignore those
        if isinstance(values, list) and len(values) == record["input_size"][0]:
            record[key] = tuple(values)
    record.update({key: about[key] for key in ("crop_pct", "interpolation") if key in about})


def _folder_spec(folder: Path) -> tuple[ModelSpec, dict[str, Any]]:
    """Return the spec of the model in a folder, and its `pretrained_cfg` with class names."""
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
        candidates.append((fit, spec))
    # if none fits fully, the nearest gives the most useful error message
    return max(candidates, key=lambda candidate: candidate[0])[1]


def weights_in(folder: Path) -> Path:
    """Return the path of the weights in an exported folder."""
    pickled = folder / PICKLED_WEIGHTS
    return pickled if pickled.exists() and not (folder / WEIGHTS).exists() else folder / WEIGHTS


def read_weights(path: Path, use_ema: bool = True) -> dict[str, Tensor]:
    """Read a state dict from a file as timm does, without executing code in it."""
    if not path.is_file():  # a pipe would be waited for
        found = "is not a file" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {found}", "An exported folder must contain this file.")
    try:
        state = load_state_dict(str(path), use_ema=use_ema, device="cpu", weights_only=True)
    except Exception as error:  # an unknown file can raise any error
        reason = str(error).strip().splitlines() or [type(error).__name__]
        if isinstance(error, UnpicklingError):  # torch's message advises to trust the file
            reason = ["it is damaged, or contains more than tensors"]
        raise CheckpointError(
            f"{path} cannot be read as weights: {reason[0]}",
            "Use safetensors, or a pickle of tensors only: nothing else is ever unpickled.",
        ) from error
    if not state or not all(isinstance(t, Tensor) and not t.is_meta for t in state.values()):
        raise CheckpointError(
            f"{path} contains no state dict: a mapping of names to tensors was expected",
            "Save model.state_dict(), alone or under the key 'model' or 'state_dict'.",
        )
    for name, tensor in state.items():
        if tensor.nbytes > tensor.untyped_storage().nbytes():  # a view that repeats few numbers
            raise CheckpointError(
                f"{name} in {path} is {tuple(tensor.shape)}, more than the file holds",
                "Save contiguous tensors.",
            )
    return dict(state)


def check_sums(folder: Path) -> None:
    """Refuse a folder whose weights or config.json are not those that rbdc.json was written for."""
    record = read_record(folder)
    for name, expected in (
        (weights_in(folder).name, record.get("sha256")),
        (CONFIG, record.get("config_sha256")),
    ):
        if expected and expected != sha256_of(folder / name):
            raise CheckpointError(
                f"{folder / name} does not have the checksum written in {RECORD}",
                "It is damaged or was changed. Write the model again; of a run, rbdc doctor RUN "
                "--repair removes it and the run's command computes it again.",
            )
