"""Verify numerically that a coupled model is the mean of its parents.

There is one exception: a layer norm of the wide model computes its statistics over both branches
together. The verification therefore runs the wide model twice. With every norm computed per branch,
its logits must equal the mean of the parents' logits up to rounding (`error`). With joint norms, as
the wide model really computes them, the difference is the `drift`. Batch norm in eval mode has no
joint statistics, so its drift is zero.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from timm.layers import GroupNorm1, LayerNorm2d, RmsNorm, RmsNorm2d
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from rbdc.coupling.checks import check_wide
from rbdc.coupling.layout import heads_of

TOLERANCE = 1e-5
"""Largest relative error that fp32 rounding can cause."""

_CHANNELS_FIRST = (nn.GroupNorm, GroupNorm1, LayerNorm2d, RmsNorm2d)
_JOINT_NORMS = (nn.LayerNorm, nn.RMSNorm, RmsNorm, *_CHANNELS_FIRST)


@dataclass(frozen=True, kw_only=True, slots=True)
class CouplingProof:
    """Differences between a coupled model and its parents' mean, relative to the largest logit."""

    error: float
    """Relative error with norms computed per branch: only rounding, if the coupling is correct."""
    drift: float
    """Relative difference that the wide model's joint norms add."""
    tolerance: float = TOLERANCE
    """Largest error that rounding can cause: 1e-5 in fp32, more in lower precision."""

    @property
    def holds(self) -> bool:
        """Return whether the error is within the tolerance."""
        return self.error <= self.tolerance


@torch.no_grad()
def verify_coupling(
    first: nn.Module, second: nn.Module, wide: nn.Module, x: Tensor
) -> CouplingProof:
    """Run the images `x` through the parents and the wide model, and compare the outputs.

    Every head is compared, because the logits of a distilled model are the mean of two heads. A
    model without a head returns features, and those of the wide model must be the concatenation of
    its parents' features. Only outputs are compared, so a tensor that no output depends on (a
    branch whose last scale is zero, a counter) is not verified.
    """
    check_wide(first, wide)
    with ExitStack() as stack:
        stack.enter_context(torch.backends.cudnn.flags(allow_tf32=False))
        for model in (first, second, wide):
            stack.enter_context(evaluating(model))
        left, right, joint = (_outputs(model, x) for model in (first, second, wide))
        for hook in _norms_per_branch(wide, first):
            stack.enter_context(hook)
        split = _outputs(wide, x)
    expected = [_expected(*three) for three in zip(left, right, joint, strict=True)]
    eps = max(torch.finfo(next(m.parameters()).dtype).eps for m in (first, second, wide))
    return CouplingProof(
        error=_distance(split, expected, expected),
        drift=_distance(joint, split, expected),
        tolerance=TOLERANCE * max(1.0, eps / torch.finfo(torch.float32).eps),
    )


def _outputs(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the outputs of the model and of each of its heads, in float64 on the CPU."""
    found: list[Tensor] = []
    with ExitStack() as hooks:
        for head in map(model.get_submodule, heads_of(model)):
            hooks.enter_context(head.register_forward_hook(lambda _m, _i, out: found.append(out)))
        found.append(model(x.to(next(model.parameters()))))
    return [out.double().cpu() for out in found]


def _expected(left: Tensor, right: Tensor, wide: Tensor) -> Tensor:
    """Return the mean of the logits; concatenate features along the axis that doubles."""
    for axis, (narrow_size, wide_size) in enumerate(zip(left.shape, wide.shape, strict=True)):
        if narrow_size != wide_size:
            return torch.cat([left, right], dim=axis)
    return (left + right) / 2


def _distance(left: list[Tensor], right: list[Tensor], reference: list[Tensor]) -> float:
    """Return the largest relative difference, or NaN if any is NaN (Python's max ignores it)."""
    relative = [
        (a - b).abs().max() / scale.abs().max().clamp_min(1e-30)
        for a, b, scale in zip(left, right, reference, strict=True)
    ]
    return float(torch.stack(relative).max())


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode, and restore the mode of every submodule afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _norms_per_branch(wide: nn.Module, narrow: nn.Module) -> list[RemovableHandle]:
    """Compute every joint norm of `wide` once per branch, until the hooks are removed."""
    return [
        module.register_forward_hook(partial(_norm_per_branch, counterpart))
        for path, module in wide.named_modules()
        if isinstance(module, _JOINT_NORMS)
        and _size(counterpart := narrow.get_submodule(path)) != _size(module)
    ]


def _norm_per_branch(
    narrow: nn.Module, wide: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor
) -> Tensor:
    """Apply the narrow model's norm to each branch, with the wide model's parameters for it."""
    axis = 1 if isinstance(wide, _CHANNELS_FIRST) else -1
    state = wide.state_dict()
    branches = [
        functional_call(narrow, {k: v.chunk(2)[branch] for k, v in state.items()}, (half,))
        for branch, half in enumerate(inputs[0].chunk(2, dim=axis))
    ]
    return torch.cat(branches, dim=axis)


def _size(norm: nn.Module) -> object:
    return getattr(norm, "normalized_shape", None) or getattr(norm, "num_channels", None)
