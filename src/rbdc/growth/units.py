"""Which units of a model belong together, for methods that copy or add single units.

A unit is a channel, an attention head or a group of channels. Units form groups: the channels of a
residual stream are one group, however many layers write to it and read from it; the channels
between two layers of a block are another, an inner group. A method must change a group alike in
every tensor that has it. Units are found by tracing the model (`rbdc.structure`).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from timm.layers import Attention, Mlp
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from rbdc.coupling import Layout, check_exact
from rbdc.errors import ModelError
from rbdc.models import ModelSpec, build_meta, halves_layout, halves_structure, halves_units

GroupAxes = tuple[str | None, ...]
"""The group along each axis of a tensor; None for classes, colours, kernels and positions."""
OTHERS = "standard training, RBDC, random and HyperCloning"


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Units that belong together."""

    units: int
    """Number of units in the narrow model; the wide one has twice as many."""
    channels: int = 1
    """Channels per unit; an attention head has several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    """A group between two layers: only `first` writes it, and only `second` reads it."""

    group: str
    first: str
    second: str
    norm: str | None = None
    """The norm between the two layers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Units:
    """The groups of a model, and their axes in its tensors."""

    layout: Layout
    groups: Mapping[str, Group]
    """The groups, each by the name of the first tensor that has it."""
    axes: Mapping[str, GroupAxes]
    sizes: Mapping[tuple[str, int], tuple[int, int]]
    """Packed parts along an axis of a tensor, and channels per unit in each part."""
    inner: tuple[Inner, ...]
    mixed: frozenset[str]
    """Groups whose units a module mixes: a layer norm computes statistics of them."""
    uniform: bool
    """Whether any module does, so that every unit must be copied equally often."""

    def written(self, name: str) -> str | None:
        """Return the group that a layer's weight writes; None for other tensors and for heads."""
        return self.axes[name][0] if self.layout[name].input_axis is not None else None

    def by_unit(self, tensor: Tensor, name: str, number: int) -> Tensor:
        """Unflatten an axis of the named tensor into packed parts, units and a unit's channels.

        A packed qkv weight has three parts, other tensors have one.
        """
        assert self.axes[name][number] is not None, f"axis {number} of {name} has no units"
        parts, channels = self.sizes[name, number]
        units: Tensor = tensor.unflatten(number, (parts, -1, channels))
        return units


def along(values: Tensor, tensor: Tensor, axis: int) -> Tensor:
    """Reshape one value per entry of an axis so that it broadcasts over the tensor."""
    return values.view([-1 if number == axis else 1 for number in range(tensor.ndim)])


@cache
def units_of(narrow: ModelSpec) -> Units:
    """Return the groups of a model; refuse one whose branches or units cannot be told apart."""
    wide = narrow.scaled(2)
    layout, structure, found = halves_layout(wide), halves_structure(wide), halves_units(wide)
    check_exact(structure)
    entries = {
        (name, number): units
        for name, axes in found.items()
        for number, units in enumerate(axes)
        if units is not None
    }
    names = _groups(entries)
    order = {group: list(dict.fromkeys(entries[at].tolist())) for at, group in _first(names)}
    sizes = {}
    for (name, number), units in entries.items():
        own = order[names[name, number]]
        parts = len(layout[name].parts([len(units)] * 9)[layout[name].scaled.index(number)])
        channels = max(1, len(units) // (parts * len(own)))
        if 0 in own or units.tolist() != parts * [unit for unit in own for _ in range(channels)]:
            raise ModelError(
                f"{narrow} has {name}, whose units cannot be told apart or lie in another order",
                f"Methods that copy or add single units cannot widen it; {OTHERS} can.",
            )
        sizes[name, number] = parts, channels
    axes = {
        name: tuple(names.get((name, number)) for number in range(len(of_tensor)))
        for name, of_tensor in found.items()
    }
    most: dict[str, int] = defaultdict(int)
    for at, group in names.items():
        most[group] = max(most[group], sizes[at][1])
    joint = {axes.get(f"{path}.weight", (None,))[0] for path in structure.joint}
    return Units(
        layout=layout,
        groups={name: Group(units=len(own), channels=most[name]) for name, own in order.items()},
        axes=axes,
        sizes=sizes,
        inner=tuple(_inner(axes, layout)),
        mixed=frozenset(group for group in joint if group),
        uniform=bool(structure.joint),
    )


Place = tuple[str, int]
"""A tensor's name, and one of its axes."""


def _groups(entries: Mapping[Place, Tensor]) -> dict[Place, str]:
    """Return the group of each axis: axes with a unit in common have one group."""
    group_of, same = dict[int, str](), dict[str, str]()

    def final(group: str) -> str:
        while group in same:
            group = same[group]
        return group

    for (name, number), units in entries.items():
        members = units.tolist()
        known = dict.fromkeys(final(group_of[unit]) for unit in members if unit in group_of)
        group, *others = known or [name if number == 0 else f"{name}:{number}"]
        same |= dict.fromkeys(others, group)
        group_of |= dict.fromkeys(members, group)
    return {at: final(group_of[int(units[0])]) for at, units in entries.items()}


def _first(names: Mapping[Place, str]) -> Iterator[tuple[Place, str]]:
    """Yield the first axis of each group."""
    seen = set()
    for at, group in names.items():
        if group not in seen:
            seen.add(group)
            yield at, group


def check_plain(narrow: ModelSpec, method: str) -> None:
    """Refuse a model with other blocks than those that a method which adds units is written for."""
    model = build_meta(narrow)
    for name, module in model.named_modules():
        plain = not isinstance(module, nn.GroupNorm) and getattr(module, "groups", 1) == 1
        if not name:
            plain = isinstance(module, ResNet | VisionTransformer)
        elif hasattr(module, "se") or hasattr(module, "attn"):  # blocks of both families
            plain = (isinstance(module, BasicBlock | Bottleneck) and module.se is None) or (
                type(module) is Block and type(module.attn) is Attention and type(module.mlp) is Mlp
            )
        if not plain:
            raise ModelError(
                f"{narrow} has {name or 'blocks'}, a {type(module).__name__}, and {method} takes "
                "plain ResNets and vision transformers",
                f"Compare with net2net there; {OTHERS} take it, too.",
            )


def _inner(axes: Mapping[str, GroupAxes], layout: Layout) -> Iterator[Inner]:
    """Yield the groups that one layer alone writes and one layer alone reads, in model order."""
    writers, readers, norms = (defaultdict[str, list[str]](list) for _ in range(3))
    for name, own in axes.items():
        path, _, attribute = name.rpartition(".")
        for number, group in enumerate(own):
            if group is not None and attribute == "weight":
                read = layout[name].input_axis
                role = norms if read is None else readers if number == read else writers
                role[group].append(path)
    for group, paths in writers.items():
        if len(paths) == len(readers[group]) == 1:
            norm = next(iter(norms[group]), None)
            yield Inner(group=group, first=paths[0], second=readers[group][0], norm=norm)
