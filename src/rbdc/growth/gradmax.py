"""GradMax (Evci et al., ICLR 2022): new units with zero function and the largest gradients.

A new unit has zero incoming weights, so the wide model computes its parent's function. Its outgoing
weights w are free and decide the gradient of its incoming weights: M w times the activation's slope
at 0, where M sums, over images and positions, the input of the layer before times the gradient at
the output of the layer after. The top right singular vectors of M maximise it;
each is scaled to `scale` times the mean norm of existing outgoing weights.

What the paper leaves open:
- M may have fewer singular vectors than there are new units (in an MLP it always has). The vectors
  are then used in turns, and each further turn is a random rotation of the first: the norm of a
  turn's gradients is the same, and no two units are equal, which would stay equal forever.
- A new head attends like an existing one: it copies its queries and keys, and has zero values.
  (With zero queries and keys, neither would ever get a gradient.) M is that head's own, of the
  input as the head mixes it; every channel of the head has its own singular vector.
- Streams grow by the same rule: whatever writes to their new half is zero. Many layers read it;
  their new columns are random, of that scaled norm: an optimum is defined for one reader only.
- Zeros would change a layer norm's statistics. But a layer norm ignores the mean of its input, so
  the mean is taken out of whatever writes to the stream, which is then scaled by sqrt 2, and the
  norm's weight by its inverse. The new half then changes neither mean nor variance, and the
  function is preserved exactly, `eps` included.
- torch's slope of ReLU at exactly 0 is 0, so new batch norm channels have a tiny positive bias.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import sqrt
from typing import Any, ClassVar

import torch
from timm.layers import Attention, LayerScale
from torch import Tensor, nn
from torch.nn.functional import normalize, scaled_dot_product_attention
from torch.nn.grad import conv2d_input, conv2d_weight

from rbdc.coupling import class_names, example_for, set_class_names
from rbdc.errors import ModelError
from rbdc.growth.protocol import OneParent
from rbdc.growth.units import Inner, Units, along, check_plain, units_of
from rbdc.jobs.method import Grown, GrowthContext, Parent
from rbdc.models import ModelSpec, build_empty, build_meta
from rbdc.settings import Duration

NEW_NORM_BIAS = 1e-7
"""Makes ReLU pass gradients: too small to be seen in the logits, and not zero in fp16."""


@dataclass(frozen=True, kw_only=True)
class GradMax(OneParent):
    """Preserve the parent's function, batch norms in eval mode, and maximise new gradients."""

    name: ClassVar[str] = "gradmax"
    summary: ClassVar[str] = "zero units whose outgoing weights maximise their gradients (GradMax)"
    search: ClassVar[Duration] = Duration(0.2, "%")
    # An upper bound: the parent's pass and its matrices M are 0.26 (DeiT) to 0.54 (ResNet-18D) of
    # the wide model's step.
    cost: ClassVar[float] = 1.0
    scale: float = 0.5
    """Norm of new outgoing weights, relative to the mean norm of existing ones."""
    norm_weight: float = 1.0
    """Weight of new batch norm channels, whose variance makes them the identity. In training mode
    the norm amplifies whatever leaves zero: at 1, the paper's value, the loss jumps at the second
    step and recovers later; at 0.1 it hardly jumps, and new units learn more slowly."""

    def check_model(self, wide: ModelSpec) -> None:
        """Refuse a model whose function would change."""
        narrow = wide.scaled(0.5)
        check_plain(narrow, "GradMax")
        for path, module in _obstacles(build_meta(narrow), units_of(narrow)):
            raise ModelError(
                f"GradMax would change what {wide} computes: its {path} is {type(module).__name__}",
                "It takes ResNets with batch norm, and transformers whose blocks have layer norm.",
            )

    def grow(self, parents: Sequence[Parent], wide: ModelSpec, context: GrowthContext) -> Grown:
        """Measure M on the context's batches, add new units, and measure the function's error."""
        parent, units = parents[0].model, units_of(wide.scaled(0.5))
        model = _without_layer_scale(copy.deepcopy(parent).eval())
        matrices = matrices_of(model.to(context.device), units.inner, context)
        draw = torch.Generator().manual_seed(context.seed)
        best = {}
        for pair in units.inner:
            group, own = units.groups[pair.group], matrices[pair.group].cpu()
            count = group.units * group.channels // len(own)
            best[f"{pair.second}.weight"] = torch.cat([directions(m, count, draw) for m in own])
        into = build_empty(wide)
        into.load_state_dict(self._widened(model.cpu(), units, best, draw))
        set_class_names(into, class_names(parent))
        with torch.no_grad():
            before, after = (net.eval()(example_for(net)) for net in (model, into))
        error = float((after - before).abs().max() / before.abs().max().clamp_min(1e-30))
        return Grown(model=into, record={"proof_error": error})

    @torch.no_grad()
    def _widened(
        self, model: nn.Module, units: Units, best: Mapping[str, Tensor], draw: torch.Generator
    ) -> dict[str, Tensor]:
        """Return the parent's state with new units added: columns first, then rows."""
        result = {}
        for name, tensor in model.state_dict().items():
            path, _, attribute = name.rpartition(".")
            module, input_axis = model.get_submodule(path), units.layout[name].input_axis
            axes = [(number, group) for number, group in enumerate(units.axes[name]) if group]
            for number, group in axes:
                if group in units.mixed and number != input_axis:
                    tensor = _half_of_stream(module, tensor, number, attribute)
            for number, _group in reversed(axes):
                if number == input_axis:
                    new = _outgoing(tensor, self.scale, best.get(name), draw)
                else:
                    new = self._incoming(module, path, tensor, attribute)
                halves = [units.by_unit(half, name, number) for half in (tensor, new)]
                tensor = torch.cat(halves, number + 1).flatten(number, number + 2)
            result[name] = tensor
        return result

    def _incoming(self, module: nn.Module, path: str, tensor: Tensor, attribute: str) -> Tensor:
        """Return a tensor's part for as many new units: zero, or an identity norm."""
        if isinstance(module, nn.BatchNorm2d):
            ready = {
                "weight": self.norm_weight,
                "running_var": self.norm_weight**2 - module.eps,
                "bias": NEW_NORM_BIAS,
            }
            return torch.full_like(tensor, ready.get(attribute, 0.0))
        if isinstance(module, nn.LayerNorm) and attribute == "weight":
            return torch.full_like(tensor, 1 / sqrt(2))
        if isinstance(module, LayerScale):
            return torch.ones_like(tensor)
        if path.endswith(".qkv"):
            query, key, value = tensor.chunk(3)
            return torch.cat([query, key, torch.zeros_like(value)])
        return torch.zeros_like(tensor)


def directions(matrix: Tensor, count: int, draw: torch.Generator) -> Tensor:
    """Return `count` unit vectors w: orthogonal ones with the largest norms |M w|, in turns."""
    _left, strengths, right = torch.linalg.svd(matrix, full_matrices=False)
    negligible = strengths[0] * max(matrix.shape) * torch.finfo(matrix.dtype).eps
    rank = int((strengths > negligible).sum())
    # without any gradient, all directions are optimal
    turn = right[:rank] if rank else _rotation(matrix.shape[1], draw)
    further = (_rotation(len(turn), draw) @ turn for _ in range((count - 1) // len(turn)))
    return torch.cat([turn, *further])[:count]


def _rotation(size: int, draw: torch.Generator) -> Tensor:
    result: Tensor = torch.linalg.qr(torch.randn(size, size, generator=draw)).Q
    return result


def matrices_of(
    model: nn.Module, inner: Sequence[Inner], context: GrowthContext
) -> Mapping[str, Tensor]:
    """Return M of each group, summed over the batches: one per head, else one per group.

    `model` is in eval mode, so that norm statistics are frozen.
    """
    total: dict[str, Tensor] = {}
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def note(path: str, _module: nn.Module, arguments: tuple[Tensor], output: Tensor) -> None:
        inputs[path], outputs[path] = arguments[0].detach(), output

    with ExitStack() as hooks:
        for path in {path for pair in inner for path in (pair.first, pair.second)}:
            layer = model.get_submodule(path)
            hooks.enter_context(layer.register_forward_hook(partial(note, path)))
        for batch in context.batches():
            loss = context.loss(model, batch)
            deltas = torch.autograd.grad(loss, [outputs[pair.second] for pair in inner])
            for pair, delta in zip(inner, deltas, strict=True):
                one = _matrix(model, pair, inputs, delta)
                total[pair.group] = total[pair.group] + one if pair.group in total else one
    assert total, "GradMax needs a batch to look at"
    return total


@torch.no_grad()
def _matrix(model: nn.Module, pair: Inner, inputs: Mapping[str, Tensor], delta: Tensor) -> Tensor:
    """Return M of a group for one batch, from the layers' inputs and the gradient `delta`."""
    first, second = (model.get_submodule(path) for path in (pair.first, pair.second))
    x, owner = inputs[pair.first], model.get_submodule(pair.first.rpartition(".")[0])
    if isinstance(first, nn.Conv2d) and isinstance(second, nn.Conv2d):
        return _of_convolutions(first, second, x, delta, inputs[pair.second].shape)
    mixed = _mixed(owner, x) if isinstance(owner, Attention) else x[:, None]
    return torch.einsum("bh...i,b...o->hio", mixed, delta)


def _mixed(attention: Any, x: Tensor) -> Tensor:
    """Return the input as each head mixes its tokens: (batch, heads, tokens, channels)."""
    packed = attention.qkv(x).unflatten(-1, (3, attention.num_heads, attention.head_dim))
    query, key, _value = packed.permute(2, 0, 3, 1, 4)
    query, key = attention.q_norm(query), attention.k_norm(key)
    values = x[:, None].expand(-1, attention.num_heads, -1, -1)
    return scaled_dot_product_attention(query, key, values)


def _of_convolutions(
    first: nn.Conv2d, second: nn.Conv2d, x: Tensor, delta: Tensor, hidden: torch.Size
) -> Tensor:
    """Return M of a pair: (in, position in the first kernel) x (out, position in the second).

    The paper's auxiliary kernel, of size k1 + k2 - 1, reads beyond the border of the hidden map,
    where the second layer sees its padding. So compute each column of M by its definition, as the
    gradient of a unit with a single outgoing weight of 1: that is exact at borders too.
    """
    out, height, width = delta.shape[1], *second.kernel_size
    size = (out, first.in_channels, *first.kernel_size)
    columns = []
    for row, column in product(range(height), range(width)):
        kernel = delta.new_zeros(out, 1, height, width)
        kernel[:, 0, row, column] = 1
        behind = (second.stride, second.padding, second.dilation, out)
        reaching = conv2d_input((hidden[0], out, *hidden[2:]), kernel, delta, *behind)
        before = (first.stride, first.padding, first.dilation)
        columns.append(conv2d_weight(x, size, reaching, *before).flatten(1))
    return torch.stack(columns, dim=1).flatten(0, 1).T[None]


def _without_layer_scale(model: Any) -> Any:
    """Fold every LayerScale into the layer before it, in place; the function is the same.

    It scales single channels of the stream, so the mean over channels could not be removed before.
    """
    for block in getattr(model, "blocks", ()):
        for layer, scale in ((block.attn.proj, block.ls1), (block.mlp.fc2, block.ls2)):
            if isinstance(scale, LayerScale):
                with torch.no_grad():
                    for tensor in layer.parameters():
                        tensor.mul_(along(scale.gamma, tensor, 0))
                    scale.gamma.fill_(1)
    return model


def _half_of_stream(module: nn.Module, tensor: Tensor, axis: int, attribute: str) -> Tensor:
    """Return a tensor of a layer-normed stream, adapted to a stream whose new half is zero."""
    if isinstance(module, nn.LayerNorm):
        return tensor / sqrt(2) if attribute == "weight" else tensor
    if isinstance(module, LayerScale):
        return tensor
    return (tensor - tensor.mean(axis, keepdim=True)) * sqrt(2)


def _outgoing(
    weight: Tensor, scale: float, vectors: Tensor | None, draw: torch.Generator
) -> Tensor:
    """Return the columns of as many new units, in the given directions or random ones."""
    columns = weight.transpose(0, 1)
    if vectors is None:
        vectors = normalize(torch.randn(columns.flatten(1).shape, generator=draw))
    norm = scale * columns.flatten(1).norm(dim=1).mean()
    result: Tensor = (norm * vectors).view(columns.shape).transpose(0, 1)
    return result


def _obstacles(model: nn.Module, units: Units) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules that do not map a zero unit to zero, or that M does not account for."""
    known = (nn.Linear, nn.Conv2d, LayerScale, nn.LayerNorm if units.mixed else nn.BatchNorm2d)
    for name, axes in units.axes.items():
        path = name.rpartition(".")[0]
        module = model.get_submodule(path)
        if path and any(axes) and (path == "norm_pre" or not isinstance(module, known)):
            yield path, module
    for path, module in model.named_modules():
        between = getattr(module, "aa", None)  # a ResNet's anti-aliasing
        if isinstance(between, nn.Module) and not isinstance(between, nn.Identity):
            yield f"{path}.aa", between
