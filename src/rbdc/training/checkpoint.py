"""Checkpoints: one folder each, written atomically, with checksums that are verified on reading.

`state.safetensors` contains the tensors, `state.json` everything else and the SHA-256 of the
tensors, and `sha256` the SHA-256 of the JSON. Nothing is pickled.
"""

import hashlib
import json
import shutil
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rbdc.disk import sha256_of, whole_folder
from rbdc.errors import CheckpointError, RunError

TENSORS, FACTS, SUM = "state.safetensors", "state.json", "sha256"


def save_checkpoint(
    folder: Path, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], *, keep: int
) -> None:
    """Write the checkpoint of a step into `folder`, and delete all but the newest `keep`."""
    target = folder / f"step-{step:09d}"
    write_state(target, tensors, {**facts, "step": step})
    found = _by_age(folder)
    index = found.index(target)
    for other in [*found[:index], *found[index + keep :]]:  # later ones were damaged
        shutil.rmtree(other)


def write_state(target: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write tensors and facts as one folder, atomically. An existing folder is replaced."""
    # contiguous CPU copies: safetensors supports nothing else
    copies: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        copy = tensor.detach().cpu().contiguous()
        tied = copy.numel() > 0 and copy.data_ptr() in seen  # it is written under each of its names
        seen.add(copy.data_ptr())
        copies[name] = copy.clone() if tied else copy
    try:
        with whole_folder(target) as partial:
            save_file(copies, partial / TENSORS)
            text = json.dumps({**facts, "tensors_sha256": sha256_of(partial / TENSORS)}, indent=1)
            (partial / FACTS).write_text(text)
            (partial / SUM).write_text(hashlib.sha256(text.encode()).hexdigest())
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"{target} could not be written: {error}",
            "Free some space or repair the disk, then run the same command: it resumes from the "
            "last checkpoint.",
        ) from error


def read_state(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `write_state` wrote, or raise a CheckpointError with the reason."""
    try:
        text = (folder / FACTS).read_bytes()
        if hashlib.sha256(text).hexdigest() != (folder / SUM).read_text():
            raise ValueError(f"{FACTS} does not match its checksum")
        facts: dict[str, Any] = json.loads(text)
        if sha256_of(folder / TENSORS) != facts["tensors_sha256"]:
            raise ValueError(f"{TENSORS} does not match its checksum")
        # clone: tensors of a memory-mapped file are aligned differently, and kernels then round
        # differently
        tensors = {name: tensor.clone() for name, tensor in load_file(folder / TENSORS).items()}
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder} is damaged: {error}",
            "rbdc doctor RUN --repair removes what must be computed again.",
        ) from None
    return tensors, facts


def latest_checkpoint(
    folder: Path, step: int | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Return the newest undamaged checkpoint, up to `step` if given, or None.

    Warn about damaged ones.
    """
    for path in _by_age(folder):
        if step is not None and _step(path) > step:
            continue
        try:
            return read_state(path)
        except CheckpointError as error:
            warnings.warn(f"{error.problem}; the previous checkpoint is used", stacklevel=2)
    return None


def common_step(folders: Sequence[Path]) -> int:
    """Return the newest step at which every folder has an undamaged checkpoint; 0 if there is none.

    Trainings that take their steps together go on from there.
    """
    steps: list[set[int]] = []
    for folder in folders:
        sound = set()
        for path in _by_age(folder):
            with suppress(CheckpointError):
                read_state(path)
                sound.add(_step(path))
        steps.append(sound)
    return max(set.intersection(*steps), default=0)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _by_age(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"), reverse=True)
