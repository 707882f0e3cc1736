"""Build models without values, to read their shapes or to run them for what they do, not compute.

What gives parameters their initial values is left out: on the meta device it takes most of the time
that a model's constructor needs.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

Factory = Callable[[], nn.Module]

_INITIALISERS = frozenset({
    "uniform_", "normal_", "trunc_normal_", "kaiming_uniform_", "kaiming_normal_",
    "xavier_uniform_", "xavier_normal_", "constant_", "ones_", "zeros_", "fill_", "zero_",
    "erfinv_", "mul_", "add_", "div_", "clamp_",
})  # fmt: skip
"""Functions that change a tensor in place to give it initial values."""


class _Uninitialised(TorchFunctionMode):
    """Leave parameters as they are allocated, and tensors on the meta device as they are."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if getattr(func, "__name__", "") in _INITIALISERS:
            tensor = args[0] if args else given.get("tensor")
            if isinstance(tensor, nn.Parameter) or getattr(tensor, "is_meta", False):
                return tensor
        return func(*args, **given)


def outline(create: Factory) -> nn.Module:
    """Build a model on the meta device, or with weights if its constructor needs values."""
    try:
        with torch.device("meta"), _Uninitialised():
            return create()
    except NotImplementedError:  # "Cannot copy out of meta tensor"
        return create()


def zeros(create: Factory, known: nn.Module | None = None) -> nn.Module:
    """Build a model that can run, but whose weights are zero; also where outlines are built.

    `known` is its outline, if there is one, whose tensors then get memory.
    """
    model = outline(create) if known is None else known
    if _buffers_have_values(model):
        with torch.device("cpu"), torch.random.fork_rng([]), _Uninitialised():
            model = create()
        tensors = dict(model.named_parameters())
    else:
        model = allocated(model)
        tensors = model.state_dict()
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.detach().zero_()  # a parameter would be left as it is, inside of an outline
    return model


def _buffers_have_values(model: nn.Module) -> bool:
    """Return whether a model has buffers without which it cannot run: indices, masks."""
    return any(
        module._non_persistent_buffers_set
        or any(b.numel() > 1 and not b.is_floating_point() for b in module.buffers(False))
        for module in model.modules()
    )


def allocated(model: nn.Module) -> nn.Module:
    """Give a model on the meta device memory; `to_empty` alone would part its tied tensors."""
    tied = tied_names(model)
    model.to_empty(device="cpu")
    for name, first in tied.items():
        (path, _, attribute), (owner, _, known) = (n.rpartition(".") for n in (name, first))
        tensor = getattr(model.get_submodule(owner), known)
        setattr(model.get_submodule(path), attribute, tensor)
    return model


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return for each further name of a tied tensor the first of its names."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    names = {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}
    return {name: known for name, known in names.items() if known != name}
