"""Record the tensor operations of one forward pass.

Composed operations (norms, softmax, attention, biases) are recorded as the simple ones they consist
of, so that a few rules cover all of them (`rbdc.structure.rules`). Values of floating-point tensors
are not kept, only their identity and shape; integer tensors are, because they index others.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._decomp import decomposition_table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from rbdc.errors import CouplingError

aten = torch.ops.aten

_COMPOSED = frozenset(
    getattr(aten, name)
    for name in (
        "native_layer_norm", "native_group_norm", "_fused_rms_norm", "native_batch_norm",
        "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "cudnn_batch_norm",
        "_softmax", "_safe_softmax", "_log_softmax", "addmm", "baddbmm", "pixel_shuffle",
        "pixel_unshuffle", "channel_shuffle", "im2col", "glu",
    )
    if hasattr(aten, name)
)  # fmt: skip
"""Operations that are recorded as what torch decomposes them into."""
_SAME = frozenset({"clone", "alias", "detach", "lift_fresh", "contiguous", "to", "_to_copy"})
"""Operations that copy values. Whether a reshape copies depends on sizes, so they are left out."""
_SMALL = 2**16  # entries of a constant whose values are kept


@dataclass(frozen=True, slots=True)
class Ref:
    """A floating-point tensor of the forward pass; `number` says which."""

    number: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Op:
    """One operation, with a `Ref` in place of each floating-point tensor."""

    name: str
    """ATen's name, without the underscore of in-place operations."""
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Ref, ...]
    module: str
    """Path of the innermost module in whose forward the operation runs."""
    inputs: tuple[Ref, ...]
    """The floating-point tensors among the arguments, in order."""
    constants: tuple[float, ...]
    """The floating-point numbers among the arguments, in order; also those in constant tensors."""

    def argument(self, name: str, default: Any = None) -> Any:
        """Return an argument by its name in ATen's schema."""
        for index, argument in enumerate(self.func._schema.arguments):
            if argument.name == name:
                given = self.args[index] if index < len(self.args) else self.kwargs.get(name)
                return default if given is None else given
        return default

    def __str__(self) -> str:
        return f"{self.name} in {self.module or 'the model itself'}"


@dataclass(slots=True)
class Tape:
    """The operations of one forward pass, and the tensors they begin and end with."""

    ops: list[Op] = field(default_factory=list)
    tensors: dict[int, str] = field(default_factory=dict)
    """Names of parameters and floating-point buffers, by number."""
    outputs: tuple[Ref, ...] = ()
    calls: dict[str, tuple[Ref, Ref]] = field(default_factory=dict)
    """First input and output of each module that maps one tensor to one tensor, by its path."""
    constants: dict[int, Tensor] = field(default_factory=dict)
    """Small tensors that are computed of no weight and no input, by number."""


class _Recorder(TorchDispatchMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.tape = Tape()
        self.refs: Any = WeakIdKeyDictionary()
        self.views: Any = WeakIdKeyDictionary()
        self.count = 0
        self.path: list[str] = []
        self.scalars: dict[int, float] = {}  # values of constants that the model keeps as tensors
        for name, tensor in model.state_dict(keep_vars=True).items():
            if tensor.is_floating_point() and tensor not in self.refs:  # tied: the first name
                self.tape.tensors[self.number(tensor).number] = name
        self.derived = set(self.tape.tensors)  # tensors that depend on weights or inputs

    def number(self, tensor: Tensor, *, new: bool = False) -> Ref:
        """Return the reference of a tensor. An in-place operation makes a `new` one."""
        if new or tensor not in self.refs:
            self.refs[tensor] = Ref(self.count, tuple(tensor.shape))
            self.count += 1
        ref: Ref = self.refs[tensor]
        return ref

    def add(self, name: str, func: Any, args: Any, kwargs: Any, outputs: tuple[Ref, ...]) -> None:
        path = self.path[-1] if self.path else ""
        leaves = list(_leaves((args, kwargs)))
        inputs = tuple(leaf for leaf in leaves if isinstance(leaf, Ref))
        scalars = (self.scalars.get(ref.number) for ref in inputs)
        constants = (
            *(leaf for leaf in leaves if isinstance(leaf, float)),
            *(value for value in scalars if value is not None),
        )
        self.tape.ops.append(Op(name, func, args, kwargs, outputs, path, inputs, constants))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (simple := _simple(func, args)) is not None:
            with self:
                return simple(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        name = name if name.startswith("__") else name.removesuffix("_")
        taken, named = replaced((args, kwargs), self.taken)
        out = func(*args, **kwargs)
        results = [t for t in _leaves(out) if _is_float(t)]
        if func.is_view:
            self.views.update(dict.fromkeys(results))
        if name in _SAME:
            if results and _is_float(args[0]) and results[0] is not args[0]:
                self.refs[results[0]] = self.number(args[0])
            return out
        changes = func._schema.is_mutable
        refs = tuple(self.number(t, new=changes) for t in results)
        self.add(name, func, taken, named, refs)
        if not self.derived.isdisjoint(ref.number for ref in self.tape.ops[-1].inputs):
            self.derived.update(ref.number for ref in refs)
        else:
            small = [
                pair for pair in zip(refs, results, strict=True) if 0 < pair[1].numel() < _SMALL
            ]
            self.tape.constants |= {ref.number: tensor.detach().clone() for ref, tensor in small}
        if changes:
            self.write_back(results)
        return out

    def taken(self, argument: Any) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        if not _is_float(argument):
            return argument.cpu()
        given = argument not in self.refs and argument.ndim == 0 and not argument.is_complex()
        ref = self.number(argument)
        if given:
            self.scalars[ref.number] = float(argument)
        return ref

    def write_back(self, changed: list[Tensor]) -> None:
        """Record that tensors were changed in place, and with them those that share their memory.

        A tensor that a changed one is a view of is written, and its other views are read again.
        """
        for tensor in changed:
            base = tensor if tensor._base is None else tensor._base
            if base not in self.refs:
                continue
            if base is not tensor:
                taken = (self.number(base), self.number(tensor), _geometry(tensor))
                self.add("write_back", None, taken, {}, (self.number(base, new=True),))
            for view in [*self.views]:
                if view._base is base and view is not tensor:
                    where = (self.number(base), *_geometry(view))
                    made = (self.number(view, new=True),)
                    self.add("as_strided", aten.as_strided.default, where, {}, made)

    def enter(self, path: str) -> Callable[..., None]:
        return lambda _module, _inputs: self.path.append(path)

    def leave(self, path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, inputs: Any, output: Any) -> None:
            self.path.pop()
            first: Any = inputs[0] if inputs else None
            if _is_float(first) and _is_float(output) and first in self.refs:
                self.tape.calls.setdefault(path, (self.number(first), self.number(output)))

        return hook


def _simple(func: Any, args: Any) -> Callable[..., Any] | None:
    """Return what runs a composed operation as simple ones; None for a simple operation."""
    if func is aten.convolution.default and args[2] is not None:
        return _convolution
    if func is aten.native_batch_norm.default and not args[5]:
        return _batch_norm
    if func._overloadpacket in _COMPOSED and func in decomposition_table:
        return decomposition_table[func]
    return func.decompose if func._can_decompose() else None


def _convolution(x: Tensor, weight: Tensor, bias: Tensor, *settings: Any) -> Tensor:
    """Convolve, then add the bias like any other."""
    bias = bias.view(-1, *[1] * (weight.ndim - 2))
    result: Tensor = aten.convolution(x, weight, None, *settings) + bias
    return result


def _batch_norm(x: Tensor, weight: Any, bias: Any, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise with the running statistics. torch's own decomposition has twice as many steps."""
    mean, variance, _training, _momentum, eps = others
    shape = (-1, *[1] * (x.ndim - 2))
    x = (x - mean.view(shape)) * (variance.view(shape) + eps).rsqrt()
    x = x if weight is None else x * weight.view(shape)
    x = x if bias is None else x + bias.view(shape)
    return x, x.new_empty(0), x.new_empty(0)


def _leaves(value: Any) -> Iterator[Any]:
    """Yield what nested lists, tuples and dicts contain; torch's pytree is slower."""
    if isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    else:
        yield value


def replaced(value: Any, replace: Callable[[Any], Any]) -> Any:
    """Return nested lists, tuples and dicts with everything in them replaced."""
    if isinstance(value, dict):
        return {key: replaced(item, replace) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([replaced(item, replace) for item in value])
    return replace(value)


def _geometry(view: Tensor) -> tuple[Any, ...]:
    """Return where the entries of a view are in the memory of its base."""
    return tuple(view.shape), view.stride(), view.storage_offset()


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def call(model: nn.Module, example: Any) -> list[Tensor]:
    """Run the model on an example (a tensor, a tuple or a dict), and return its float outputs.

    The example is moved to the device and the floating-point type of the model.
    """
    weight = next(model.parameters())

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(weight) if value.is_floating_point() else value.to(weight.device)

    example = tree_map(moved, example)
    with _uncapped(model):
        if isinstance(example, dict):
            result = model(**example)
        else:
            result = model(*example) if isinstance(example, tuple) else model(example)
    return [t for t in tree_leaves(result) if _is_float(t)]


@contextmanager
def _uncapped(model: nn.Module) -> Iterator[None]:
    """Leave out a soft cap of the logits (Gemma 2): the head's own outputs are what couples."""
    config: Any = getattr(model, "config", None)
    cap = getattr(config, _CAP, None)
    if cap is not None:
        setattr(config, _CAP, None)
    try:
        yield
    finally:
        if cap is not None:
            setattr(config, _CAP, cap)


_CAP = "final_logit_softcapping"


@torch.no_grad()
def record(model: nn.Module, example: Any) -> Tape:
    """Run the model once in eval mode and return its operations."""
    recorder = _Recorder(model)
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(_without_fast_path())
        for path, module in model.named_modules():
            stack.enter_context(module.register_forward_pre_hook(recorder.enter(path)))
            stack.enter_context(module.register_forward_hook(recorder.leave(path)))
        try:
            with recorder:
                outputs = call(model, example)
        except Exception as error:
            where = recorder.path[-1] if recorder.path else "the model"
            raise CouplingError(
                f"the forward pass of {type(model).__name__} failed in {where or 'the model'}: "
                f"{type(error).__name__}: {error}",
                "Give an example input that the model takes: example=tensor, tuple or dict.",
            ) from error
    recorder.tape.outputs = tuple(recorder.number(t) for t in outputs)
    return recorder.tape


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """Run nn.MultiheadAttention by its own code, and not by one fused operation."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode, and restore the mode of every submodule afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
