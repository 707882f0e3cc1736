"""Verify numerically that a coupled model is the mean of its parents.

There is one exception: a layer norm of the wide model computes its statistics over both branches
together. The verification therefore runs the wide model twice. With every norm computed per branch,
its logits must equal the mean of the parents' logits up to rounding (`error`). With joint norms, as
the wide model really computes them, the difference is the `drift`. Batch norm in eval mode has no
joint statistics, so its drift is zero.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from rbdc.coupling.checks import check_wide
from rbdc.coupling.layout import heads_of, structure_of
from rbdc.structure import Split, Structure, call, evaluating, unwrapped

TOLERANCE = 1e-5
"""Largest relative error that fp32 rounding can cause."""


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
    first: nn.Module,
    second: nn.Module,
    wide: nn.Module,
    x: Any,
    structure: Structure | None = None,
) -> CouplingProof:
    """Run the inputs `x` through the parents and the wide model, and compare the outputs.

    Every head is compared, because the logits of a distilled model are the mean of two heads. A
    model without a head returns features, and those of the wide model must be its parents' features
    side by side. Only outputs are compared, so a tensor that no output depends on (a branch whose
    last scale is zero, a counter) is not verified. `structure` is that of the models, if known.
    """
    first, second, wide = map(unwrapped, (first, second, wide))
    check_wide(first, wide)
    with ExitStack() as stack:
        stack.enter_context(torch.backends.cudnn.flags(allow_tf32=False))
        for model in (first, second, wide):
            stack.enter_context(evaluating(model))
        structure = structure or structure_of(first, wide, x)
        left, right, joint = (_outputs(model, x) for model in (first, second, wide))
        for path, (inputs, outputs) in structure.joint.items():
            narrow = first.get_submodule(path)
            hook = _PerBranch(path, narrow, structure, inputs, outputs)
            stack.enter_context(hook.attach(wide.get_submodule(path)))
        split = _outputs(wide, x)
    heads = len(joint) - len(structure.outputs)
    splits = (*structure.outputs, *(None,) * heads)
    expected = [_expected(*four) for four in zip(left, right, splits, strict=True)]
    eps = max(torch.finfo(next(m.parameters()).dtype).eps for m in (first, second, wide))
    return CouplingProof(
        error=_distance(split, expected, expected),
        drift=_distance(joint, split, expected),
        tolerance=TOLERANCE * max(1.0, eps / torch.finfo(torch.float32).eps),
    )


def _outputs(model: nn.Module, x: Any) -> list[Tensor]:
    """Return the outputs of the model and of each of its heads, in float64 on the CPU."""
    found: list[Tensor] = []
    with ExitStack() as hooks:
        for head in map(model.get_submodule, heads_of(model)):
            if not isinstance(head, nn.Identity):  # no head: the outputs are features
                hook = head.register_forward_hook(lambda _m, _i, out: found.append(out))
                hooks.enter_context(hook)
        found = [*call(model, x), *found]
    return [out.double().cpu() for out in found]


def _expected(left: Tensor, right: Tensor, split: Split | None) -> Tensor:
    """Return the mean of the logits, or the features of both side by side."""
    return (left + right) / 2 if split is None else split.join(left, right)


def _distance(left: list[Tensor], right: list[Tensor], reference: list[Tensor]) -> float:
    """Return the largest relative difference, or NaN if any is NaN (Python's max ignores it)."""
    relative = [
        (a - b).abs().max() / scale.abs().max().clamp_min(1e-30)
        for a, b, scale in zip(left, right, reference, strict=True)
    ]
    return float(torch.stack(relative).max())


@dataclass(frozen=True, slots=True)
class _PerBranch:
    """Run a module that mixes the branches, as a norm does, for each branch alone."""

    path: str
    narrow: nn.Module
    structure: Structure
    inputs: Split
    outputs: Split

    def attach(self, module: nn.Module) -> RemovableHandle:
        return module.register_forward_hook(self.run)

    def run(self, wide: nn.Module, inputs: tuple[Any, ...], _output: Tensor) -> Tensor:
        """Apply the narrow module to each branch, with the wide module's tensors for it."""
        results = []
        for branch, half in enumerate(self.inputs.branches(inputs[0])):
            state = {
                name: self.structure.layout[f"{self.path}.{name}"].branch_of(tensor, branch)
                for name, tensor in wide.state_dict().items()
            }
            results.append(functional_call(self.narrow, state, (half, *inputs[1:])))
        return self.outputs.join(*results)
