"""DTensor's conversions in a trace: one node each, with its mesh and placements as constants behind guards.

>>> DTensor.from_local(x, mesh, [Shard(0)])      # node: from_local(x); the backend traces its collectives
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

from ..base import compat
from .breaks import unsupported, unsupported_if
from .rules_overrides import SubclassValue
from .source import Const
from .values.base import MISSING, CallRule, Trace, Value, binders, builtin_rule, call_finder, named_rule
from .values.containers import SequenceValue
from .values.tensor import TensorValue, torch_call

DTENSORS = "torch.distributed.tensor"  # the module of the class
_RING = "torch.distributed.tensor.experimental._context_parallel._attention"


def guard_handlers(trace: Trace, cls: Any) -> None:
    """What ops of DTensors do: `loss_parallel` and `context_parallel` give some a handler for a while."""

    def found() -> tuple[dict[Any, Any], dict[str, Any]]:
        ring = sys.modules.get(_RING)
        handlers = getattr(getattr(cls, "_op_dispatcher", None), "_custom_op_handlers", {})
        return handlers, vars(getattr(ring, "_cp_options", types.SimpleNamespace()))

    then = tuple(map(dict, found()))  # copies
    place = Const(None, "DTensor's handlers")
    trace.reader.ask(place, None, "the sameness", lambda _: found() == then)


class _Conversion:
    """A node's target: a function with all arguments but its tensors."""

    def __init__(self, fn: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> None:
        self.__name__ = self.__qualname__ = fn.__name__
        self.fn, self.args, self.kwargs = fn, args, kwargs

    def __call__(self, *tensors: Any) -> Any:
        given = iter(tensors)
        args = [next(given) if arg is MISSING else arg for arg in self.args]
        return self.fn(*args, **{k: next(given) if v is MISSING else v for k, v in self.kwargs.items()})


@named_rule(
    *[
        f"{DTENSORS}._api:{name}"
        for name in (
            "DTensor.from_local",
            "DTensor.to_local",
            "DTensor.redistribute",
            "DTensor.full_tensor",
            "distribute_tensor",
        )
    ]
)
def _convert(fn: Callable[..., Any], trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    tensors: list[Value] = []

    def constant(value: Value) -> Any:
        plain = value.tensor if isinstance(value, SubclassValue) else value
        if isinstance(plain, TensorValue):
            tensors.append(plain)
            return MISSING
        return _held(trace, value)

    conversion = _Conversion(fn, [constant(a) for a in args], {k: constant(v) for k, v in kwargs.items()})
    return torch_call(trace, conversion, tensors, {})


# Placements are objects of C++: their methods compare and describe them, and none changes them -----------------
@call_finder
def _find_placement(cls: Any) -> CallRule | None:
    """`Shard(0)` in a compiled function: an object that the program holds."""
    if not isinstance(cls, type) or cls.__module__ != "torch.distributed.tensor.placement_types":
        return None

    def made(trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
        named = {name: _held(trace, value) for name, value in kwargs.items()}
        return trace.make(trace.real(cls, *[_held(trace, value) for value in args], **named))

    return made


_InstanceMethod = type(
    vars(compat.pybind_class).get("nodes", MISSING)
)  # how pybind11 keeps methods in a class


class _PlacementMethod(Value):
    """A bound method of a placement."""

    __slots__ = ("descriptor", "owner")
    kind = types.MethodType

    def __init__(self, descriptor: Any, owner: Value) -> None:
        super().__init__()
        self.descriptor, self.owner = descriptor, owner

    def call(self, trace: Trace, args: list[Value], kwargs: dict[str, Value]) -> Value:
        given = [_held(trace, value) for value in (self.owner, *args)]
        named = {name: _held(trace, value) for name, value in kwargs.items()}
        return trace.make(self.descriptor.__get__(given[0])(*given[1:], **named))


@builtin_rule(_InstanceMethod.__call__)
def _call_method(trace: Trace, method: Value, owner: Value, /, *args: Value, **kwargs: Value) -> Value:
    """The getter of a property (`shard.dim`)."""
    return _PlacementMethod(method.real(), owner).call(trace, [*args], kwargs)


@binders.register(_InstanceMethod)
def _bind(trace: Trace, descriptor: Any, name: str, instance: Value, cls: type) -> Value:
    unsupported_if(
        not cls.__module__.startswith(("torch.distributed.tensor", "torch._C._distributed")),
        "unsupported-value",
        f"a method written in C++ of {cls.__name__}",
    )
    return _PlacementMethod(descriptor, instance)


def _held(trace: Trace, value: Value) -> Any:
    """The object that a value stands for, which stays it: a mesh, a placement, a number."""
    if isinstance(value, SequenceValue):
        return value.kind([_held(trace, item) for item in value.items])
    if value.is_constant():
        return value.as_constant()
    found = value.real()
    if found is MISSING or value.source is None:
        raise unsupported(
            "tensor-subclass",
            f"{value.describe()} is made in the compiled function and given to a conversion of a DTensor",
            cure="make meshes and placements outside the compiled function",
        )
    if type(value.source) is not Const:
        # Asked at each call: most are the same object, which needs no comparison of meshes.
        same = lambda obj: obj is found or type(obj) is type(found) and bool(obj == found)  # noqa: E731
        trace.reader.ask(value.source, found, "an equal one", same)
    return found


@call_finder
def _find_group(fn: Any) -> CallRule | None:
    """The process group of a name, asked for again at each call."""
    if getattr(fn, "__name__", "") != "_resolve_process_group":
        return None

    def group(trace: Trace, /, name: Value) -> Value:
        known = name.as_constant()
        return trace.make(trace.reader.ask(Const(fn, fn.__name__), fn, "its group", lambda ask: ask(known)))

    return group
