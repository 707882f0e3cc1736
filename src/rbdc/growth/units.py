"""Which units of a model belong together, for methods that copy or add single units.

A unit is a channel, or an attention head. Units form groups: the channels of a residual stream are
one group, however many layers write to it and read from it; the channels between two layers of a
block are another, an inner group. A method must change a group alike in every tensor that has it.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from timm.layers import Attention, EcaModule, Mlp
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from rbdc.coupling import Layout
from rbdc.errors import ModelError
from rbdc.models import ModelSpec, build_meta, halves_layout

GroupAxes = tuple[str | None, ...]
"""The group along each axis of a tensor; None for classes, colours, kernels and positions."""


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
    axes: Mapping[str, GroupAxes]
    inner: tuple[Inner, ...]
    layer_norm: bool
    """Whether layer norms normalise streams over their channels."""

    def written(self, name: str) -> str | None:
        """Return the group that a layer's weight writes; None for other tensors and for heads."""
        return self.axes[name][0] if self.layout[name].input_axis is not None else None

    def by_unit(self, tensor: Tensor, name: str, number: int) -> Tensor:
        """Unflatten an axis of the named tensor into packed parts, units and a unit's channels.

        A packed qkv weight has three parts, other tensors have one.
        """
        group = self.axes[name][number]
        assert group is not None, f"axis {number} of {name} has no units"
        parts = (len(self.layout[name].packed) or 1) if number == 0 else 1
        units: Tensor = tensor.unflatten(number, (parts, -1, self.groups[group].channels))
        return units


def along(values: Tensor, tensor: Tensor, axis: int) -> Tensor:
    """Reshape one value per entry of an axis so that it broadcasts over the tensor."""
    return values.view([-1 if number == axis else 1 for number in range(tensor.ndim)])


def units_of(narrow: ModelSpec) -> Units:
    """Return the groups of a model; refuse one with layers that are not listed here."""
    model: Any = build_meta(narrow)
    _check_mixing(model, narrow)
    layout = halves_layout(narrow.scaled(2))
    if isinstance(model, ResNet):
        layers = dict(_resnet(model))
    elif isinstance(model, VisionTransformer):
        layers = dict(_transformer(model))
    else:
        raise ModelError(
            f"the units of a {type(model).__name__} are not known",
            "growth/units.py lists those of ResNets and vision transformers.",
        )
    axes: dict[str, GroupAxes] = {}
    groups: dict[str, Group] = {}
    for name, tensor in model.state_dict().items():
        scaled, input_axis = layout[name].scaled, layout[name].input_axis
        out, into = layers.get(name) or layers.get(name.rpartition(".")[0]) or (None, None)
        own = {number: into if number == input_axis else out for number in scaled}
        axes[name] = tuple(own.get(number) for number in range(tensor.ndim))
        for number, group in own.items():
            if group is None:
                raise ModelError(
                    f"{narrow} has {name}, and which of its units belong together is not known",
                    "Methods that copy or add single units take plain ResNets and vision "
                    "transformers; standard training, RBDC and random take this one too.",
                )
            channels = model.blocks[0].attn.head_dim if group.endswith("heads") else 1
            size = (layout[name].packed or tensor.shape)[0] if number == 0 else tensor.shape[number]
            one = Group(units=size // channels, channels=channels)
            assert groups.setdefault(group, one) == one, f"{name}: {one}"
    return Units(
        layout=layout,
        groups=groups,
        axes=axes,
        inner=tuple(_inner(axes, layout)),
        layer_norm=isinstance(model, VisionTransformer),
    )


def _check_mixing(model: nn.Module, spec: ModelSpec) -> None:
    """Refuse layers that mix neighbouring channels: copies would get other neighbours."""
    for name, module in model.named_modules():
        if isinstance(module, nn.GroupNorm | EcaModule):
            raise ModelError(
                f"{spec} has {name}, a {type(module).__name__}, which mixes neighbouring channels",
                "Methods that copy or add single units cannot widen it; standard training, RBDC "
                "and random can.",
            )


Layers = Iterator[tuple[str, tuple[str | None, str | None]]]
"""Names of layers and other tensors, each with the groups of its outputs and of its inputs. Only a
layer's weight has an input axis: a norm may be given its convolution's groups."""


def _resnet(model: Any) -> Layers:
    stream, read = "stem", None
    if isinstance(model.conv1, nn.Sequential):
        for number, written in ((0, "stem.0"), (3, "stem.3"), (6, stream)):
            for layer in (number, number + 1):  # a convolution and its norm
                yield f"conv1.{layer}", (written, read)
            read = written
    for name in ("conv1", "bn1"):
        yield name, (stream, None)
    for stage in ("layer1", "layer2", "layer3", "layer4"):
        for number, block in enumerate(getattr(model, stage)):
            if not isinstance(block, BasicBlock | Bottleneck):
                continue  # `units_of` refuses its tensors by name
            path = f"{stage}.{number}"
            out = stream if block.downsample is None else stage
            for name, _child in (block.downsample or nn.Sequential()).named_children():
                yield f"{path}.downsample.{name}", (out, stream)
            read, last = stream, 3 if isinstance(block, Bottleneck) else 2
            for layer in range(1, last + 1):
                written = out if layer == last else f"{path}.{layer}"
                for kind in ("conv", "bn"):
                    yield f"{path}.{kind}{layer}", (written, read)
                read = written
            stream = out
    yield "fc", (None, stream)


def _transformer(model: Any) -> Layers:
    stream = "stream"
    for name in ("patch_embed.proj", "cls_token", "dist_token", "reg_token", "pos_embed"):
        yield name, (stream, None)
    for name in ("norm_pre", "norm", "fc_norm"):
        yield name, (stream, None)
    for name in ("head", "head_dist"):
        yield name, (None, stream)
    for number, block in enumerate(model.blocks):
        path = f"blocks.{number}"
        if not (type(block) is Block and type(block.attn) is Attention and type(block.mlp) is Mlp):
            continue
        heads, hidden = f"{path}.heads", f"{path}.hidden"
        yield f"{path}.attn.qkv", (heads, stream)
        yield f"{path}.attn.proj", (stream, heads)
        yield f"{path}.mlp.fc1", (hidden, stream)
        yield f"{path}.mlp.fc2", (stream, hidden)
        for name in ("norm1", "norm2", "ls1", "ls2"):
            yield f"{path}.{name}", (stream, None)


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
