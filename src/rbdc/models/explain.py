"""Explain how a model couples: in which groups its tensors are, how exactly, and why not."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from rbdc.coupling import CouplingProof, check_conflicts, couple, verify_coupling
from rbdc.coupling.rules import rule_of
from rbdc.models.build import build, narrowing_of
from rbdc.models.memory import found
from rbdc.models.spec import ModelSpec
from rbdc.models.structures import halves_structure, quick_example
from rbdc.structure import Structure


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """How a model couples from two of half its width."""

    spec: ModelSpec
    halved: str
    """How the model of half the width is built."""
    structure: Structure
    proof: CouplingProof
    """Error and drift of parents with random weights."""

    @property
    def groups(self) -> Mapping[str, list[str]]:
        """Return the names of the tensors that each coupling rule applies to."""
        groups: dict[str, list[str]] = {}
        for name, axes in self.structure.layout.items():
            groups.setdefault(rule_of(axes), []).append(name)
        return groups

    def to_json(self) -> dict[str, Any]:
        """Return the explanation as JSON values."""
        return {
            "model": self.spec.to_json(),
            "halved": self.halved,
            "exact": self.proof.holds,
            "proof": asdict(self.proof),
            "groups": dict(self.groups),
            **self.structure.to_json(),
        }


def explain(spec: ModelSpec) -> Explanation:
    """Find how a model couples, and prove it on parents with random weights."""
    structure = halves_structure(spec)
    check_conflicts(structure)
    proof = found("proof of", spec, lambda: asdict(prove_random(spec, structure)))
    return Explanation(
        spec=spec, halved=_halved(spec), structure=structure, proof=CouplingProof(**proof)
    )


def prove_random(spec: ModelSpec, structure: Structure) -> CouplingProof:
    """Couple random parents, in float64: the error is then far from what rounding can cause."""
    first, second, wide = (build(spec.scaled(width)).double() for width in (0.5, 0.5, 1))
    for seed, parent in enumerate((first, second)):
        randomize(parent, seed)
    couple(first, second, into=wide, structure=structure, allow_inexact=True)
    return verify_coupling(first, second, wide, quick_example(spec, wide), structure)


@torch.no_grad()
def randomize(model: nn.Module, seed: int) -> None:
    """Move every weight away from its initial value, because zeros and ones hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            noise = torch.rand(tensor.shape, generator=generator).to(tensor)
            spread = tensor.std().nan_to_num().clamp_min(0.02) if tensor.ndim > 1 else 0.3
            tensor += spread * (noise - 0.5 if tensor.ndim > 1 else noise)


def _halved(spec: ModelSpec) -> str:
    """Say how the model of half the width is built."""
    half = spec.scaled(0.5)
    way = narrowing_of(half)
    if half.width == 1:
        return "it is the model that is named, and the wide one is twice as wide"
    if way is None:
        return "by constructor arguments that its family names"
    if way.by == "arguments":
        return f"by constructor arguments: {', '.join(way.arguments)}"
    also = "the arguments of its modules, and " if way.by == "modules" else ""
    return f"by {also}layers that divide their sizes"
