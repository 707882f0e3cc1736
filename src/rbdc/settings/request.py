"""What a run is asked for: model, data, how much to spend, and how models are coupled."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from rbdc.errors import RecipeError
from rbdc.settings.recipe import Recipe, check_names, check_range, settle_types


@dataclass(frozen=True, kw_only=True)
class Request:
    """Everything but the recipe that decides the result of a run."""

    model: str | None = None
    """timm name of the target"""
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """timm's arguments of the full-width model"""
    width: float = 1.0
    """of the target, relative to the named model"""
    img_size: int | None = None
    """by default the model's own; for sets in memory that are not resized (scale null), theirs"""
    data: str = "embedded"
    """embedded, fashion-mnist, cifar10, cifar100, hf:NAME, or a folder"""
    data_dir: str = "~/.cache/rbdc"
    """where named data sets are kept"""
    data_download: bool = False
    """fetch a named data set that is not there"""
    in_memory: bool = False
    """decode a folder of small images once and keep them"""
    skip_bad: bool = False
    """leave images out that cannot be decoded"""
    steps: int = 1
    """recursive halvings; 0 is standard training"""
    ratio: float = 2.0
    """epochs of a wide model over its parents'"""
    budget: float | None = None
    """FLOPs of everything, relative to standard training"""
    total_flops: float | None = None
    """FLOPs of everything"""
    epochs: float | None = None
    """epochs of the target"""
    total_epochs: float | None = None
    """epochs of all models together"""
    baseline_epochs: float | None = None
    """standard training to compare with; by default 300 for ViTs, 90 for ResNets"""
    schedule: Literal["appendix", "algorithm-1"] = "appendix"
    """of epochs over levels"""
    costs: Literal["exact", "quarter"] = "exact"
    """what epochs are solved with"""
    counter: Literal["fvcore", "fvcore+sdpa", "torch"] = "fvcore+sdpa"
    """of FLOPs"""
    rounding: Literal["whole", "none"] = "whole"
    """of epochs"""
    seed: int = 0
    """of everything random; a model's own follows from its place in the tree"""
    transition: tuple[Literal["restart", "carry"], ...] = ("carry",)
    """at a coupling: carry the optimizer over, or the paper's restart; one, or one a level from
    the leaves up"""
    carry_warmup_epochs: float = 1.0
    """warm-up after a coupling that carries"""
    narrow_lr: float = 1.0
    """learning rate of a narrow model over that of a model of twice its width"""
    with_baseline: bool = False
    """train the target in the standard way as well, for the same FLOPs"""
    allow_inexact: bool = False
    """couple architectures whose halves share weights"""

    def __post_init__(self) -> None:
        settle_types(self)
        check_range(self, ("carry_warmup_epochs",), at_least=0)
        check_range(self, ("img_size",), at_least=1)
        check_range(self, ("narrow_lr",), above=0)
        if not 0 <= self.seed < 2**63:
            raise RecipeError(f"seed is {self.seed}", "Use a whole number from 0 to 2**63 - 1.")


SPEND = ("budget", "total_flops", "epochs", "total_epochs")
PLAN = ("steps", "ratio", *SPEND, "baseline_epochs", "schedule", "costs", "counter", "rounding")
"""What a plan is made of."""


def split_settings(
    settings: Mapping[str, Any], given: Mapping[str, Any] | None = None
) -> tuple[Request, Recipe]:
    """A recipe file's settings and what overrides them, as a request and a recipe.

    Another model than the file's has its own arguments; another way of saying how much to spend
    replaces the file's.
    """
    given = given or {}
    base = dict(settings)
    if "model" in given:
        base.pop("model_kwargs", None)
    if any(name in given for name in SPEND):
        base = {name: value for name, value in base.items() if name not in SPEND}
    merged = {**base, **given}
    of_request = [field.name for field in fields(Request)]
    check_names(merged, [*of_request, *(field.name for field in fields(Recipe))])
    request = {name: value for name, value in merged.items() if name in of_request}
    if isinstance(request.get("transition"), str):
        request["transition"] = request["transition"].split(",")
    recipe = {name: value for name, value in merged.items() if name not in of_request}
    return Request(**request), Recipe(**recipe)
