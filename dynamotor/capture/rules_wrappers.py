"""Tensors of wrapper subclasses (`__torch_dispatch__` and `__tensor_flatten__`): objects of the program's whose
calls of PyTorch are single nodes of the graph, tried on a wrapper around tensors without data.

>>> y = torch.nn.functional.linear(x, quantised)      # node: linear(x, quantised); the backend traces through
>>> quantised.scale                                   # an input of its own, or an inner tensor of a result
"""

from __future__ import annotations

import functools
import inspect
import os
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..base import compat
from ..base.compat import NestedTensor
from ..base.narrowing import checked
from ..graph.shape_tensor import ShapeTensor, shape_mode
from ..graph.sym_int import from_torch, to_torch
from ..graph.tensor_subclass import Later, Rewrap, is_wrapper_class
from .breaks import unsupported, unsupported_if
from .guards import TypeIs
from .rules_dtensor import DTENSORS, guard_handlers
from .rules_jagged import note_lengths
from .rules_overrides import SubclassValue, wrap_other_subclasses
from .source import Source, is_static
from .symbolic_inputs import Marks
from .values.base import MISSING, CallRule, ResultEmitter, Trace, Value, builtin_rule, call_finder, wrap_rule
from .values.constant import Constant
from .values.containers import DictValue, ListValue
from .values.klass import ClassValue
from .values.tensor import TensorValue, constant_result, lower, torch_call, trial, wrapper_values


class WrapperValue(SubclassValue):
    """A tensor of a wrapper subclass.

    `parts` are the values of its inner tensors where the trace knows them. One that the trace makes is `bare`, a
    tensor that shows sizes alone, until it takes part in a call: only then does the program have to say which part is
    inside of it.
    """

    __slots__ = ("trace", "parts", "bare", "arguments", "_tensor")

    def __init__(
        self,
        trace: Trace,
        cls: type,
        tensor: TensorValue | None,
        source: Source | None = None,
        obj: Any = MISSING,
    ) -> None:
        self.trace, self._tensor = trace, tensor
        self.parts: dict[str, Value] = {}
        self.bare: TensorValue | None = None
        self.arguments: tuple[list[Value], dict[str, Value]] = [], {}
        if cls.__module__ == DTENSORS:
            guard_handlers(trace, cls)
        super().__init__(cls, tensor, source, obj)  # type: ignore[arg-type]  # set when it is asked for

    @property
    def tensor(self) -> TensorValue:  # a slot of the base
        """Its spec in the graph."""
        if self._tensor is None:
            self._assemble()
        assert self._tensor is not None
        return self._tensor

    @tensor.setter
    def tensor(self, tensor: TensorValue | None) -> None:
        self._tensor = tensor
        if tensor is not None:
            tensor.carrier = self

    def _assemble(self) -> None:
        """Make the node of a wrapper that the trace made, of what its `__tensor_flatten__` says."""
        trace, bare = self.trace, self.bare
        assert bare is not None
        names, context = trace.call(self.getattr(trace, "__tensor_flatten__"), []).unpack(trace)
        keys = [name.as_constant() for name in names.unpack(trace)]
        self.parts = {key: self.getattr(trace, key) for key in keys}
        known = context.as_constant() if context.is_constant() else lower(context, False)
        example = bare.example
        make = Rewrap(self.cls, tuple(keys), known, example.requires_grad)
        place = [constant_result(trace, tuple(n)) for n in (example.shape, example.stride())]
        made = torch_call(
            trace, make, [ListValue([_plain(part) for part in self.parts.values()]), *place], {}
        )
        unsupported_if(
            not isinstance(made, WrapperValue) or made.cls is not self.cls,
            "tensor-subclass",
            f"__tensor_unflatten__ of {self.cls.__name__} makes {made.describe()}",
        )
        self.tensor = checked(WrapperValue, made).tensor

    # Attributes ---------------------------------------------------------------------------------------------
    def instance_attr(self, trace: Trace, name: str) -> Value | None:
        known = super().instance_attr(trace, name)
        if known is None and self.obj is MISSING and self._tensor is not None:
            held = vars(self._tensor.example)
            if name in held:
                known = self._inner(trace, name, held[name])
                checked(DictValue, self.dict(trace)).store(trace, name, Constant(name), known)
        return known

    def _inner(self, trace: Trace, name: str, held: Any) -> Value:
        """An attribute of a tensor that a call gave."""
        if self.cls is NestedTensor and name == "_metadata_cache":
            cached = [(key, self._inner(trace, f"_{key}_tensor", one)) for key, one in held.items()]
            return DictValue([(key, Constant(key), value) for key, value in cached])
        if isinstance(held, torch.Tensor):
            return torch_call(trace, getattr, [self.tensor, Constant(name)], {})
        return constant_result(trace, held)

    def store_attr(self, trace: Trace, name: str, value: Value | None) -> None:
        unsupported_if(
            name in self.parts or self._tensor is not None and self.obj is MISSING,
            "unsupported-mutation",
            f"attribute {name!r} of a {self.cls.__name__} is set after a call with it",
            cure="write into the inner tensor (copy_)",
        )
        super().store_attr(trace, name, value)

    def load_slot(self, trace: Trace, descr: Any) -> Value:
        if not issubclass(torch.Tensor, descr.__objclass__):
            if self.obj is MISSING and self._tensor is not None and descr.__name__ not in self.slots:
                held = descr.__get__(self._tensor.example)
                self.slots[descr.__name__] = self._inner(trace, descr.__name__, held)
            return super(SubclassValue, self).load_slot(trace, descr)
        if self._tensor is None and self.bare is not None:
            return self.bare.getattr(trace, descr.__name__)
        return super().load_slot(trace, descr)

    def store_slot(self, trace: Trace, descr: Any, value: Value | None) -> None:
        if issubclass(torch.Tensor, descr.__objclass__):
            super().store_slot(trace, descr, value)
        else:
            super(SubclassValue, self).store_slot(trace, descr, value)

    # Leaving the trace --------------------------------------------------------------------------------------
    def reconstruct(self, emitter: ResultEmitter) -> str:
        if self._tensor is not None:
            return emitter.tensor(self._tensor)
        return super().reconstruct(emitter)

    def _new(self, emitter: ResultEmitter) -> str:
        """A wrapper that took part in no call, as the program makes it."""
        args, kwargs = self.arguments
        given = [
            *map(emitter.emit, args),
            *[f"{name}={emitter.emit(value)}" for name, value in kwargs.items()],
        ]
        return f"{emitter.constant(compat.make_wrapper_subclass)}({', '.join(given)})"

    def describe(self) -> str:
        return f"a {self.cls.__name__}"

    def offsets(self, trace: Trace) -> Value:
        """Of a jagged tensor: the tensor by which its nested size is known."""
        lengths = self.getattr(trace, "_lengths")
        return self.getattr(trace, "_offsets") if lengths.is_constant() else lengths

    def note_nested_size(self) -> WrapperValue:
        """The same, entered in the table of nested sizes."""
        example: Any = self.tensor.example
        if self.cls is NestedTensor:
            (size,) = from_torch((example.shape[example._ragged_idx],))
            self.trace.tensors.nested.setdefault(size.offsets, (self, example._ragged_idx))
        return self


@wrapper_values.append
def _value_of(trace: Trace, tensor: TensorValue) -> Value:
    """The value of a call's result."""
    return WrapperValue(trace, type(tensor.example), tensor).note_nested_size()


# From outside -----------------------------------------------------------------------------------------------
@wrap_rule(torch.Tensor, subclasses=True)
def _wrap(trace: Trace, source: Source, obj: torch.Tensor) -> Value:
    cls = type(obj)
    if not is_wrapper_class(cls):
        return wrap_other_subclasses(trace, source, obj)
    trace.reader.guard(TypeIs(source, cls))
    for name in ("__torch_function__", "__torch_dispatch__", "__tensor_flatten__", "__tensor_unflatten__"):
        trace.type_attr(cls, name)
    unsupported_if(
        obj.layout not in (torch.strided, torch.jagged) or obj.device.type == "meta",
        "tensor-subclass",
        f"a {cls.__name__} with layout {obj.layout} on {obj.device}",
        cure="keep this part outside the compiled function",
    )
    names, context = obj.__tensor_flatten__()  # type: ignore[attr-defined]
    spec = None
    if obj.layout == torch.strided:
        spec = trace.sizes.read(source, obj, static=is_static(source))
        trace.reader.guard(trace.sizes.guard(source, obj))
    trace.reader.ask(source, obj, "what __tensor_flatten__ says", _asks_for(cls, tuple(names), context))
    value = WrapperValue(trace, cls, None, source, obj)
    if cls is NestedTensor:
        note_lengths(trace, source)
    trace.sizes.marked.update({id(part): Marks.of(obj) for part in _as_large(obj, names)})
    value.parts = {name: value.getattr(trace, name) for name in names}
    value.tensor = TensorValue(
        trace, None, _example(trace, obj, spec, value.parts, context), source, obj, cls
    )
    return value.note_nested_size()


def _as_large(obj: Any, names: Sequence[str]) -> list[torch.Tensor]:
    """The inner tensors that have the wrapper's shape, where it is marked."""
    if not any(Marks.of(obj)):
        return []
    parts = [getattr(obj, name) for name in names]
    return [part for part in parts if isinstance(part, torch.Tensor) and part.shape == obj.shape]


def _asks_for(cls: type, names: tuple[str, ...], context: Any) -> Callable[[Any], bool]:
    """Whether a tensor has these inner tensors and such a context: as its class compares them, if it does."""
    compare = getattr(cls, "__metadata_guard__", None) or (lambda then, now: now == then)

    def ask(tensor: Any) -> bool:
        try:
            now = tensor.__tensor_flatten__()
            return tuple(now[0]) == names and bool(compare(context, now[1]))
        except Exception:  # a class that cannot be asked has no program
            return False

    return ask


def _example(trace: Trace, obj: torch.Tensor, spec: Any, parts: Mapping[str, Value], context: Any) -> Any:
    """A wrapper around tensors without data that looks like a real one to autograd too."""
    cls: Any = type(obj)
    inner: dict[str, Any] = {}
    for name, part in parts.items():
        tensor = part.tensor if isinstance(part, WrapperValue) else part
        held = getattr(obj, name)
        if type(tensor) is TensorValue:
            inner[name] = tensor.example
        elif isinstance(held, torch.Tensor):
            raise unsupported("tensor-subclass", f"{name!r} of a {cls.__name__} is {part.describe()}")
        else:
            trace.reader.guard_identity(part.source, held)
            inner[name] = held
    if spec is not None and _mentions(context, obj.shape):  # what compares contexts knows numbers alone
        for one in (spec, *[tensor.spec for tensor in inner.values() if isinstance(tensor, ShapeTensor)]):
            for n in (*one.shape, *one.stride):
                int(n)

    def make() -> Any:
        if spec is None:  # all sizes of a jagged tensor follow from its parts
            return cls.__tensor_unflatten__(inner, context, None, None)
        shape, stride = torch.Size(to_torch(spec.shape)), to_torch(spec.stride)
        return cls.__tensor_unflatten__(inner, context, shape, stride)

    with torch.inference_mode(obj.is_inference()), torch.no_grad(), shape_mode():
        example = make()
    if not obj.requires_grad:
        return example
    if obj.is_leaf:
        return example.requires_grad_()
    with torch.enable_grad():
        anchor = torch.empty(0, requires_grad=True)
        return Later.apply(anchor, lambda: example.detach())


def _mentions(context: Any, shape: Sequence[int]) -> bool:
    """Whether a context holds numbers among which the sizes may be."""
    if isinstance(context, int) and not isinstance(context, bool):
        return context in shape
    if isinstance(context, list | tuple):
        return any(_mentions(item, shape) for item in context)
    if isinstance(context, dict):
        return any(_mentions(item, shape) for item in context.values())
    return not (context is None or isinstance(context, bool | str | float | torch.dtype | torch.device))


# Made in the trace ------------------------------------------------------------------------------------------
@builtin_rule(compat.make_wrapper_subclass)
def _make_wrapper_subclass(trace: Trace, cls: Value, /, *args: Value, **kwargs: Value) -> Value:
    kind: Any = cls.value if isinstance(cls, ClassValue) else None
    unsupported_if(
        kind is None or not is_wrapper_class(kind),
        "tensor-subclass",
        f"a {kind.__name__ if kind else 'tensor subclass'} is made, which has no __tensor_flatten__",
        cure="give the class __tensor_flatten__ and __tensor_unflatten__",
    )
    for name in ("__torch_function__", "__torch_dispatch__", "__tensor_flatten__", "__tensor_unflatten__"):
        trace.type_attr(kind, name)
    given = [lower(value, False) for value in args]
    named = {name: lower(value, False) for name, value in kwargs.items()}
    make = compat.make_wrapper_subclass
    made = trial(trace, make, functools.partial(make, kind), given, named)
    value = WrapperValue(trace, kind, None)
    value.bare, value.arguments = TensorValue(trace, None, made), ([cls, *args], kwargs)
    return value


@call_finder
def _find_opaque(fn: Callable[..., Any]) -> CallRule | None:
    """A wrapper subclass whose constructor PyTorch is told not to capture: a call of it is one node."""
    if not isinstance(fn, type) or not is_wrapper_class(fn):
        return None
    if fn is NestedTensor:
        return functools.partial(_make_opaque, fn)
    makers = [inspect.getattr_static(fn, name, None) for name in ("__new__", "__init__")]
    functions = [getattr(maker, "__func__", maker) for maker in makers]
    if not any(isinstance(f, types.FunctionType) and f.__code__.co_filename == _DISABLING for f in functions):
        return None
    return functools.partial(_make_opaque, fn)


_DISABLING = os.path.join(os.path.dirname(torch.__file__), "_compile.py")  # of `torch._disable_dynamo`


def _make_opaque(cls: type, trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    for name in ("__new__", "__init__"):
        trace.type_attr(cls, name)
    named = {name: _plain(value) for name, value in kwargs.items()}
    return torch_call(trace, cls, [_plain(value) for value in args], named)


def _plain(value: Value) -> Value:
    return value.tensor if isinstance(value, SubclassValue) else value
