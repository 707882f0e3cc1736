"""Templates: weights that are mixtures while they train, and plain weights again afterwards.

MixtureGrowth (Pham et al., WACV 2024) trains W = sum_k c_k T_k: templates of the weight's own
shape, and a coefficient for each. torch's parametrization builds W once a forward pass, so the
model stays timm's; `folded` gives the ordinary model that it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from rbdc.models.build import build_empty, halves_layout, spec_of

MARK = ".parametrizations."  # torch's: in the names of what a weight is made of


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixed:
    """A weight in its parts."""

    templates: tuple[Tensor, ...]
    coefficients: Tensor
    rows: Tensor
    """An orthogonal matrix; the coefficients started as its first row."""

    def weight(self, coefficients: Tensor | None = None) -> Tensor:
        """The mixture by its own coefficients, or by others."""
        return _mix(self.coefficients if coefficients is None else coefficients, self.templates)


def use_templates(model: nn.Module, count: int) -> nn.Module:
    """Make the weights of a plain model mixtures of `count` new templates each, in place.

    Those are the layers whose inputs and outputs widen with the model: all but the first
    convolution or patch embedding, and the heads. Templates are drawn Kaiming-normal; coefficients
    never have weight decay.
    """
    assert count > 1, "growth needs a second row of coefficients"
    for name, axes in halves_layout(spec_of(model).scaled(2)).items():
        if axes.input_axis is not None and len(axes.scaled) == 2:
            path, _, attribute = name.rpartition(".")
            register_parametrization(model.get_submodule(path), attribute, _Mixture(count))
    owner: Any = model
    free = {name for name, _ in model.named_parameters() if name.endswith(".0.coefficients")}
    free |= set(owner.no_weight_decay()) if hasattr(model, "no_weight_decay") else set()
    owner.no_weight_decay = lambda: free  # timm asks; not every recipe spares vectors
    return model


@torch.no_grad()
def folded(model: nn.Module) -> nn.Module:
    """The ordinary model that a model of templates is; one without templates as it is."""
    state = model.state_dict()
    mixtures = mixtures_of(state)
    if not mixtures:
        return model
    plain: Any = build_empty(spec_of(model))
    weights = {name: mixed.weight() for name, mixed in mixtures.items()}
    plain.load_state_dict(weights | {k: tensor for k, tensor in state.items() if MARK not in k})
    plain.pretrained_cfg.update(model.pretrained_cfg)  # what it has learnt of images and classes
    return plain  # type: ignore[no-any-return]


def mixtures_of(state: Mapping[str, Tensor]) -> dict[str, Mixed]:
    """The weights, by the names they have in the ordinary model, that a state has in parts."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in state.items():
        if MARK in key:
            path, _, rest = key.partition(MARK)
            attribute, _, part = rest.partition(".")
            found.setdefault(f"{path}.{attribute}", {})[part] = tensor
    return {
        name: Mixed(
            templates=tuple(parts[f"original{k}"] for k in range(len(parts["0.rows"]))),
            coefficients=parts["0.coefficients"],
            rows=parts["0.rows"],
        )
        for name, parts in found.items()
    }


class _Mixture(nn.Module):
    """torch's parametrization of a weight: what it is made of, and how."""

    rows: Tensor

    def __init__(self, count: int) -> None:
        super().__init__()
        self.register_buffer("rows", nn.init.orthogonal_(torch.empty(count, count)))
        self.coefficients = nn.Parameter(self.rows[0].clone())

    def forward(self, *templates: Tensor) -> Tensor:
        return _mix(self.coefficients, templates)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, ...]:
        """torch asks what to make the weight of: it is forgotten, and templates are drawn."""
        return tuple(nn.init.kaiming_normal_(torch.empty_like(weight)) for _ in self.rows)


def _mix(coefficients: Tensor, templates: Sequence[Tensor]) -> Tensor:
    terms = (c * t for c, t in zip(coefficients, templates, strict=True))
    mixed: Tensor = reduce(torch.add, terms)
    return mixed
