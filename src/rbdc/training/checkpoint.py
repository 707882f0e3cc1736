"""Checkpoints: a folder each, written whole or not at all, and checked when read.

`state.safetensors` holds tensors, `state.json` everything else and the tensors' SHA-256, and
`sha256` that of the JSON. Nothing is pickled.
"""

import hashlib
import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rbdc.disk import replace_folder, sha256_of, sync
from rbdc.errors import CheckpointError, RunError

TENSORS, FACTS, SUM = "state.safetensors", "state.json", "sha256"


def save_checkpoint(
    folder: Path, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], *, keep: int
) -> None:
    """Write the checkpoint of a step into `folder`; then the oldest beyond `keep` go."""
    target = folder / f"step-{step:09d}"
    write_state(target, tensors, {**facts, "step": step})
    found = _by_age(folder)
    place = found.index(target)
    for other in [*found[:place], *found[place + keep :]]:  # later ones were damaged
        shutil.rmtree(other)


def write_state(target: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Tensors and facts as one folder, whole or not at all; an existing one is replaced."""
    partial = target.with_name(f".{target.name}.{uuid4().hex[:8]}.partial")
    try:
        partial.mkdir(parents=True)
        # CPU copies in ordinary layout: safetensors takes no other
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(plain, partial / TENSORS)
        text = json.dumps({**facts, "tensors_sha256": sha256_of(partial / TENSORS)}, indent=1)
        (partial / FACTS).write_text(text)
        (partial / SUM).write_text(hashlib.sha256(text.encode()).hexdigest())
        for path in (*partial.iterdir(), partial):
            sync(path)
        replace_folder(partial, target)
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"{target} could not be written: {error}",
            "Make room or mend the disk, then give the same command: it goes on from the last "
            "checkpoint.",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_state(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `write_state` wrote, or a CheckpointError that says what is wrong with it."""
    try:
        text = (folder / FACTS).read_bytes()
        if hashlib.sha256(text).hexdigest() != (folder / SUM).read_text():
            raise ValueError(f"{FACTS} does not have its checksum")
        facts: dict[str, Any] = json.loads(text)
        if sha256_of(folder / TENSORS) != facts["tensors_sha256"]:
            raise ValueError(f"{TENSORS} does not have its checksum")
        # cloned: a mapped file's tensors are aligned otherwise, and kernels round differently
        tensors = {name: tensor.clone() for name, tensor in load_file(folder / TENSORS).items()}
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder} is damaged: {error}", "Remove it; an earlier one is used instead."
        ) from None
    return tensors, facts


def latest_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The newest checkpoint that is whole; damaged ones are warned of and passed over."""
    for path in _by_age(folder):
        try:
            return read_state(path)
        except CheckpointError as error:
            warnings.warn(f"{error.problem}; the one before it is used", stacklevel=2)
    return None


def _by_age(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"), reverse=True)
