"""A classifier's weights for a detector's backbone: an explicit loader that accounts for every key.

A ViT's distillation and class tokens have no place in a map of features. They go, and with them
their entries at the front of the position embedding, so that each patch keeps the position it was
trained with. Nothing is skipped in silence: a key is used, changed or left, and the report says so.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from timm.layers import resample_patch_embed
from torch import Tensor, nn

from rbdc.errors import CheckpointError, ModelError
from rbdc.models import as_spec, load, shapes_of
from rbdc.models.folder import read_weights

LISTED = 5  # keys that a message names before it says how many more there are
PATCHES, POSITIONS = "patch_embed.proj.weight", "pos_embed"
_LEFT = (
    (r"(cls|dist|reg)_token$", "no place in a map of features"),
    (r"(fc_)?norm\.", "a pyramid takes the last block's output as it is"),
    (r"(head(_dist|_drop)?|attn_pool|fc)\.", "the classifier's"),
    (r".*\.num_batches_tracked$", "frozen statistics count no batches"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightReport:
    """What became of each tensor of a classifier: its key is in exactly one of the three."""

    used: tuple[str, ...]
    """Copied as they are."""
    changed: Mapping[str, str] = field(default_factory=dict)
    """Key -> what was done to it."""
    left: Mapping[str, str] = field(default_factory=dict)
    """Key -> why the backbone has no use for it."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{len(self.used)} used, {len(self.changed)} changed, {len(self.left)} left"


def open_classifier(
    path: str | Path,
    *,
    model: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    use_ema: bool = True,
) -> nn.Module:
    """`rbdc.models.load`; of a weight file of another architecture, the first keys are listed."""
    path = Path(path)
    if path.is_file() and model is not None:
        expected = shapes_of(as_spec(model, **(arguments or {})))
        found = read_weights(path, use_ema)
        # The width is not known yet, so shapes may differ; names may not.
        odd = [f"{key} is missing" for key in expected if key not in found]
        odd += [f"{key} is not of it" for key in found if key not in expected]
        if odd:
            raise CheckpointError(
                f"{path} does not hold {model}: {_listed(odd)}",
                f"{len(expected)} keys were expected, from {next(iter(expected))} on: name the "
                "architecture the weights are of, and its arguments.",
            )
    return load(path, model=model, arguments=arguments, use_ema=use_ema)


def fill_vit(body: nn.Module, classifier: nn.Module) -> WeightReport:
    """Put the weights of a timm VisionTransformer into a VisionTransformerSAM of its size."""
    expected, found = body.state_dict(), classifier.state_dict()
    state: dict[str, Tensor] = {}
    changed: dict[str, str] = {}
    tokens = [key for key in found if key.endswith("_token")]
    for key, tensor in found.items():
        if key in expected:
            state[key], done = _fit(key, tensor, expected[key], tokens)
            if done:
                changed[key] = done
    left = _left(found, expected)
    _check(expected, state, [key for key in found if key not in expected and key not in left])
    body.load_state_dict(state)
    return WeightReport(
        used=tuple(key for key in state if key not in changed), changed=changed, left=left
    )


def account(body: nn.Module, classifier: nn.Module) -> WeightReport:
    """The report of a backbone that is a part of the classifier itself, as ResNet's is."""
    expected, found = body.state_dict(), classifier.state_dict()
    left = _left(found, expected)
    _check(expected, found, [key for key in found if key not in expected and key not in left])
    return WeightReport(used=tuple(expected), left=left)


def _fit(key: str, tensor: Tensor, expected: Tensor, tokens: list[str]) -> tuple[Tensor, str]:
    """The tensor as the backbone has it, and what was done to it."""
    if key == POSITIONS and tensor.ndim == 3:
        grid = expected.shape[1:3]
        prefix = tensor.shape[1] - prod(grid)
        if prefix >= 0:  # what is not the grid's belongs to the tokens before it
            gone = f"positions of {' and '.join(tokens)} left out, " if prefix else ""
            done = f"{gone}reshaped to a grid of {grid[0]} x {grid[1]}"
            return tensor[:, prefix:].reshape(1, *grid, -1), done
    if key == PATCHES and tensor.shape[2:] != expected.shape[2:]:
        before, after = tuple(tensor.shape[2:]), tuple(expected.shape[2:])
        done = f"patches of {before[0]} x {before[1]} resampled to {after[0]} x {after[1]}"
        return resample_patch_embed(tensor, list(after)), done
    return tensor, ""


def _left(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, str]:
    return {
        key: why
        for key in found
        if key not in expected
        for pattern, why in _LEFT
        if re.match(pattern, key)
    }


def _check(expected: Mapping[str, Tensor], state: Mapping[str, Tensor], surplus: list[str]) -> None:
    """Every key of the backbone is there in its shape, and every key given is accounted for."""
    odd = []
    for key, tensor in expected.items():
        shape = tuple(tensor.shape)
        if key not in state:
            odd.append(f"{key} is missing, {shape} was expected")
        elif state[key].shape != tensor.shape:
            odd.append(f"{key} is {tuple(state[key].shape)}, {shape} was expected")
    odd += [f"{key} is there, no such key was expected" for key in surplus]
    if odd:
        raise ModelError(
            f"these weights do not fit a detector's backbone: {_listed(odd)}",
            "Use a plain ViT or DeiT (timm's VisionTransformer with its ordinary blocks), "
            "or a ResNet.",
        )


def _listed(odd: list[str]) -> str:
    more = f"; and {len(odd) - LISTED} more" if len(odd) > LISTED else ""
    return "; ".join(odd[:LISTED]) + more
