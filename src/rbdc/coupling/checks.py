"""Check that two models can be coupled. Each mistake has its own error message."""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import torch
from timm.layers import DropPath
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from rbdc.errors import CouplingError

ClassNames = Sequence[str] | Mapping[str, str]

# Attributes of a layer that change its function but not the shapes of its tensors. Coupling two
# models that differ here would give a wrong model without any error.
_ATTRIBUTES = (
    "num_classes", "in_chans", "img_size", "patch_size", "num_prefix_tokens", "global_pool",
    "pool_include_prefix", "num_heads", "head_dim", "kernel_size", "stride", "padding",
    "dilation", "ceil_mode", "count_include_pad", "eps", "num_groups", "approximate",
    "negative_slope",
)  # fmt: skip
_MAY_DOUBLE = ("num_heads of ", "head_dim of ", "num_groups of ", "in_chans of ")
_TRAINING_ONLY = (nn.Dropout, DropPath, nn.Identity)  # a rate of 0 is often an Identity

Facts = Mapping[str, object]
"""What must agree between two models, by its name in an error message."""


def check_parents(first: nn.Module, second: nn.Module, *, allow_identical: bool = False) -> None:
    """Refuse parents that differ in anything but their weights, or do not differ at all."""
    for parent in (first, second):
        check_built(parent)
        check_whole(parent)
    for facts in (_structure, _shapes, _settings):
        _check_same(facts(first), facts(second), "the first parent", "the second")
    _check_same(_shapes(second), _shapes(first), "the second parent", "the first")
    _check_classes(class_names(first), class_names(second))
    for which, parent in (("first", first), ("second", second)):
        _check_finite(which, parent)
    left, right = first.state_dict(), second.state_dict()
    if not allow_identical and all(torch.equal(t, right[k].to(t.device)) for k, t in left.items()):
        raise CouplingError(
            "both parents are the same model: every weight is equal, so the two halves of the wide "
            "model would get the same gradients and stay equal",
            "Train the parents from different seeds, or allow identical parents explicitly.",
        )


def check_built(model: nn.Module) -> None:
    """Refuse a model with parameters that do not have a shape yet."""
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in model.parameters()):
        raise CouplingError(
            f"{type(model).__name__} has lazy parameters, which get a shape when it first runs",
            "Run each model once on an example before it is coupled.",
        )


def check_whole(model: nn.Module) -> None:
    """Refuse a model whose weights are sharded: a process has only a part of each tensor."""
    sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    if sharded or any(isinstance(m, FullyShardedDataParallel) for m in model.modules()):
        raise CouplingError(
            f"the weights of a {type(model).__name__} are sharded over processes (FSDP)",
            "Gather them first (torch.distributed.checkpoint.state_dict, full_state_dict=True), "
            "couple ordinary models, and shard the wide one.",
        )


def check_wide(parent: nn.Module, wide: nn.Module) -> None:
    """Refuse a wide model that is not its parents' architecture at twice the width."""
    check_built(wide)
    check_whole(wide)
    if _shapes(parent) == _shapes(wide):
        raise CouplingError(
            "the model to couple into is as wide as its parents: every tensor has the same shape",
            "Build it at twice their width.",
        )
    names = ("the parents", "the wide model")
    _check_same(_structure(parent), _structure(wide), *names, may_double=True)
    if any(tensor.is_meta for tensor in wide.state_dict().values()):
        raise CouplingError(
            "the wide model is on the meta device and has no storage",
            "Build it on a real device, or move it there with to_empty().",
        )


def check_same_architecture(first: nn.Module, second: nn.Module, which: str, other: str) -> None:
    """Refuse models that differ in modules, shapes or settings; `which` and `other` name them."""
    for facts in (_structure, _shapes, _settings):
        _check_same(facts(first), facts(second), which, other)
        _check_same(facts(second), facts(first), other, which)


def class_names(model: nn.Module) -> tuple[str, ...] | None:
    """Return the class names of a timm model in the order of its logits, or None."""
    names = getattr(model, "pretrained_cfg", {}).get("label_names")
    return tuple(_in_order(names)) if names else None


def set_class_names(model: Any, names: ClassNames | None) -> None:
    """Store the class names in a timm model, so that its exported folder contains them."""
    if names and hasattr(model, "pretrained_cfg"):
        model.pretrained_cfg["label_names"] = _in_order(names)


def _in_order(names: ClassNames) -> list[str]:
    """Return the names as a list. timm allows a list, or a mapping from logit index to name."""
    if isinstance(names, Mapping):
        return [names[key] for key in sorted(names, key=int)]
    return list(names)


def _structure(model: nn.Module) -> Facts:
    """Return the types, depths and attributes of the modules."""
    facts: dict[str, object] = {}
    for path, module in model.named_modules():
        if isinstance(module, _TRAINING_ONLY):
            continue
        where = path or "the model"
        facts[f"type of {where}"] = type(module).__name__
        facts[f"code of {where}"] = _version(module.__class__)
        if isinstance(module, nn.Sequential | nn.ModuleList):
            facts[f"depth of {where}"] = len(module)
        for attribute in _ATTRIBUTES:
            value = getattr(module, attribute, None)
            if isinstance(value, int | float | str | tuple):
                facts[f"{attribute} of {where}"] = value
    return facts


@cache
def _version(of: Any) -> str:
    """Return a short hash of a class's methods: the same class may be there in two versions."""
    own = of.__mro__[: of.__mro__.index(nn.Module)]
    functions = (f for base in own for f in vars(base).values() if isinstance(f, FunctionType))
    found = [(f.__name__, _instructions(f.__code__)) for f in functions]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:8]


def _instructions(code: CodeType) -> tuple[object, ...]:
    """Return what a function does, without the lines and the file that it is written in."""
    constants = (_instructions(c) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.co_code, code.co_names, *constants


def _shapes(model: nn.Module) -> Facts:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _settings(model: nn.Module) -> Facts:
    """Return what the layers print of their settings."""
    layers = model.named_modules()
    return {k: f"({m.extra_repr()})" for k, m in layers if not isinstance(m, _TRAINING_ONLY)}


def _check_same(left: Facts, right: Facts, *names: str, may_double: bool = False) -> None:
    """Refuse models that differ in a fact of the left; some may double with the width."""
    for fact, value in left.items():
        found = right.get(fact, "missing")
        doubles = may_double and fact.startswith(_MAY_DOUBLE) and not fact.endswith("the model")
        if found != value and not (doubles and isinstance(value, int) and found == 2 * value):
            raise CouplingError(
                f"{fact} is {value} in {names[0]} and {found} in {names[1]}",
                "Parents must be one architecture with the same settings at one width, and the "
                "wide model the same architecture at twice that width.",
            )


def _check_classes(first: Sequence[str] | None, second: Sequence[str] | None) -> None:
    if first is None or second is None or first == second:
        return
    at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
    where = (
        f"the first has {len(first)} classes, the second {len(second)}"
        if at is None
        else f"class {at} is {first[at]!r} in the first and {second[at]!r} in the second"
    )
    same = sorted(first) == sorted(second)
    differ = "the same classes in a different order" if same else "different classes"
    raise CouplingError(
        f"the parents have {differ}: {where}",
        "Logits are averaged by position: train both on one class list, or reorder a head.",
    )


def _check_finite(which: str, parent: nn.Module) -> None:
    for name, tensor in parent.state_dict().items():
        if tensor.is_meta:
            raise CouplingError(
                f"the {which} parent is on the meta device: it has no weights",
                "Load its weights first.",
            )
        if bad := tensor.numel() - int(tensor.isfinite().sum()):
            raise CouplingError(
                f"{name} of the {which} parent has {bad} values of {tensor.numel()} that are not "
                "finite (NaN or infinite)",
                "The training diverged: use an earlier checkpoint.",
            )
