"""Which of timm's models RBDC couples exactly: try them all.

    python scripts/coverage_of_timm.py             # the families' own modules, some minutes
    python scripts/coverage_of_timm.py deit_ resnet50d

Every VisionTransformer and ResNet of timm, cut to two blocks (two-layer stages), is built at half
width twice with random weights, coupled, and proved. Printed is one line for each that is not
exact, with the reason, and the count of those that are.
"""

import sys
import warnings
from typing import Any

import timm
import torch
from timm.models.resnet import ResNet
from torch import nn

import rbdc
from rbdc.errors import RbdcError
from rbdc.models import ModelSpec, as_spec, family
from rbdc.models.coupled import noise_image

MODULES = ("deit", "vision_transformer", "vision_transformer_hybrid", "resnet")


def names(prefixes: list[str]) -> list[str]:
    entry = timm.models.model_entrypoint
    known = [n for n in timm.list_models() if entry(n).__module__.rpartition(".")[2] in MODULES]
    return [n for n in known if not prefixes or n.startswith(tuple(prefixes))]


def small(name: str) -> ModelSpec:
    """As it is, but shallow: depth repeats what two blocks already have."""
    if issubclass(family(as_spec(name)).model_class, ResNet):
        return ModelSpec(name=name, arguments={"layers": [2, 2, 2, 2], "img_size": 64})
    return ModelSpec(name=name, arguments={"depth": 2})


def randomized(model: nn.Module, seed: int) -> nn.Module:
    """Move every tensor away from its initial value, zeros and ones above all."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                noise = torch.rand(tensor.shape, generator=generator)
                tensor.copy_(tensor + 0.3 * noise if tensor.ndim < 2 else tensor * (0.5 + noise))
    return model


def verdict(name: str) -> str:
    """Empty if the coupling is exact; else what is in the way."""
    try:
        spec = small(name)
        first, second = (randomized(rbdc.build(spec.scaled(0.5)), seed) for seed in (0, 1))
        wide: Any = rbdc.couple(first, second, into=rbdc.build(spec))
    except RbdcError as error:
        return error.problem
    proof = rbdc.verify_coupling(first, second, wide, noise_image(wide))
    return "" if proof.holds else f"differs from its parents' mean by {proof.error:.1e}"


def main() -> None:
    warnings.simplefilter("ignore")
    tried = names(sys.argv[1:])
    exact = 0
    for name in tried:
        problem = verdict(name)
        exact += not problem
        if problem:
            print(f"{name}: {problem}", flush=True)
    print(f"exact: {exact} of {len(tried)} (timm {timm.__version__})")


if __name__ == "__main__":
    main()
