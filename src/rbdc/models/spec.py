"""The specification of a model, which can be stored as JSON and built again."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from typing import Any

from rbdc.errors import ModelError, WidthError


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A timm architecture at a fraction of its width.

    `arguments` are timm's own (img_size, num_classes, depth, embed_dim, channels, ...) and
    describe the model at width 1.0, which `width` then scales.
    """

    name: str
    width: float = 1.0
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:  # a spec read from a file must equal the original
            arguments = json.loads(json.dumps(dict(self.arguments)))
        except TypeError as error:
            raise ModelError(
                f"the arguments of {self.name} cannot be stored as JSON: {error}",
                "Use JSON values (numbers, text, lists): the model is rebuilt from them.",
            ) from None
        if not (isfinite(self.width) and self.width > 0):
            raise WidthError(f"width is {self.width:g}", "A width is a positive fraction of 1.0.")
        object.__setattr__(self, "width", float(self.width))
        object.__setattr__(self, "arguments", arguments)

    def __hash__(self) -> int:
        return hash(json.dumps(self.to_json(), sort_keys=True))

    def scaled(self, factor: float) -> "ModelSpec":
        """Return the same architecture at `factor` times its width."""
        return replace(self, width=self.width * factor)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return self.name if self.width == 1 else f"{self.name} at width {self.width:g}"
