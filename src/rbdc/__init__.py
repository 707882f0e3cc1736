"""Recursive Block-Diagonal Coupling: wide vision models from scratch, for a third less compute."""

from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rbdc.api import compare, train
    from rbdc.coupling import CouplingProof, couple, verify_coupling
    from rbdc.data import DataSet, open_data
    from rbdc.errors import RbdcError
    from rbdc.experiments.compare import ComparisonSpec
    from rbdc.experiments.train import Training, prepare
    from rbdc.models import (
        Family,
        ModelSpec,
        build,
        export,
        load,
        narrow,
        register_family,
        spec_of,
    )
    from rbdc.plan import Plan, Stage, count_flops, forward_flops, make_plan
    from rbdc.runs.run import Run, Where, start
    from rbdc.settings import Cluster, Machine, Recipe, Request
    from rbdc.training.carry import couple_optimizers

__version__ = "0.1.0"

_NAMES = {
    "plan": ("Plan", "Stage", "count_flops", "forward_flops", "make_plan"),
    "coupling": ("CouplingProof", "couple", "verify_coupling"),
    "errors": ("RbdcError",),
    "models": ("Family", "ModelSpec", "build", "export", "load", "narrow", "register_family",
               "spec_of"),
    "data": ("DataSet", "open_data"),
    "settings": ("Cluster", "Machine", "Recipe", "Request"),
    "training.carry": ("couple_optimizers",),
    "experiments.train": ("Training", "prepare"),
    "experiments.compare": ("ComparisonSpec",),
    "api": ("compare", "train"),
    "runs.run": ("Run", "Where", "start"),
}  # fmt: skip
_HOME = {name: home for home, names in _NAMES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import torch and timm only when something that needs them is asked for (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'rbdc' has no attribute {name!r}")
    value = getattr(import_module(f"rbdc.{_HOME[name]}"), name)
    if isinstance(value, FunctionType):  # classes check their fields themselves
        from rbdc.arguments import checked

        value = checked(value, name)
    globals()[name] = value  # the next time it is found at once
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
