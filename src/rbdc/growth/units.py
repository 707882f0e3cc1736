"""Which units of a model belong together, for methods that copy or add single units.

A unit is a channel, or an attention head. Units form groups: the channels of a residual stream are
one group, however many layers write to it and read from it; the channels between two layers of a
block are another, an inner group. A method must change a group alike in every tensor that has it.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import Attention, EcaModule, LayerScale, Mlp
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from rbdc.errors import ModelError
from rbdc.models import ModelSpec, build_meta, halves_layout


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
class Axis:
    """The group along an axis of a tensor."""

    group: str
    parts: int = 1
    """Consecutive repeats of the group: a packed qkv weight has three."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Units:
    """The groups of a model, and their axes in its tensors."""

    groups: Mapping[str, Group]
    axes: Mapping[str, tuple[Axis | None, ...]]
    """Axes of each tensor; None for axes without a group: classes, colours, kernels, positions."""
    inner: tuple[Inner, ...]
    input_axes: Mapping[str, int | None]
    """The axis of each tensor that a layer's input is multiplied with; None for other tensors."""
    layer_norm: bool
    """Whether layer norms normalise streams over their channels."""

    def index(self, axis: Axis, chosen: Tensor) -> Tensor:
        """Return the indices of the chosen units' channels along an axis of the narrow model."""
        group = self.groups[axis.group]
        one = (chosen[:, None] * group.channels + torch.arange(group.channels)).flatten()
        return torch.cat([one + part * group.units * group.channels for part in range(axis.parts)])


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
    state = model.state_dict()
    axes: dict[str, tuple[Axis | None, ...]] = {}
    groups: dict[str, Group] = {}
    for name, tensor in state.items():
        layer_axes = layers.get(name) or layers.get(name.rpartition(".")[0])
        axes[name] = _axes(tensor, layout[name].scaled, layer_axes, name, narrow)
        for number, axis in enumerate(axes[name]):
            if axis is not None:
                channels = model.blocks[0].attn.head_dim if axis.group.endswith("heads") else 1
                units = tensor.shape[number] // axis.parts // channels
                group = Group(units=units, channels=channels)
                assert groups.setdefault(axis.group, group) == group, f"{name}: {group}"
    input_axes = {name: layout[name].input_axis for name in state}
    return Units(
        groups=groups,
        axes=axes,
        inner=tuple(_inner(axes, input_axes)),
        input_axes=input_axes,
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


LayerAxes = tuple[Axis | None, Axis | None]
"""The axes of a layer's outputs and of its inputs."""


def _axes(
    tensor: Tensor, wide: tuple[int, ...], layer_axes: LayerAxes | None, name: str, spec: ModelSpec
) -> tuple[Axis | None, ...]:
    axes: list[Axis | None] = [None] * tensor.ndim
    if layer_axes is not None and wide:
        out_axis, in_axis = layer_axes
        for number in wide:
            last = number == tensor.ndim - 1
            is_output = number == 0 or (last and out_axis is not None and in_axis is None)
            axes[number] = out_axis if is_output and out_axis is not None else in_axis
    if any(axes[number] is None for number in wide):
        raise ModelError(
            f"{spec} has {name}, and which of its units belong together is not known",
            "Methods that copy or add single units take plain ResNets and vision transformers; "
            "standard training, RBDC and random take this one too.",
        )
    return tuple(axes)


def _resnet(model: Any) -> Iterator[tuple[str, LayerAxes]]:
    stream = Axis(group="stem")
    if isinstance(model.conv1, nn.Sequential):
        in_axis: Axis | None = None
        for number, out_axis in ((0, Axis(group="stem.0")), (3, Axis(group="stem.3")), (6, stream)):
            yield f"conv1.{number}", (out_axis, in_axis)
            yield f"conv1.{number + 1}", (out_axis, None)
            in_axis = out_axis
    else:
        yield "conv1", (stream, None)
    yield "bn1", (stream, None)
    for stage in ("layer1", "layer2", "layer3", "layer4"):
        for number, block in enumerate(getattr(model, stage)):
            if not isinstance(block, BasicBlock | Bottleneck):
                continue  # `_axes` refuses its tensors by name
            path = f"{stage}.{number}"
            out = stream if block.downsample is None else Axis(group=stage)
            last = 3 if isinstance(block, Bottleneck) else 2
            in_axis = stream
            for layer in range(1, last + 1):
                out_axis = out if layer == last else Axis(group=f"{path}.{layer}")
                yield f"{path}.conv{layer}", (out_axis, in_axis)
                yield f"{path}.bn{layer}", (out_axis, None)
                in_axis = out_axis
            for name, child in (block.downsample or nn.Sequential()).named_children():
                is_layer = isinstance(child, nn.Conv2d)
                yield f"{path}.downsample.{name}", (out, stream if is_layer else None)
            stream = out
    yield "fc", (None, stream)


def _transformer(model: Any) -> Iterator[tuple[str, LayerAxes]]:
    stream = Axis(group="stream")
    for name in ("patch_embed.proj", "norm_pre", "norm", "fc_norm"):
        yield name, (stream, None)
    for name in ("cls_token", "dist_token", "reg_token", "pos_embed"):
        yield name, (stream, None)
    for name in ("head", "head_dist"):
        yield name, (None, stream)
    for number, block in enumerate(model.blocks):
        path = f"blocks.{number}"
        if not (type(block) is Block and type(block.attn) is Attention and type(block.mlp) is Mlp):
            continue
        heads, hidden = Axis(group=f"{path}.heads"), Axis(group=f"{path}.hidden")
        yield f"{path}.attn.qkv", (Axis(group=heads.group, parts=3), stream)
        yield f"{path}.attn.proj", (stream, heads)
        yield f"{path}.mlp.fc1", (hidden, stream)
        yield f"{path}.mlp.fc2", (stream, hidden)
        for name in ("norm1", "norm2"):
            yield f"{path}.{name}", (stream, None)
        for name in ("ls1", "ls2"):
            if isinstance(getattr(block, name), LayerScale):
                yield f"{path}.{name}", (stream, None)


def _inner(
    axes: Mapping[str, tuple[Axis | None, ...]], input_axes: Mapping[str, int | None]
) -> Iterator[Inner]:
    """Yield the groups that one layer alone writes and one layer alone reads, in model order."""
    writers, readers, norms = (defaultdict[str, list[str]](list) for _ in range(3))
    for name, own in axes.items():
        path, _, attribute = name.rpartition(".")
        for number, axis in enumerate(own):
            if axis is not None and attribute == "weight":
                is_input = number == input_axes[name]
                role = norms if input_axes[name] is None else readers if is_input else writers
                role[axis.group].append(path)
    for group, paths in writers.items():
        if len(paths) == len(readers[group]) == 1:
            norm = next(iter(norms[group]), None)
            yield Inner(group=group, first=paths[0], second=readers[group][0], norm=norm)
