"""Read weight files: safetensors, and pickles of tensors only, which never execute code."""

import warnings
import zipfile
from pathlib import Path
from pickle import UnpicklingError

import torch
from timm.models import load_state_dict
from torch import Tensor

from rbdc.errors import CheckpointError
from rbdc.models.config import WEIGHTS

PICKLED_WEIGHTS = "pytorch_model.bin"  # what timm writes without safe_serialization


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
        _check_stored(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of sparse tensors: they are refused below
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
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise CheckpointError(
                f"{name} in {path} is a sparse or quantized tensor", "Save dense tensors."
            )
        if tensor.nbytes > tensor.untyped_storage().nbytes():  # a view that repeats few numbers
            raise CheckpointError(
                f"{name} in {path} is {tuple(tensor.shape)}, more than the file holds",
                "Save contiguous tensors.",
            )
    return dict(state)


def _check_stored(path: Path) -> None:
    """Raise a ValueError for a compressed archive: zeros take a thousandth of their memory in it.

    torch.save compresses nothing.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("it is compressed")
