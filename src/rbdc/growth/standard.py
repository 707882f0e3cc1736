"""Standard training: the whole budget on the wide model, from a random initialisation."""

from dataclasses import dataclass
from typing import ClassVar

from rbdc.growth.protocol import Protocol, Setting, Trial


@dataclass(frozen=True, kw_only=True)
class Standard(Protocol):
    """Train the wide model alone."""

    name: ClassVar[str] = "standard"
    summary: ClassVar[str] = "the wide model alone, from its random initialisation"
    halvings: ClassVar[int] = 0

    def trial(self, setting: Setting, budget: float, seed: int) -> Trial:
        """Return one training from a random initialisation."""
        job = setting.training("target", seed, budget * setting.baseline_epochs)
        return Trial.of({"target": job})
