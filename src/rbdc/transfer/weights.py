"""Load a classifier's weights into a detector's backbone, and report on every key.

A ViT's class and distillation tokens are not part of a feature map. They are removed together with
their entries at the front of the position embedding, so that each patch keeps the position it was
trained with. No key is ignored silently: the report lists each as used, changed or left out.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from timm.layers import resample_patch_embed
from torch import Tensor, nn

from rbdc.errors import CheckpointError, ModelError
from rbdc.models import as_spec, load, shapes_of
from rbdc.models.weights import read_weights

_LEFT = (
    (r"(cls|dist|reg)_token$", "not part of a feature map"),
    (r"(fc_)?norm\.", "the pyramid uses the last block's output without a norm"),
    (r"(head(_dist|_drop)?|attn_pool|fc)\.", "part of the classifier"),
    (r".*\.num_batches_tracked$", "frozen statistics have no counter"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightReport:
    """What each tensor of a classifier was used for. Each key is in exactly one of the fields."""

    used: tuple[str, ...]
    """Keys of tensors that were copied unchanged."""
    changed: Mapping[str, str]
    """Change made to each tensor that was adapted, by key."""
    left: Mapping[str, str]
    """Reason why a tensor was left out, by key."""


def open_classifier(
    path: str | Path,
    *,
    model: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    use_ema: bool = True,
) -> nn.Module:
    """Load a classifier with `rbdc.models.load`. Name the first keys that do not fit."""
    path = Path(path)
    if path.is_file() and model is not None:
        expected = shapes_of(as_spec(model, **(arguments or {})))
        found = read_weights(path, use_ema)
        # The width is not known yet, so only names are compared, not shapes.
        odd = [f"{key} is missing" for key in expected if key not in found]
        odd += [f"{key} is unexpected" for key in found if key not in expected]
        if odd:
            raise CheckpointError(
                f"{path} does not contain weights of {model}: {_listed(odd)}",
                f"{len(expected)} keys were expected, from {next(iter(expected))} on: give the "
                "architecture of the weights, and its arguments.",
            )
    return load(path, model=model, arguments=arguments, use_ema=use_ema)


def fill_vit(body: nn.Module, classifier: nn.Module) -> WeightReport:
    """Copy the weights of a timm VisionTransformer into a VisionTransformerSAM of its size."""
    expected, state = body.state_dict(), classifier.state_dict()
    tokens = [key for key in state if key.endswith("_token")]
    changed: dict[str, str] = {}
    for key in [key for key in state if key in expected]:
        state[key], change = _fit(key, state[key], expected[key], tokens)
        if change:
            changed[key] = change
    report = report_weights(expected, state, changed)
    body.load_state_dict({key: state[key] for key in expected})
    return report


def _fit(key: str, tensor: Tensor, expected: Tensor, tokens: list[str]) -> tuple[Tensor, str]:
    """Return the tensor in the backbone's shape, and a description of the change."""
    if key == "pos_embed" and tensor.ndim == 3:
        grid = expected.shape[1:3]
        prefix = tensor.shape[1] - prod(grid)
        if prefix >= 0:  # entries before the grid's belong to the tokens
            gone = f"positions of {' and '.join(tokens)} left out, " if prefix else ""
            done = f"{gone}reshaped to a grid of {grid[0]} x {grid[1]}"
            return tensor[:, prefix:].reshape(1, *grid, -1), done
    if key == "patch_embed.proj.weight" and tensor.shape[2:] != expected.shape[2:]:
        before, after = tensor.shape[2:], list(expected.shape[2:])
        done = f"patches of {before[0]} x {before[1]} resampled to {after[0]} x {after[1]}"
        return resample_patch_embed(tensor, after), done
    return tensor, ""


def report_weights(
    expected: Mapping[str, Tensor], state: Mapping[str, Tensor], changed: Mapping[str, str] = {}
) -> WeightReport:
    """Report what a backbone uses of a classifier's state, some of it already changed to fit.

    Missing keys, wrong shapes, and keys that are neither used nor left out are refused.
    """
    surplus = [key for key in state if key not in expected]
    left = {key: why for key in surplus for pattern, why in _LEFT if re.match(pattern, key)}
    odd = []
    for key, tensor in expected.items():
        shape = tuple(tensor.shape)
        if key not in state:
            odd.append(f"{key} is missing, {shape} was expected")
        elif state[key].shape != shape:
            odd.append(f"{key} is {tuple(state[key].shape)}, {shape} was expected")
    odd += [f"{key} was not expected" for key in surplus if key not in left]
    if odd:
        raise ModelError(
            f"these weights do not fit a detector's backbone: {_listed(odd)}",
            "Use a standard ViT or DeiT (timm's VisionTransformer with its default blocks), "
            "or a ResNet.",
        )
    used = tuple(key for key in state if key in expected and key not in changed)
    return WeightReport(used=used, changed=changed, left=left)


def _listed(odd: list[str], count: int = 5) -> str:
    more = f"; and {len(odd) - count} more" if len(odd) > count else ""
    return "; ".join(odd[:count]) + more
