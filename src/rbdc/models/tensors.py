"""Read and write single tensors of safetensors files, a few rows at a time.

The format is a length, a JSON header and the tensors' bytes. Reading with `pread` keeps nothing of
a file in memory, so that models larger than memory can be coupled. (Memory-mapped files, as the
safetensors library has them, count as memory of the process while they are read.)
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rbdc.disk import open_file, parse_json
from rbdc.errors import CheckpointError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MOST_HEADER = 2**27
_REMEDY = "Fetch or save the file again, as safetensors with floating-point weights."


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """One tensor in a file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    """Position of its first byte in the file."""

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row: an entry along the first axis."""
        return self.dtype.itemsize * prod(self.shape[1:])

    def rows(self, start: int, stop: int) -> Tensor:
        """Read the rows from `start` to `stop` (exclusive)."""
        shape = (stop - start, *self.shape[1:])
        content = bytearray((stop - start) * self.row_bytes)
        with open_file(self.path) as file:
            file.seek(self.begin + start * self.row_bytes)
            if file.readinto(content) != len(content):  # type: ignore[attr-defined]
                raise CheckpointError(f"{self.path} is cut off", _REMEDY)
        if not content:
            return torch.empty(shape, dtype=self.dtype)
        return torch.frombuffer(content, dtype=self.dtype).view(shape)


def read_headers(files: Sequence[Path]) -> dict[str, Stored]:
    """Return the tensors in these files, by name."""
    found: dict[str, Stored] = {}
    for path in files:
        found |= _read_header(path)
    return found


def _read_header(path: Path) -> dict[str, Stored]:
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MOST_HEADER, size - 8):
                raise ValueError("its header is cut off")
            header = parse_json(file.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        return {name: _stored(path, entry, 8 + length, size) for name, entry in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}", _REMEDY) from None


def _stored(path: Path, entry: Mapping[str, Any], data: int, size: int) -> Stored:
    """Return one entry of a header; raise ValueError or KeyError if it contradicts the file."""
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if any(type(number) is not int or number < 0 for number in (begin, end, *shape)):
        raise ValueError("its header has a size that is no size")
    dtype = DTYPES.get(entry["dtype"])
    if dtype is None:
        raise ValueError(f"it has numbers of type {str(entry['dtype'])[:20]}")
    if not begin <= end <= size - data or end - begin != prod(shape) * dtype.itemsize:
        raise ValueError("its header does not fit its size")
    return Stored(path=path, dtype=dtype, shape=shape, begin=data + begin)


def write_tensors(
    path: Path,
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    parts: Mapping[str, Iterator[Tensor]],
) -> None:
    """Write a file of these tensors; `parts` yields the rows of each, in order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes
    try:
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in tensors:
                for part in parts[name]:
                    file.write(part.contiguous().view(-1).view(torch.uint8).numpy().data)
            assert file.tell() == 8 + len(text) + end, "rows are missing"
    except OSError as error:
        raise CheckpointError(
            f"{path} could not be written: {error}", "Make room, or choose another folder."
        ) from error
