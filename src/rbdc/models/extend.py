"""Grow a trained model in depth or in resolution; its width stays.

Structure is found, not declared. Blocks that repeat are the entries of lists that are longer in the
deeper model. A new block starts as the identity: the last layer of each of its residual branches is
found by trying, and set to zero. So the deeper model computes what the shallower one did, which is
proved on an image of noise, or on a sequence of random tokens.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rbdc.coupling import class_names, evaluating, example_for, set_class_names, tokens_for
from rbdc.errors import ModelError
from rbdc.models.build import build, family, image_side, size_argument, sized, spec_of
from rbdc.models.language import SEQUENCE
from rbdc.models.spec import ModelSpec
from rbdc.structure import call, unwrapped

NewBlocks = Literal["identity", "copy"]
"""What new blocks start as: the identity, or copies of trained blocks (G_stack)."""
TOLERANCE = 1e-6
"""Largest relative difference between a deeper model and the one that it was grown of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Extended:
    """A model grown in depth or resolution."""

    model: nn.Module
    origin: Mapping[str, str]
    """Tensors with a past, by the name in this model: their names in the model before."""
    error: float | None
    """Relative difference of the logits to those of the model before; None if it is not the same
    function: another resolution, or copied blocks."""


@torch.no_grad()
def extend(
    model: nn.Module, spec: ModelSpec, *, seed: int, blocks: NewBlocks = "identity"
) -> Extended:
    """Return `model` at the depth and input size of `spec`. New weights are drawn from `seed`."""
    before = spec_of(model)
    argument = size_argument(spec)
    size = {k: v for k, v in before.arguments.items() if k == argument}
    others = {k: v for k, v in spec.arguments.items() if k != argument}
    same_size = replace(spec, arguments=others | size)
    deeper, origin, error = model, {name: name for name in model.state_dict()}, None
    if same_size != before:
        deeper, origin, error = _deepen(model, same_size, seed, blocks)
    if same_size == spec:
        return Extended(model=deeper, origin=origin, error=error)
    resized, changed = _resize(deeper, spec)
    kept = {new: old for new, old in origin.items() if new not in changed}
    return Extended(model=resized, origin=kept, error=error)


@torch.no_grad()
def at_size(model: nn.Module, spec: ModelSpec, side: int) -> nn.Module:
    """Return a model of `spec` for images of another side: itself, if it takes images of any."""
    if side == image_side(spec) or not family(spec).takes_image_size:
        return model
    plain = unwrapped(model)
    resized, _ = _resize(plain, sized(spec, side))
    return resized.to(next(plain.parameters()))


def _deepen(
    shallow: nn.Module, spec: ModelSpec, seed: int, blocks: NewBlocks
) -> tuple[nn.Module, dict[str, str], float | None]:
    """Return the deeper model, the origin of each tensor that has one, and the proof's error.

    New blocks are inserted between the old ones. Where that changes the function, because a block's
    place decides what it does (the shifted windows of Swin), they follow the old ones.
    """
    error = float("inf")
    for between in (True, False):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            deep: Any = build(spec)
        deep.pretrained_cfg.update(shallow.pretrained_cfg)  # its image preprocessing
        set_class_names(deep, class_names(shallow))
        places = block_places(shallow, deep, between=between)
        if not places:
            raise ModelError(
                f"{spec} has no blocks that repeat, so it cannot grow in depth",
                "Leave depth out of --grow.",
            )
        if blocks == "copy":
            return deep, _copy_tensors(shallow, deep, _stacked(shallow, deep, places)), None
        origin = _copy_tensors(shallow, deep, places)
        make_identity(deep, [path for path, old in places.items() if old is None])
        error = _difference(shallow, deep)
        if error <= TOLERANCE:
            return deep, origin, error
    raise ModelError(
        f"{spec} differs from the shallower model before by {error:.1e} of the largest logit",
        "Its blocks cannot be inserted without changing it: leave depth out of --grow.",
    )


def _copy_tensors(
    shallow: nn.Module, deep: nn.Module, places: Mapping[str, str | None]
) -> dict[str, str]:
    """Copy the weights of old blocks, and all others; return the origin of each copied tensor."""
    state, known = deep.state_dict(), shallow.state_dict()
    origin = {name: old for name in state if (old := _origin(name, places)) is not None}
    for name, old in origin.items():
        if old not in known or known[old].shape != state[name].shape:
            raise ModelError(
                f"{name} has no counterpart in the shallower model",
                "A model can grow in depth only by blocks of one shape.",
            )
        state[name].copy_(known[old])
    return origin


def block_places(
    shallow: nn.Module, deep: nn.Module, *, between: bool = True
) -> dict[str, str | None]:
    """Return the blocks of lists that are longer in `deep`: path, and the old path or None.

    `between` spreads the old blocks evenly, the first one first: 2 blocks become old, new, old,
    new. Otherwise the new ones follow the old ones.
    """
    before = dict(shallow.named_modules())
    places: dict[str, str | None] = {}
    for path, module in deep.named_modules():
        was = before.get(path)
        if not isinstance(module, nn.Sequential | nn.ModuleList) or was is None:
            continue
        count, old = (len([*one.children()]) for one in (module, was))
        if count > old > 0:
            kept = {index * count // old if between else index: index for index in range(old)}
            for index in range(count):
                places[f"{path}.{index}"] = f"{path}.{kept[index]}" if index in kept else None
    return places


def _origin(name: str, places: Mapping[str, str | None]) -> str | None:
    """Return the old name of a tensor; None if it belongs to a new block."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        path = ".".join(parts[:end])
        if path in places:
            old = places[path]
            return None if old is None else ".".join([old, *parts[end:]])
    return name


def _stacked(
    shallow: nn.Module, deep: nn.Module, places: Mapping[str, str | None]
) -> dict[str, str]:
    """Return the old block that each block copies: the old blocks in order, again and again.

    A list whose first block has other shapes (a ResNet's stage) keeps it and repeats the others.
    """
    found: dict[str, str] = {}
    for path in places:
        owner, _, index = path.rpartition(".")
        old = [f"{owner}.{name}" for name, _ in shallow.get_submodule(owner).named_children()]
        shapes = _shapes(deep.get_submodule(path))
        fitting = [one for one in old if _shapes(shallow.get_submodule(one)) == shapes]
        if not fitting:
            raise ModelError(
                f"no trained block has the shape of {path}, so none can be copied to it",
                "Stack at least two blocks, or grow by blocks that start as the identity.",
            )
        found[path] = fitting[(int(index) - (len(old) - len(fitting))) % len(fitting)]
    return found


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in module.state_dict().items()}


def make_identity(model: nn.Module, paths: Sequence[str]) -> None:
    """Set the last layer of every residual branch of these blocks to zero."""
    for path in paths:
        block = model.get_submodule(path)
        with evaluating(model):
            if not _silence(_BlockCall.of(block, model)):
                raise ModelError(
                    f"{path} cannot start as the identity: it has no residual connection",
                    "Leave depth out of --grow.",
                )


@dataclass(frozen=True, slots=True)
class _BlockCall:
    """What a block is called with, for an example of the model's inputs."""

    module: nn.Module
    inputs: tuple[Any, ...]
    options: Mapping[str, Any]

    @classmethod
    def of(cls, block: nn.Module, model: nn.Module) -> "_BlockCall":
        """Record the first call of a block of the model."""
        found: list[_BlockCall] = []

        def record(module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
            found.append(cls(module, inputs, options))

        with block.register_forward_pre_hook(record, with_kwargs=True):
            call(model, _example(model))
        return found[0]

    def output(self) -> Tensor:
        """Return what the block computes now; of several outputs, the first one."""
        found = self.module(*self.inputs, **self.options)
        result: Tensor = found[0] if isinstance(found, tuple) else found
        return result

    def is_identity(self) -> bool:
        """Return whether the block returns its input."""
        before = next(v for v in (*self.inputs, *self.options.values()) if isinstance(v, Tensor))
        return torch.equal(self.output(), before)


def _silence(block: _BlockCall) -> bool:
    """Set layers to zero, last ones first, until the block is the identity; return whether it is.

    A layer whose zeros change nothing more, because one behind it is zero already, keeps its
    weights. So only the layers that end a residual branch are zero in the end.
    """
    zeroed: list[tuple[nn.Module, dict[str, Tensor]]] = []
    for layer in reversed(_called_layers(block)):
        if block.is_identity():
            break
        before, saved = block.output(), _own_parameters(layer)
        _set_zero(layer)
        if torch.equal(block.output(), before):
            _restore(layer, saved)
        else:
            zeroed.append((layer, saved))
    if not block.is_identity():
        return False
    for layer, saved in zeroed:  # a gate behind the last layer of a branch need not be zero
        _restore(layer, saved)
        if not block.is_identity():
            _set_zero(layer)
    return True


def _called_layers(block: _BlockCall) -> list[nn.Module]:
    """Return the modules with parameters of their own, in the order in which their calls end."""
    called: list[nn.Module] = []
    with ExitStack() as hooks:
        for module in block.module.modules():
            if next(module.parameters(recurse=False), None) is not None:
                hook = module.register_forward_hook(lambda layer, _in, _out: called.append(layer))
                hooks.enter_context(hook)
        block.output()
    return list(dict.fromkeys(called))


def _own_parameters(layer: nn.Module) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in layer.named_parameters(recurse=False)}


def _restore(layer: nn.Module, saved: Mapping[str, Tensor]) -> None:
    for name, weight in layer.named_parameters(recurse=False):
        weight.copy_(saved[name])


def _set_zero(layer: nn.Module) -> None:
    for weight in layer.parameters(recurse=False):
        weight.zero_()


def _example(model: nn.Module) -> Any:
    """Return an image of noise, or a whole sequence: attention windows are shorter than those."""
    record: Any = getattr(model, "pretrained_cfg", {})
    return tokens_for(record, record[SEQUENCE]) if SEQUENCE in record else example_for(model)


def _difference(before: nn.Module, after: nn.Module) -> float:
    """Return the relative difference of the logits for one example."""
    with evaluating(before), evaluating(after):
        expected, found = (call(model, _example(model))[0].double() for model in (before, after))
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def _resize(model: Any, spec: ModelSpec) -> tuple[nn.Module, set[str]]:
    """Return the model for another input size, and the tensors that had to be resampled."""
    resized: Any = build(spec)
    old, new = model.state_dict(), resized.state_dict()
    changed = {name for name, tensor in new.items() if old[name].shape != tensor.shape}
    if changed:
        convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
        if convert is None:
            raise ModelError(
                f"timm cannot resample {min(changed)} of {spec} for another image size",
                "Leave resolution out of --grow.",
            )
        old = convert(dict(old), resized)  # timm's own way, as for its published weights
    try:
        resized.load_state_dict(old)
    except RuntimeError as error:
        raise ModelError(
            f"timm cannot resample the weights of {spec} for {image_side(spec)} px: "
            + " ".join(str(error).split())[:200],
            "Leave resolution out of --grow.",
        ) from None
    kept = {k: v for k, v in model.pretrained_cfg.items() if k not in ("input_size", SEQUENCE)}
    resized.pretrained_cfg.update(kept)
    return resized, changed
