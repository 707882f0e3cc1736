"""Count the FLOPs of a forward pass with one of three counters.

`fvcore` is the paper's. It does not count scaled_dot_product_attention, which is 14 % of DeiT-Tiny
and 4 % of DeiT-Base, and so shifts epochs between levels. `fvcore+sdpa`, the default, counts it.
`torch` is torch's own counter: matrix products, convolutions and attention only.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from rbdc.coupling import evaluating
from rbdc.coupling.layout import tokens_for
from rbdc.errors import PlanError, nearest
from rbdc.models import ModelSpec, as_spec, build_empty, build_meta
from rbdc.models.language import is_language
from rbdc.settings import Request

FLOPS_PER_MAC = 2
CounterName = Literal["fvcore", "fvcore+sdpa", "torch"]
DEFAULT_COUNTER: CounterName = Request.counter


@dataclass(frozen=True, kw_only=True, slots=True)
class FlopCount:
    """FLOPs of a forward pass of one image, and the operations that were not counted."""

    forward_flops: int
    counter: CounterName
    uncounted: Mapping[str, int]
    """How often the model calls each operation that the counter ignores."""


def forward_flops(
    model: str | ModelSpec | nn.Module,
    image_size: int | tuple[int, int] | None = None,
    counter: CounterName = DEFAULT_COUNTER,
) -> int:
    """Return the FLOPs of a forward pass of one image; default size: the model's input size."""
    return count_flops(model, image_size, counter).forward_flops


def count_flops(
    model: str | ModelSpec | nn.Module,
    image_size: int | tuple[int, int] | None = None,
    counter: CounterName = DEFAULT_COUNTER,
) -> FlopCount:
    """Return the FLOPs as `forward_flops` does, with the operations not counted."""
    if counter not in _COUNTERS:
        raise PlanError(
            f"no FLOP counter is called {counter!r}",
            nearest(counter, _COUNTERS) or f"Use one of {', '.join(_COUNTERS)}.",
        )
    if isinstance(model, nn.Module):
        return _count(model, image_size, counter)
    spec = as_spec(model)
    if is_language(spec.name):
        counter = (
            "torch"  # fvcore has no forward pass of keyword arguments; this one counts as much
        )
    if image_size is not None:
        spec = replace(spec, arguments={**spec.arguments, "img_size": image_size})
    return _count_spec(spec, counter)


@cache
def _count_spec(spec: ModelSpec, counter: CounterName) -> FlopCount:
    if is_language(spec.name):
        try:
            return _count(build_meta(spec), None, counter)
        except Exception:  # it needs values, or a mask of another form: any error
            return _count(build_empty(spec), None, counter)
    build = build_meta if counter == "torch" else build_empty  # fvcore cannot trace on meta
    return _count(build(spec), None, counter)


def _count(
    network: Any, image_size: int | tuple[int, int] | None, counter: CounterName
) -> FlopCount:
    record = getattr(network, "pretrained_cfg", None)
    if record is None:
        raise PlanError(
            f"this {type(network).__name__} is not a timm model: its input size is unknown",
            "Build it with rbdc.build or timm.create_model.",
        )
    if "vocab_size" in record:
        return _count_tokens(network, record)
    channels, height, width = record["input_size"]
    if image_size is not None:
        height, width = image_size if isinstance(image_size, tuple) else (image_size, image_size)
    with torch.no_grad(), evaluating(network):
        try:
            image = torch.zeros(1, channels, height, width).to(next(network.parameters()))
            macs, uncounted = _COUNTERS[counter](network, image)
        except Exception as error:  # a model can raise any error for a wrong image size
            raise PlanError(
                f"the model cannot process an image of {height} x {width} px: {error}",
                "Build the model for this size (img_size), or choose another.",
            ) from error
    return FlopCount(forward_flops=FLOPS_PER_MAC * macs, counter=counter, uncounted=dict(uncounted))


def _count_tokens(network: nn.Module, record: Mapping[str, Any]) -> FlopCount:
    """Count one sequence of tokens. On the meta device, a mask must be given: none can be made."""
    length, device = record["sequence_length"], next(network.parameters()).device
    given = tokens_for(record, length)
    tokens = given.pop("input_ids").to(device)
    if device.type == "meta":
        given["attention_mask"] = torch.ones(1, 1, length, length, device=device, dtype=torch.bool)
    with torch.no_grad(), evaluating(network):
        macs, uncounted = _torch(network, tokens, **given)
    return FlopCount(forward_flops=FLOPS_PER_MAC * macs, counter="torch", uncounted=uncounted)


Counted = tuple[int, Mapping[str, int]]  # MACs, and calls of operations not counted


def _fvcore(model: nn.Module, image: Tensor, *, attention: bool) -> Counted:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fvcore uses torch.jit, which is deprecated
        from fvcore.nn import FlopCountAnalysis

        analysis = FlopCountAnalysis(model, image)
        analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
        if attention:
            analysis.set_op_handle("aten::scaled_dot_product_attention", _attention_macs)
        return int(analysis.total()), analysis.unsupported_ops()


def _attention_macs(inputs: list[Any], _outputs: list[Any]) -> Counter[str]:
    query, key, value = (tensor.type().sizes() for tensor in inputs[:3])
    scores = prod(query[:-1]) * key[-2]  # batch x heads x queries x keys
    return Counter(attention=scores * (query[-1] + value[-1]))


def _torch(model: nn.Module, image: Tensor, **options: Any) -> Counted:
    with FlopCounterMode(display=False) as flops, _Calls() as calls:
        model(image, **options)
    return flops.get_total_flops() // FLOPS_PER_MAC, calls.uncounted


class _Calls(TorchDispatchMode):
    """Count calls of operations without a formula in torch's counter; views cost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.uncounted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._overloadpacket not in flop_registry and not func.is_view:
            self.uncounted[str(func._overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


_COUNTERS: Mapping[str, Callable[[nn.Module, Tensor], Counted]] = {
    "fvcore": partial(_fvcore, attention=False),
    "fvcore+sdpa": partial(_fvcore, attention=True),
    "torch": _torch,
}
