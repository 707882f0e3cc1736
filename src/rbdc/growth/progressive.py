"""Growth of one model, without a tree: what RBDC's depth and resolution give by themselves.

The target has its full width from the first step on. Its stages have the depths and resolutions
that the stages of RBDC's tree have, and the tree's shares of the FLOPs, so that what is left of a
difference to RBDC is the width's.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rbdc.errors import PlanError
from rbdc.growth.protocol import Setting
from rbdc.growth.rbdc import Rbdc
from rbdc.models import NewBlocks
from rbdc.plan import Growth, Plan
from rbdc.settings import Axis


@dataclass(frozen=True, kw_only=True)
class Progressive(Rbdc):
    """Train the target shallow and on small images first."""

    name: ClassVar[str] = "progressive"
    summary: ClassVar[str] = "the target alone, shallow and on small images first"
    words: ClassVar[str] = (
        "the number of steps; what grows: depth, resolution or depth+resolution; restart or carry; "
        "r=RATIO, of the tree whose shares of the FLOPs it has"
    )
    example: ClassVar[str] = ":2:depth"
    axes: tuple[Axis, ...] | None = ("depth", "resolution")

    def growth(self, setting: Setting) -> Growth:
        assert self.axes is not None
        if "width" in self.axes:
            raise PlanError(f"{self.name} does not grow in width", "Use rbdc for that.")
        return replace(setting.growth, axes=self.axes, stages=())

    def plan(self, setting: Setting, budget: float | None, **options: Any) -> Plan:
        """Return stages of full width with the shares of a tree that grows in width, too."""
        growth = self.growth(setting)
        tree = Rbdc(
            steps=self.steps, axes=("width", *growth.axes), ratio=self.ratio, planning=self.planning
        )
        shares = [stage.share for stage in reversed(tree.plan(setting, budget).stages)]
        return super().plan(setting, budget, shares=shares, **options)


@dataclass(frozen=True, kw_only=True)
class Resolution(Progressive):
    """Train the target on small images first."""

    name: ClassVar[str] = "resolution"
    summary: ClassVar[str] = "the target alone, on small images first"
    example: ClassVar[str] = ":1"
    axes: tuple[Axis, ...] | None = ("resolution",)


@dataclass(frozen=True, kw_only=True)
class Stack(Progressive):
    """Train a shallow target, then stack copies of its trained blocks (Du et al., 2024)."""

    name: ClassVar[str] = "stack"
    summary: ClassVar[str] = "the target alone, shallow first; new blocks are copies (G_stack)"
    example: ClassVar[str] = ":1"
    axes: tuple[Axis, ...] | None = ("depth",)
    new_blocks: ClassVar[NewBlocks] = "copy"
