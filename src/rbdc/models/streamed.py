"""Couple two folders of transformers into a third, from disk to disk, a few rows at a time.

How the tensors couple is found at a small width of the same architecture: sizes along scaled axes
grow with the width, and nothing else does. So a model may be larger than memory.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rbdc.coupling import check_conflicts, check_exact, couple_tensor, example_for, verify_coupling
from rbdc.disk import parse_json
from rbdc.errors import CouplingError, WidthError
from rbdc.models.build import scaled_widths, shapes_of
from rbdc.models.config import CONFIG, WEIGHTS
from rbdc.models.create import check_tensors
from rbdc.models.explain import prove_random
from rbdc.models.folder import check_sums, load, written_whole
from rbdc.models.hub import (
    INDEX,
    hub_names,
    hub_spec,
    known_config,
    read_tokenizer,
    side_files,
    weight_files,
)
from rbdc.models.language import small_vocabulary
from rbdc.models.spec import ModelSpec
from rbdc.models.structures import halves_structure
from rbdc.models.tensors import Stored, read_headers, write_tensors
from rbdc.structure import Axes, Layout, Structure

SHARD_BYTES = 5 * 10**9  # of an output file; a larger tensor has a file of its own
CHUNK_BYTES = 2**23  # of a tensor that is in memory at a time
PROOF_BYTES = 2**28  # of a wide model that is loaded to prove it on its own weights
_SMALL = 256  # hidden size at which the structure is found, if the model is wider


def couple_streamed(
    first: Path,
    second: Path,
    output: Path,
    *,
    allow_identical: bool = False,
    allow_inexact: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, Any]:
    """Couple two folders, write the wide model to `output`, and return its record.

    Weights keep their data type. The proof runs the wide model and its parents on a sequence of
    tokens if they are small, and otherwise models of the same architecture with random weights.
    """
    spec = _common_spec(first, second)
    for folder in (first, second):
        check_sums(folder)
        side_files(folder)
    compared = _check_tokenizers(first, second)
    structure, proof = _proven(spec.scaled(2), allow_inexact=allow_inexact)
    pair = _Pair(_stored(spec, first), _stored(spec, second), structure.layout)
    record: dict[str, Any] = {
        "coupling": {
            "parents": [folder.resolve().name for folder in (first, second)],
            "off_diagonal": "zero",
            "seed": None,
            "class_names_compared": True,
            "tokenizers_compared": compared,
            **proof,
        }
    }
    wide = spec.scaled(2)
    with written_whole(output.resolve(), wide.to_json(), record) as target:
        _write_config(first, wide, target)
        size = _write_weights(pair, target, shard_bytes)
        if pair.identical and not allow_identical:
            raise CouplingError(
                f"{first} and {second} have the same weights, so the two halves of the wide model "
                "would get the same gradients and stay equal",
                "Train the parents from different seeds, or allow identical parents explicitly.",
            )
        if size <= PROOF_BYTES:
            dtype = min((one.dtype for one in pair.first.values()), key=lambda d: d.itemsize)
            record["coupling"] |= _prove_weights(first, second, target, structure, dtype)
    return {"spec": wide.to_json(), "timm_loads": False, **record}


def _common_spec(first: Path, second: Path) -> ModelSpec:
    """Return the spec of both folders; refuse folders of different architectures."""
    left, right = hub_spec(first), hub_spec(second)
    if left.name != right.name:
        raise CouplingError(
            f"{first} has a {left.name} and {second} a {right.name}",
            "Parents must be one architecture.",
        )
    for field in sorted({*left.arguments, *right.arguments}):
        ours, theirs = left.arguments.get(field), right.arguments.get(field)
        if ours != theirs:
            raise CouplingError(
                f"{field} is {ours} in {first} and {theirs} in {second}",
                "Parents must be one architecture with the same settings.",
            )
    return left


def _check_tokenizers(first: Path, second: Path) -> bool:
    """Refuse different tokenizers by name; return whether both folders have one."""
    left, right = (read_tokenizer(folder, DECIDING) for folder in (first, second))
    if not left or not right:
        return False
    for name in sorted({*left, *right}):
        if _content(left.get(name)) != _content(right.get(name)):
            raise CouplingError(
                f"the tokenizers differ: {name} is not the same in {first} and {second}",
                "Logits are averaged token by token: couple models of one tokenizer.",
            )
    return True


DECIDING = ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "added_tokens.json")
"""Files of a tokenizer that decide which token has which number."""


def _content(text: str | None) -> Any:
    """Return what a tokenizer's file says, however it is laid out."""
    if text is None or not text.lstrip().startswith("{"):
        return text
    try:
        content = parse_json(text.encode())
    except ValueError:  # it cannot be used, and is the same only to the byte
        return text
    return {k: v for k, v in content.items() if k not in ("truncation", "padding")}


def _proven(wide: ModelSpec, *, allow_inexact: bool) -> tuple[Structure, dict[str, Any]]:
    """Return how the model couples, found at a small width and proven there on random weights."""
    small, times = small_vocabulary(wide), 1
    while _hidden(small) > _SMALL:
        try:
            scaled_widths(small.scaled(0.25))  # the narrow model of the next smaller pair
        except WidthError:
            break
        small, times = small.scaled(0.5), 2 * times
    structure = halves_structure(small)
    check_conflicts(structure)
    if not allow_inexact:
        check_exact(structure)
    proof = prove_random(small, structure)
    if not proof.holds and not allow_inexact:
        raise CouplingError(
            f"a coupled {wide} differs from the mean of its parents by {proof.error:.1e} of the "
            "largest logit",
            "Choose an architecture that couples exactly; allow_inexact writes it all the same.",
        )
    layout = {name: _widened(axes, times) for name, axes in structure.layout.items()}
    found = {"exact": proof.holds, "proof_error": proof.error, "norm_drift": proof.drift}
    return replace(structure, layout=layout), {**found, "proven_on": "random weights"}


def _hidden(spec: ModelSpec) -> int:
    return max(size for size in scaled_widths(spec).values() if isinstance(size, int))


def _widened(axes: Axes, times: int) -> Axes:
    packed, second = (
        tuple(times * size for size in parts) for parts in (axes.packed, axes.packed_second)
    )
    return replace(axes, packed=packed, packed_second=second)


def _stored(spec: ModelSpec, folder: Path) -> dict[str, Stored]:
    """Return the model's tensors in a folder, by their names in its files."""
    found = read_headers(weight_files(folder))
    names = hub_names(spec, found)
    shapes = {
        name: torch.empty(found[source].shape, dtype=found[source].dtype, device="meta")
        for name, source in names.items()
    }
    check_tensors(spec, shapes_of(spec), shapes, str(folder))
    return {name: found[source] for name, source in names.items()}


@dataclass(slots=True)
class _Pair:
    """Two parents on disk, and how their tensors couple."""

    first: Mapping[str, Stored]
    second: Mapping[str, Stored]
    layout: Layout
    identical: bool = True
    """Whether all rows so far were the same in both."""

    def outline(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return the data type and the shape of a wide tensor."""
        left, right = self.first[name], self.second[name]
        scaled = self.layout[name].scaled
        shape = tuple(2 * n if axis in scaled else n for axis, n in enumerate(left.shape))
        return torch.promote_types(left.dtype, right.dtype), shape

    def rows(self, name: str) -> Iterator[Tensor]:
        """Yield the rows of a wide tensor, in order."""
        axes, shape = self.layout[name], self.first[name].shape
        dtype, wide = self.outline(name)
        count = wide[0] if wide else 1
        total = dtype.itemsize * torch.Size(wide).numel()
        step = max(1, CHUNK_BYTES * count // max(1, total))
        if 0 not in axes.scaled:
            for start in range(0, shape[0], step):
                left, right = self._read(name, start, min(start + step, shape[0]), dtype)
                yield _exactly(couple_tensor, left, right, axes)
            return
        inner = replace(  # of the rows of one branch
            axes,
            scaled=axes.scaled[1:],
            packed=axes.packed_second,
            packed_second=(),
            input_axis=None,
            scale=axes.factor,
        )
        start = 0
        for size in axes.parts(shape)[0]:
            for branch in (0, 1):
                for at in range(start, start + size, step):
                    stop = min(at + step, start + size)
                    if branch == 0:  # compares both parents
                        rows, _ = self._read(name, at, stop, dtype)
                    else:
                        rows = self.second[name].rows(at, stop).to(dtype)
                    yield _exactly(_beside, rows, branch, inner)
            start += size

    def _read(self, name: str, start: int, stop: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        found = []
        for which, parent in (("first", self.first), ("second", self.second)):
            rows = parent[name].rows(start, stop)
            if not bool(rows.isfinite().all()):
                raise CouplingError(
                    f"{name} of the {which} parent has values that are not finite (NaN, inf)",
                    "The training diverged: use an earlier checkpoint.",
                )
            found.append(rows.to(dtype))
        self.identical = self.identical and torch.equal(*found)
        return found[0], found[1]


def _beside(rows: Tensor, branch: int, axes: Axes) -> Tensor:
    """Return rows of one branch as rows of the wide tensor: zeros beside them."""
    if not axes.scaled:
        return axes.scaled_entries(rows)
    zeros = torch.zeros_like(rows)
    return couple_tensor(*((rows, zeros) if branch == 0 else (zeros, rows)), axes)


def _exactly(couple: Any, *arguments: Any) -> Tensor:
    """Couple in at least float32, and round once: halves are exact, Gemma's factors are not."""
    dtype = arguments[0].dtype
    wider = (a.float() if isinstance(a, Tensor) and dtype.itemsize < 4 else a for a in arguments)
    result: Tensor = couple(*wider)
    return result.to(dtype)


def _write_weights(pair: _Pair, target: Path, shard_bytes: int) -> int:
    """Write the wide tensors in files of at most `shard_bytes`; return the bytes of all."""
    shards: list[list[str]] = [[]]
    sizes = [0]
    seen: set[tuple[Path, int]] = set()
    for name, stored in pair.first.items():
        if (place := (stored.path, stored.begin)) in seen:
            continue  # the other name of a tied tensor
        seen.add(place)
        dtype, shape = pair.outline(name)
        size = dtype.itemsize * torch.Size(shape).numel()
        if shards[-1] and sizes[-1] + size > shard_bytes:
            shards.append([])
            sizes.append(0)
        shards[-1].append(name)
        sizes[-1] += size
    files = [WEIGHTS]
    if len(shards) > 1:
        files = [f"model-{n + 1:05d}-of-{len(shards):05d}.safetensors" for n in range(len(shards))]
        index = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        content = {"metadata": {"total_size": sum(sizes)}, "weight_map": index}
        (target / INDEX).write_text(json.dumps(content, indent=2))
    for file, names in zip(files, shards, strict=True):
        outline = {name: pair.outline(name) for name in names}
        write_tensors(target / file, outline, {name: pair.rows(name) for name in names})
    return sum(sizes)


def _write_config(first: Path, wide: ModelSpec, target: Path) -> None:
    """Copy the first parent's configuration at twice the width, its tokenizer and settings."""
    config = known_config(first) | scaled_widths(wide)
    (target / CONFIG).write_text(json.dumps(config, indent=2))
    for path in side_files(first):
        shutil.copyfile(path, target / path.name)


def _prove_weights(
    first: Path, second: Path, target: Path, structure: Structure, dtype: torch.dtype
) -> dict[str, Any]:
    """Run the wide model and its parents on a sequence of tokens; refuse a wrong result.

    They run in float32. Weights stored in `dtype` are rounded where a factor is no power of two.
    """
    left, right, wide = (load(folder) for folder in (first, second, target))
    exact = halves_structure(hub_spec(target))
    proof = verify_coupling(left, right, wide, example_for(wide), exact)
    rounding = torch.finfo(dtype).eps / torch.finfo(torch.float32).eps
    proof = replace(proof, tolerance=proof.tolerance * max(1.0, rounding))
    if not proof.holds and not structure.inexact:
        raise CouplingError(
            f"the coupled model differs from its parents' mean by {proof.error:.1e} of the largest "
            f"logit, more than rounding can cause ({proof.tolerance:.0e})",
            "The branches are not independent: choose an architecture that couples exactly (rbdc "
            "explain MODEL).",
        )
    found = {"exact": proof.holds, "proof_error": proof.error, "norm_drift": proof.drift}
    return {**found, "proven_on": "its own weights"}
