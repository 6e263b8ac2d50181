"""`__torch_function__`: a call of PyTorch with an object that takes such calls over goes to the object's class, as
in eager. Tensors of subclasses are plain tensors of the graph behind an object of the program's.

The class's arguments are asked of PyTorch: the call is made with stand-ins that raise their arguments.

>>> class Sub(torch.Tensor): ...
>>> torch.sin(sub)      # Sub.__torch_function__(Tensor.sin, (Sub,), (sub,)) is interpreted
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ..base import compat
from ..base.compat import NestedTensor
from ..base.narrowing import checked
from .breaks import unsupported, unsupported_if
from .guards import TypeIs
from .opcode_tables import CLASS_NAMES
from .source import Called, Source
from .torch_rules import METADATA, TENSOR_METHODS, is_graph_function
from .values.base import (
    MISSING,
    CallRule,
    ResultEmitter,
    Trace,
    Value,
    builtin_rule,
    call_finder,
    override,
    run_rule,
)
from .values.constant import Constant
from .values.containers import DictValue, ListValue, SequenceValue, TupleValue
from .values.instances import inline_function
from .values.klass import ClassValue
from .values.tensor import TensorValue, lower, torch_call, wrap_tensor
from .values.user_object import UserObject

_Switch = compat.DisableTorchFunctionSubclass
_NONE = compat.disabled_torch_function


class SubclassValue(UserObject):
    """A tensor of a class with `__torch_function__`; `tensor` is its value in the graph."""

    __slots__ = ("tensor",)
    takes_over = True

    def __init__(
        self, cls: type, tensor: TensorValue, source: Source | None = None, obj: Any = MISSING
    ) -> None:
        super().__init__(cls, source, obj)
        self.tensor = tensor

    def hash_key(self, trace: Trace) -> Any:
        return self if self.obj is MISSING else self.obj

    def load_slot(self, trace: Trace, descr: Any) -> Value:
        if _takes_calls(trace, self.cls):
            return _take_over(trace, descr.__get__, [self], {})
        return self.tensor.getattr(trace, descr.__name__)

    def store_slot(self, trace: Trace, descr: Any, value: Value | None) -> None:
        raise unsupported("unsupported-mutation", f"attribute {descr.__name__!r} of a tensor is set")

    def store_special(self, trace: Trace, descr: Any, name: str, value: Value | None) -> None:
        if value is None or type(self) is not SubclassValue or _takes_calls(trace, self.cls):
            super().store_special(trace, descr, name, value)
        else:  # `tensor` is no alias
            self.tensor.setattr(trace, name, value)

    def binary(
        self, trace: Trace, op: Callable[..., Any], other: Value, reflected: bool = False
    ) -> Value | None:
        own = self.cls.__mro__[: self.cls.__mro__.index(torch.Tensor)]
        name = f"__r{op.__name__.strip('_')}__"
        if reflected and isinstance(other, TensorValue) and not any(name in vars(cls) for cls in own):
            if _takes_calls(trace, self.cls):
                return _take_over(trace, op, [other, self], {})
            return torch_call(trace, op, [other, self.tensor], {})
        return super().binary(trace, op, other, reflected)

    def _new(self, emitter: ResultEmitter) -> str:
        return f"{emitter.emit(self.tensor)}.as_subclass({emitter.constant(self.cls)})"


def wrap_other_subclasses(trace: Trace, source: Source, obj: torch.Tensor) -> Value:
    """The value of a tensor from outside whose class holds no other tensors."""
    cls = type(obj)
    if _is_plain_parameter(cls):
        trace.type_attr(cls, "__torch_function__")
        return wrap_tensor(trace, source, obj)
    trace.reader.guard(TypeIs(source, cls))
    if is_lazy(obj):  # an alias would keep the node that collects gradients of this shape
        raise unsupported(
            "unsupported-value", "a parameter has no size yet", cure="call its module once before"
        )
    _check_class(trace, cls)
    if _takes_calls(trace, cls):
        tensor = trace.wrap(Called(source, _plain_tensor), _plain_tensor(obj))
    else:  # to PyTorch's functions it is a plain tensor
        tensor = wrap_tensor(trace, source, obj)
    assert isinstance(tensor, TensorValue)
    return SubclassValue(cls, tensor, source, obj)


def _is_plain_parameter(cls: type) -> bool:
    """Whether a class of parameters changes nothing: no torch call asks it, and it has no members of its own."""
    own = cls.__mro__[: cls.__mro__.index(torch.Tensor)]
    members = {name for each in own if each is not torch.nn.Parameter for name in vars(each)}
    return (
        issubclass(cls, torch.nn.Parameter)
        and type(cls) is type(torch.nn.Parameter)
        and members <= CLASS_NAMES | {"__new__", "__init__"}
    )


def _plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(torch.Tensor)


def _check_class(trace: Trace, cls: Any) -> None:
    """Refuse what takes ops over below PyTorch's functions and does not say what is inside of it."""
    trace.type_attr(cls, "__torch_function__")
    unsupported_if(
        cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__,
        "tensor-subclass",
        f"{cls.__name__} is a tensor subclass with __torch_dispatch__ and without __tensor_flatten__",
        cure="give the class __tensor_flatten__ and __tensor_unflatten__, or pass plain tensors",
    )


@builtin_rule(torch.Tensor.as_subclass)
def _as_subclass(trace: Trace, value: Value, cls: Value) -> Value:
    tensor = value.tensor if isinstance(value, SubclassValue) else value
    if not isinstance(tensor, TensorValue) or not isinstance(cls, ClassValue):
        raise unsupported("tensor-subclass", "as_subclass is called with other arguments")
    kind: Any = cls.value
    if kind is torch.Tensor or tensor.source is not None:
        tensor = torch_call(trace, torch.ops.aten.alias.default, [tensor], {})
    if kind is torch.Tensor:
        return tensor
    _check_class(trace, kind)
    return SubclassValue(kind, checked(TensorValue, tensor))  # an op of a tensor gives one


@builtin_rule(vars(compat.TensorBase)["__new__"])
def _new(trace: Trace, cls: Value, /, *args: Value, **kwargs: Value) -> Value:
    """`Sub(tensor)` of a class without a `__new__` of its own: the same memory as an instance of it."""
    (tensor,) = args or (cls,)
    unsupported_if(
        bool(kwargs) or not isinstance(tensor, TensorValue | SubclassValue),
        "unsupported-call",
        "a tensor subclass is made of other things than a tensor",
    )
    return _as_subclass(trace, tensor, cls)


# The switch that `Tensor.__torch_function__` sets ------------------------------------------------------------
class _SwitchValue(Value):
    """`DisableTorchFunctionSubclass()`; it cannot leave the trace."""

    __slots__ = ()
    kind = _Switch  # made at run time


builtin_rule(_Switch)(lambda trace: _SwitchValue())


def _switch(by: int, trace: Trace, *args: Value) -> Value:
    trace.calls.plain += by
    return Constant(None)


builtin_rule(compat.enter_plain_functions)(functools.partial(_switch, 1))
builtin_rule(compat.exit_plain_functions)(functools.partial(_switch, -1))


@builtin_rule(compat.torch_function_enabled)
def _is_enabled(trace: Trace) -> Value:
    """The `Ambient` row compares what holds outside."""
    inside: int = trace.calls.plain
    return Constant(compat.torch_function_enabled() and not inside)


@builtin_rule(_NONE)
def _call_plainly(
    trace: Trace, func: Value, types: Value, args: Value | None = None, kwargs: Value | None = None
) -> Value:
    """`super().__torch_function__(func, types, args, kwargs)` where the base has turned it off."""
    positional = [] if args is None else args.unpack(trace)
    keywords = {} if not isinstance(kwargs, DictValue) else kwargs.load()
    trace.calls.plain += 1
    try:
        return trace.call(func, positional, {k.as_constant(): value for k, value in keywords.values()})
    finally:
        trace.calls.plain -= 1


# Calls ------------------------------------------------------------------------------------------------------
def _is_getter(fn: Callable[..., Any]) -> bool:
    if type(fn) is not types.MethodWrapperType or fn.__name__ != "__get__":
        return False
    owner = getattr(fn.__self__, "__objclass__", None)
    return owner is not None and issubclass(torch.Tensor, owner)


@call_finder
def _find_getter(fn: Any) -> CallRule | None:
    """`Tensor.shape.__get__` and the like: how a class is asked for an attribute."""
    if not _is_getter(fn):
        return None
    name = fn.__self__.__name__

    def rule(trace: Trace, value: Value, *args: Value) -> Value:
        if METADATA.get(name) == "asked":  # of the plain tensor the answer is another one
            raise unsupported("tensor-subclass", f"{name} of a subclass's tensor is read")
        return value.getattr(trace, name)

    return rule


def _takes_calls(trace: Trace, cls: type) -> bool:
    """Whether a class has a `__torch_function__` that is interpreted; PyTorch turns it off for a class with
    `__torch_dispatch__` alone, and that of jagged tensors calls nothing of the program's."""
    return trace.type_attr(cls, "__torch_function__") is not _NONE and cls is not NestedTensor


def _carriers(values: Iterable[Value]) -> Iterator[UserObject]:
    """The objects among arguments, and in lists and tuples of them, that may take a call over."""
    for value in values:
        if isinstance(value, SequenceValue) and value.takes_over:
            yield from _carriers(value.items)
        elif isinstance(value, UserObject) and value.takes_over:
            yield value


def _call_or_take_over(
    fn: Callable[..., Any], rule: CallRule | None, trace: Trace, /, *args: Value, **kwargs: Value
) -> Value:
    if not trace.calls.plain and any(
        _takes_calls(trace, value.cls) for value in _carriers([*args, *kwargs.values()])
    ):
        return _take_over(trace, fn, [*args], kwargs)
    if rule is None:
        raise unsupported("tensor-subclass", f"{fn} is called with a subclass")
    return _plainly(trace, fn, rule, [*args], kwargs)


@override.define
def _override(fn: Callable[..., Any], rule: CallRule | None) -> CallRule | None:
    """The rule of a call whose arguments may take it over."""
    return functools.partial(_call_or_take_over, fn, rule) if is_overridable(fn) else rule


def is_overridable(fn: Any) -> bool:
    """Whether a call of PyTorch asks arguments and modes whether they take it over."""
    described = isinstance(fn, types.MethodDescriptorType | types.WrapperDescriptorType | types.FunctionType)
    takes = described and fn in TENSOR_METHODS or is_graph_function(fn) or _is_getter(fn)
    return takes and fn is not torch.Tensor.as_subclass


def _plainly(trace: Trace, fn: Any, rule: CallRule, args: list[Value], kwargs: dict[str, Value]) -> Value:
    """The call on the graph's tensors; a result that is an argument stays the object it was."""
    met: list[SubclassValue] = []
    given = [_plain(a, met) for a in args]
    named = {name: _plain(v, met) for name, v in kwargs.items()}
    shown = [_layout(value) for value in met]
    result = run_rule(trace, fn, rule, given, named)
    unsupported_if(
        shown != [_layout(value) for value in met],
        "tensor-subclass",
        "the shape of a subclass's tensor is changed in place",
    )
    return next((value for value in met if value.tensor is result), result)


def _plain(value: Value, met: list[SubclassValue]) -> Value:
    """A call's argument with the graph's tensors; `met` gets the objects that they stand for."""
    if isinstance(value, SubclassValue):
        met.append(value)
        return value.tensor
    if (type(value) is TupleValue or type(value) is ListValue) and value.takes_over:
        return type(value)([_plain(item, met) for item in value.items])
    return value


def _layout(value: SubclassValue) -> Any:
    example = value.tensor.example
    return example.shape, example.stride(), example.dtype


class Asked(Exception):
    """A stand-in's arguments."""


class _StandIn:
    @classmethod
    def __torch_function__(cls, *given: Any) -> Any:
        raise Asked(*given)


class _TensorStandIn(_StandIn, torch.Tensor):
    pass


class StandIns:
    """Real objects in the place of a call's arguments, which PyTorch shows to the class or mode that takes the call
    over. `classes`: the arguments that may do so, one of each class."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.classes: list[Any] = []
        self._known: dict[int, Value] = {}
        self._kept: list[Any] = []

    def of(self, value: Value) -> Any:
        """The object in the place of a value."""
        if isinstance(value, SequenceValue) and (value.takes_over or _holds_tensors(value)):
            return value.kind([self.of(item) for item in value.items])
        if isinstance(value, SubclassValue) and not _takes_calls(self.trace, value.cls):
            made: Any = torch.empty(0)
        elif isinstance(value, UserObject) and value.takes_over:
            made = _StandIn()
            if isinstance(value, SubclassValue):
                made = torch.empty(0).as_subclass(_TensorStandIn)
            if value.cls not in [carrier.cls for carrier in self.classes]:
                self.classes.append(value)
        elif isinstance(value, TensorValue):
            made = torch.empty(0)
        else:
            return lower(value, False)
        self._kept.append(made)
        self._known[id(made)] = value
        return made

    def back(self, obj: Any) -> Value:
        """The value of an object of the call that PyTorch shows."""
        if id(obj) in self._known:
            return self._known[id(obj)]
        if type(obj) is tuple:
            return TupleValue([self.back(item) for item in obj])
        if type(obj) is list:
            return ListValue([self.back(item) for item in obj])
        if type(obj) is dict:
            return DictValue([(key, Constant(key), self.back(item)) for key, item in obj.items()])
        return self.trace.make(obj)


def _holds_tensors(value: SequenceValue) -> bool:
    return any(isinstance(item, TensorValue) for item in value.items)


def _take_over(trace: Trace, fn: Callable[..., Any], args: list[Value], kwargs: dict[str, Value]) -> Value:
    """Call `__torch_function__` of the arguments' classes as eager does, until one answers."""
    stand_ins = StandIns(trace)
    classes, back = stand_ins.classes, stand_ins.back
    function = given = None
    try:
        fn(*map(stand_ins.of, args), **{name: stand_ins.of(v) for name, v in kwargs.items()})
    except Asked as asked:
        function, _, *given = asked.args
    if isinstance(fn, types.FunctionType) and function is not fn:  # its callee asks
        return inline_function(trace, fn, args, kwargs)
    if given is None:
        raise unsupported("tensor-subclass", f"{fn} does not ask the class of {args[0].describe()}")
    ordered: list[UserObject] = []
    for carrier in classes:  # a subclass goes before its base
        place = next((i for i, c in enumerate(ordered) if issubclass(carrier.cls, c.cls)), len(ordered))
        ordered.insert(place, carrier)
    kinds = TupleValue([trace.make(carrier.cls) for carrier in ordered])
    for carrier in ordered:
        trace.type_attr(carrier.cls, "__torch_function__")
        method = carrier.getattr(trace, "__torch_function__")
        result = trace.call(method, [back(function), kinds, *[back(part) for part in given]])
        if not (isinstance(result, Constant) and result.value is NotImplemented):
            return result
    raise unsupported("tensor-subclass", f"no class takes {function} over")
