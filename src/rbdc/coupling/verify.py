"""The proof that a coupling is right, computed on the models themselves.

A coupled model is the mean of its parents but for one thing: a layer norm of the wide model takes
its statistics over both branches at once. So compute every norm per branch, and what is left must
be the mean of the parents' logits to rounding; then compute the norms jointly, as the wide model
will, and what they change is the drift. Batch norm in eval mode has no joint statistics: its drift
is zero.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from timm.layers import GroupNorm1, LayerNorm2d, RmsNorm, RmsNorm2d
from torch import Tensor, nn
from torch.func import functional_call

from rbdc.coupling.checks import check_wide
from rbdc.coupling.layout import heads_of

TOLERANCE = 1e-5
"""The largest relative error that rounding in fp32 explains."""

_CHANNELS_FIRST = (nn.GroupNorm, GroupNorm1, LayerNorm2d, RmsNorm2d)
_JOINT_NORMS = (nn.LayerNorm, nn.RMSNorm, RmsNorm, *_CHANNELS_FIRST)


@dataclass(frozen=True, kw_only=True, slots=True)
class CouplingProof:
    """How far a coupled model is from the mean of its parents, relative to the largest logit."""

    error: float
    """With every norm computed per branch: rounding only, if the coupling is right."""
    drift: float
    """As the wide model is: what joint normalisation adds."""
    tolerance: float = TOLERANCE
    """The error that rounding explains: 1e-5, and more where a model is of lower precision."""

    @property
    def holds(self) -> bool:
        return self.error <= self.tolerance


@torch.no_grad()
def verify_coupling(
    first: nn.Module, second: nn.Module, wide: nn.Module, x: Tensor
) -> CouplingProof:
    """Run the images `x` through the parents and the wide model, and compare what comes out.

    Every head is compared: the logits of a distilled model are the mean of two. A model without a
    head gives features: the wide one's must be its parents' side by side. The proof is one of
    function; a tensor that no output depends on (a branch whose last scale is zero, a counter) is
    not seen by it.
    """
    check_wide(first, wide)
    with ExitStack() as stack:
        stack.enter_context(torch.backends.cudnn.flags(allow_tf32=False))
        for model in (first, second, wide):
            stack.enter_context(evaluating(model))
        left, right, joint = (_outputs(model, x) for model in (first, second, wide))
        with _norms_per_branch(wide, first):
            split = _outputs(wide, x)
    expected = [_expected(*three) for three in zip(left, right, joint, strict=True)]
    return CouplingProof(
        error=_distance(split, expected, expected),
        drift=_distance(joint, split, expected),
        tolerance=max(_tolerance(model) for model in (first, second, wide)),
    )


def _outputs(model: nn.Module, x: Tensor) -> list[Tensor]:
    """What the model gives, and what each of its heads gives, in double precision on the CPU."""
    found: list[Tensor] = []
    hooks = [
        model.get_submodule(head).register_forward_hook(lambda _m, _i, out: found.append(out))
        for head in heads_of(model)
    ]
    try:
        found.append(model(x.to(next(model.parameters()))))
    finally:
        for hook in hooks:
            hook.remove()
    return [out.double().cpu() for out in found]


def _expected(left: Tensor, right: Tensor, wide: Tensor) -> Tensor:
    """The mean of logits; features side by side, on the axis that is twice as long."""
    for axis, (narrow_size, wide_size) in enumerate(zip(left.shape, wide.shape, strict=True)):
        if narrow_size != wide_size:
            return torch.cat([left, right], dim=axis)
    return (left + right) / 2


def _distance(left: list[Tensor], right: list[Tensor], reference: list[Tensor]) -> float:
    """The largest relative difference; NaN if any is, which Python's max would pass over."""
    relative = [
        (a - b).abs().max() / scale.abs().max().clamp_min(1e-30)
        for a, b, scale in zip(left, right, reference, strict=True)
    ]
    return float(torch.stack(relative).max())


def _tolerance(model: nn.Module) -> float:
    precision = torch.finfo(next(model.parameters()).dtype).eps
    return TOLERANCE * max(1.0, precision / torch.finfo(torch.float32).eps)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode while it lasts; every submodule gets its own mode back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def _norms_per_branch(wide: nn.Module, narrow: nn.Module) -> Iterator[None]:
    """While it lasts, every norm of `wide` whose statistics are joint runs once for each branch:
    as the narrow model's norm, with the wide one's parameters for that branch."""
    hooks = []
    for path, module in wide.named_modules():
        if isinstance(module, _JOINT_NORMS):
            counterpart = narrow.get_submodule(path)
            if _size(counterpart) != _size(module):
                hooks.append(module.register_forward_hook(_per_branch(counterpart)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _per_branch(narrow: nn.Module):  # type: ignore[no-untyped-def]
    def hook(wide: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> Tensor:
        axis = 1 if isinstance(wide, _CHANNELS_FIRST) else -1
        state = wide.state_dict()
        return torch.cat(
            [
                functional_call(narrow, {k: v.chunk(2)[branch] for k, v in state.items()}, (half,))
                for branch, half in enumerate(inputs[0].chunk(2, dim=axis))
            ],
            dim=axis,
        )

    return hook


def _size(norm: nn.Module) -> object:
    return getattr(norm, "normalized_shape", None) or getattr(norm, "num_channels", None)
