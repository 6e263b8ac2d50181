"""Wrapper subclasses: tensors that hold other tensors, list them with `__tensor_flatten__`, and run ops in a
`__torch_dispatch__` of their own.

>>> spec = WrapperSpec.of(quantised)          # class, names and specs of its inner tensors, its context
>>> spec.wrap(flatten(quantised))             # an equal tensor around the same inner tensors
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from .shapes import UnsupportedOp
from .sizes import Dims, Size, Symbol, evaluate
from .spec import TensorSpec
from .sym_int import from_torch, to_torch


def is_wrapper_class(cls: type) -> bool:
    """Whether instances are tensors that hold others and take ops over."""
    return (
        hasattr(cls, "__tensor_flatten__")  # of few classes: this is asked of each argument of each op
        and hasattr(cls, "__tensor_unflatten__")
        and issubclass(cls, torch.Tensor)
        and cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    )


def is_wrapper(value: Any) -> bool:
    """Whether a value is a tensor of a wrapper subclass."""
    return is_wrapper_class(type(value))


def flatten(value: Any) -> list[torch.Tensor]:
    """The tensors inside a wrapper in the order of its names, an inner wrapper taken apart too; any other
    value alone.
    """
    if not is_wrapper(value):
        return [value]
    inner = [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    return [leaf for part in inner if isinstance(part, torch.Tensor) for leaf in flatten(part)]


def inner_names(value: Any) -> list[str]:
    """How the tensors of `flatten` are reached from a value: ".data.scale"; "" for a plain one."""
    if not is_wrapper(value):
        return [""]
    parts = [(name, getattr(value, name)) for name in value.__tensor_flatten__()[0]]
    return [
        f".{name}{rest}"
        for name, part in parts
        if isinstance(part, torch.Tensor)
        for rest in inner_names(part)
    ]


def flatten_all(values: Iterable[Any]) -> list[Any]:
    """`flatten` of each value, in one list."""
    return [leaf for value in values for leaf in flatten(value)]


@dataclass(frozen=True, slots=True)
class HeldPart:
    """A part of a wrapper that is no tensor (a device mesh): the object itself."""

    value: Any

    is_symbolic = False

    def at(self, values: Mapping[Symbol, Any]) -> HeldPart:
        """The same: it holds no sizes."""
        return self


@dataclass(frozen=True, slots=True)
class WrapperSpec:
    """A program's facts of a tensor of a wrapper subclass: the class, the names of its inner tensors, the
    context that `__tensor_flatten__` gave, the size that it shows, and its inner tensors' specs."""

    cls: Any
    names: tuple[str, ...]
    context: Any
    outer: TensorSpec
    inner: tuple[TensorSpec | WrapperSpec | HeldPart, ...]

    @staticmethod
    def of(tensor: Any) -> WrapperSpec:
        """The spec of a wrapper around real tensors, or around tensors without data."""
        names, context = tensor.__tensor_flatten__()
        return WrapperSpec(
            type(tensor),
            tuple(names),
            _mapped(from_torch, context),
            outer_spec(tensor),
            tuple([part_spec(getattr(tensor, name)) for name in names]),
        )

    def leaves(self) -> list[TensorSpec]:
        """The specs of the plain tensors inside, in `flatten`'s order."""
        found: list[TensorSpec] = []
        for one in self.inner:
            if isinstance(one, WrapperSpec):
                found += one.leaves()
            elif isinstance(one, TensorSpec):
                found.append(one)
        return found

    def wrap(self, leaves: Iterable[torch.Tensor]) -> Any:
        """The wrapper around these plain tensors."""
        return self._wrap(iter(leaves))

    def _wrap(self, leaves: Iterator[torch.Tensor]) -> Any:
        inner = {
            name: one.value
            if isinstance(one, HeldPart)
            else (one._wrap(leaves) if isinstance(one, WrapperSpec) else next(leaves))
            for name, one in zip(self.names, self.inner, strict=True)
        }
        return self.around(inner)

    def around(self, inner: dict[str, Any]) -> Any:
        """The wrapper around its inner tensors, by name."""
        shape, stride = to_torch(self.outer.shape), to_torch(self.outer.stride)
        return self.cls.__tensor_unflatten__(
            inner, _mapped(to_torch, self.context), torch.Size(shape), stride
        )

    def at(self, values: Mapping[Symbol, Any]) -> WrapperSpec:
        """The spec with the symbols' values put in."""
        parts = [one.at(values) for one in self.inner]
        return self.with_sizes(lambda leaf: evaluate(leaf, values) if type(leaf) is Size else leaf, parts)

    def with_sizes(
        self, size: Callable[[object], Any], inner: Iterable[TensorSpec | WrapperSpec | HeldPart]
    ) -> WrapperSpec:
        """The spec around these parts, with `size` of each expression of its own."""
        shape, stride = tuple(map(size, self.outer.shape)), tuple(map(size, self.outer.stride))
        outer = replace(self.outer, shape=shape, stride=stride, offset=size(self.outer.offset))
        return replace(self, context=_mapped(size, self.context), outer=outer, inner=tuple(inner))

    # What node.meta["val"] is asked for as if it were a plain tensor's -------------------------------------
    @property
    def shape(self) -> Dims:
        return self.outer.shape

    @property
    def stride(self) -> Dims:
        return self.outer.stride

    @property
    def offset(self) -> Any:
        return self.outer.offset

    @property
    def dtype(self) -> torch.dtype:
        return self.outer.dtype

    @property
    def device(self) -> torch.device:
        return self.outer.device

    @property
    def is_symbolic(self) -> bool:
        """Whether a size of it, or of a tensor inside, differs between calls."""
        return any(one.is_symbolic for one in (self.outer, *self.inner))

    def sizes(self) -> list[Size]:
        """The expressions among its sizes."""
        specs = (self.outer, *self.leaves())
        return [n for spec in specs for n in (*spec.shape, *spec.stride, spec.offset) if type(n) is Size]

    def __str__(self) -> str:
        return f"{self.cls.__name__}({self.outer}: {', '.join(map(str, self.inner))})"


def leaves_of(spec: TensorSpec | WrapperSpec) -> list[TensorSpec]:
    """The specs of the plain tensors that a tensor is made of, in `flatten`'s order."""
    return spec.leaves() if isinstance(spec, WrapperSpec) else [spec]


class _Shape(tuple[Any, ...]):
    """A `torch.Size` in a context that holds expressions, which PyTorch's class does not take."""


def _mapped(leaf: Callable[[Any], Any], context: Any) -> Any:
    """A context with `leaf` of each thing that it holds."""
    kind = type(context)
    if kind is torch.Size or kind is _Shape:
        items = [leaf(item) for item in context]
        return _Shape(items) if any(type(item) is Size for item in items) else torch.Size(items)
    if kind is tuple or kind is list:
        return kind([_mapped(leaf, item) for item in context])
    if kind is dict:
        return {key: _mapped(leaf, item) for key, item in context.items()}
    return leaf(context) if kind in (Size, torch.SymInt) else context


def outer_spec(tensor: torch.Tensor) -> TensorSpec:
    """The outer view of a wrapper."""
    shape, stride, offset = from_torch((tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset()))
    return TensorSpec(shape, stride, tensor.dtype, tensor.device, offset)


def part_spec(part: Any) -> TensorSpec | WrapperSpec | HeldPart:
    """The specs of a wrapper's inner tensors."""
    return any_spec(part) if isinstance(part, torch.Tensor) else HeldPart(part)


def any_spec(tensor: Any) -> TensorSpec | WrapperSpec:
    """The spec of a plain tensor, or of a wrapper."""
    if is_wrapper(tensor):
        return WrapperSpec.of(tensor)
    UnsupportedOp.when(
        tensor.layout is not torch.strided,
        "DM260",
        f"a tensor subclass holds a tensor with layout {tensor.layout}",
        why="only strided tensors and other wrappers become inputs of a graph",
        cure="keep the part that uses it outside the compiled function",
    )
    return tensor.spec if hasattr(tensor, "spec") else TensorSpec.of(tensor)


_DISPATCHED_IN_C = "torch.distributed.tensor"


def _base_last(a: type, b: type) -> int:
    return issubclass(b, a) - issubclass(a, b)


def dispatch(
    func: Callable[..., Any], kinds: Iterable[type], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Run an op in the `__torch_dispatch__` of its arguments' classes, subclasses first, as PyTorch does;
    NotImplemented for a class that PyTorch dispatches in C++.
    """
    wrappers: list[Any] = [cls for cls in kinds if is_wrapper_class(cls)]
    if any(cls.__module__.startswith(_DISPATCHED_IN_C) for cls in wrappers):
        return NotImplemented
    wrappers.sort(key=functools.cmp_to_key(_base_last))
    for cls in wrappers:
        result = cls.__torch_dispatch__(func, tuple(wrappers), args, dict(kwargs))
        if result is not NotImplemented:
            return result
    raise TypeError(
        f"no __torch_dispatch__ of {', '.join(cls.__qualname__ for cls in wrappers)} takes {func}"
    )


class Rewrap:
    """A node's target: the wrapper of a class around inner tensors, as `__tensor_unflatten__` makes it."""

    def __init__(self, cls: Any, names: tuple[str, ...], context: Any, requires_grad: bool) -> None:
        self.__name__ = self.__qualname__ = f"wrap_{cls.__name__}"
        self.cls, self.names, self.context, self.requires_grad = cls, names, context, requires_grad

    def __call__(self, parts: Iterable[torch.Tensor], size: Any, stride: Any) -> Any:
        inner = dict(zip(self.names, parts, strict=True))
        with torch.no_grad():
            made = self.cls.__tensor_unflatten__(inner, self.context, torch.Size(size), tuple(stride))
        return made.requires_grad_() if self.requires_grad else made


class Later(torch.autograd.Function):
    """Gives a tensor a history."""

    @staticmethod
    def forward(ctx: object, anchor: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return make()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[None, None]:
        return None, None


class Through(torch.autograd.Function):
    """The same tensor behind a node of its own, made by `detach`: not every class has views."""

    @staticmethod
    def forward(ctx: object, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return grad
