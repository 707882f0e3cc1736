"""Recursive Block-Diagonal Coupling: wide vision models from scratch, for a third less compute."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rbdc.coupling import CouplingProof, couple, verify_coupling
    from rbdc.data import DataSet, open_data
    from rbdc.errors import RbdcError
    from rbdc.experiments.compare import ComparisonSpec, compare
    from rbdc.experiments.train import Training, prepare, train
    from rbdc.models import ModelSpec, build, export, load, narrow, spec_of
    from rbdc.plan import Plan, Stage, count_flops, forward_flops, make_plan
    from rbdc.runs.run import Run, Where, start
    from rbdc.settings import Cluster, Machine, Recipe, Request

__version__ = "0.1.0"

_NAMES = {
    "plan": ("Plan", "Stage", "count_flops", "forward_flops", "make_plan"),
    "coupling": ("CouplingProof", "couple", "verify_coupling"),
    "errors": ("RbdcError",),
    "models": ("ModelSpec", "build", "export", "load", "narrow", "spec_of"),
    "data": ("DataSet", "open_data"),
    "settings": ("Cluster", "Machine", "Recipe", "Request"),
    "experiments.train": ("Training", "prepare", "train"),
    "experiments.compare": ("ComparisonSpec", "compare"),
    "runs.run": ("Run", "Where", "start"),
}
_HOME = {name: home for home, names in _NAMES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Import torch and timm only when something that needs them is asked for (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'rbdc' has no attribute {name!r}")
    return getattr(import_module(f"rbdc.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
