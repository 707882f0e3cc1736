"""What a model is, in a form that can be written down and built again."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A timm architecture at a fraction of its width.

    `arguments` are timm's own (img_size, num_classes, depth, embed_dim, channels, ...) and
    describe the model at width 1.0; `width` scales it from there.
    """

    name: str
    width: float = 1.0
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # JSON has no tuples: a spec that went through a file must equal the one that did not
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in self.arguments.items()}
        object.__setattr__(self, "arguments", plain)

    def scaled(self, factor: float) -> "ModelSpec":
        """The same architecture, `factor` times as wide."""
        return replace(self, width=self.width * factor)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "width": self.width, "arguments": dict(self.arguments)}

    def __str__(self) -> str:
        return self.name if self.width == 1 else f"{self.name} at width {self.width:g}"
