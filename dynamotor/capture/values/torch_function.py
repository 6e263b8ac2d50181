"""Calls of torch's functions and tensor methods: nodes, answers at trace time, or breaks (tables in
torch_rules.py).

>>> find_rule(torch.relu)(trace, x)      # a node
>>> find_rule(torch.is_grad_enabled)(trace)      # a constant
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...base import compat
from ...base.registry import register_all
from ...graph.sizes import is_unbacked
from ...graph.sym_int import Condition
from ..breaks import unsupported, unsupported_if
from ..guards import Ambient
from ..op_formulas import guard_formulas
from ..op_state import check_op, differs_when_repeated, formulas_of, late_python
from ..polyfills import tensors
from ..source import Const
from ..torch_rules import QUERIES, REFUSED_METHODS, TENSOR_METHODS, is_graph_function, is_query, refusal
from .array import ArrayValue
from .base import (
    CallRule,
    Iterator,
    ResultEmitter,
    Trace,
    Value,
    builtin_rule,
    call_finder,
    refusing,
    wrap_held,
)
from .constant import NONE, ZERO, Constant, is_none
from .containers import ListValue, SequenceValue, TupleValue
from .instances import inline_function
from .klass import Builtin
from .known_data import SIZED, known, sizes_as_numbers
from .number import FloatValue
from .operators import COMPARE, INPLACE
from .return_types import ReturnTypeValue
from .size import LateComparison, SizeValue, condition_value
from .tensor import TensorValue, constant_result, live_calls, lower, tensor_call, torch_call
from .user_object import UserObject

_DESCRIPTORS = (types.FunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
# Methods with the data model's names that an operator function says more plainly.
_OPERATORS = {"__getitem__": operator.getitem, "__setitem__": operator.setitem}


@call_finder
def _find_torch(fn: Callable[..., Any]) -> CallRule | None:
    """The rule of a torch callable, by the tables of torch_rules.py."""
    refused = refusal(fn)
    if refused is not None:
        return _refusing(_name(fn), *refused)
    if is_query(fn):
        return functools.partial(_query, fn)
    if isinstance(fn, type) and fn.__module__ == "torch.return_types":
        return lambda trace, items: ReturnTypeValue(fn, items.unpack(trace))
    if is_graph_function(fn):
        return functools.partial(graph_function, fn)
    if isinstance(fn, _DESCRIPTORS) and fn in TENSOR_METHODS:
        return _method(fn, TENSOR_METHODS[fn])
    if isinstance(fn, torch.jit.ScriptFunction) and getattr(fn, "__name__", "") == "ScriptFunction":
        return functools.partial(_scripted, vars(fn)["_torchdynamo_inline"])
    if isinstance(fn, torch.jit.ScriptFunction | torch.jit.ScriptModule):
        return _refusing(_name(fn), "unsupported-call", "TorchScript code is opaque")
    return None


wrap_held(Builtin, torch.jit.ScriptFunction)


def _scripted(inner: Any, trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    """What `torch.jit.script` was given, as it is in Python, where no argument is converted: a float of TorchScript's
    may be an int here. The traced call is of that time, and is opaque.
    """
    try:
        bound = inspect.signature(inner).bind(*args, **kwargs)
    except TypeError as error:
        raise unsupported(
            "unsupported-call", f"{_name(inner)} does not take such arguments", str(error)
        ) from None
    bound.apply_defaults()
    for name, value in bound.arguments.items():
        kind = value.python_type() if isinstance(value, Value) else type(value)
        kind = torch.Tensor if isinstance(value, TensorValue) else kind
        wanted = inspect.signature(inner).parameters[name].annotation
        wanted = torch.Tensor if wanted is inspect.Parameter.empty else wanted
        unsupported_if(
            wanted not in (kind, kind.__name__, f"torch.{kind.__name__}"),
            "unsupported-call",
            f"TorchScript's {_name(inner)} gets a {kind.__name__}",
        )
    return trace.tail_call(trace.make(inner), [*args], kwargs)


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None) or repr(fn)


def graph_function(fn: Callable[..., Any], trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    """A call that is one node."""
    _refuse_generator(kwargs)
    check_op(trace, fn)
    guard_formulas(trace, fn)
    trace.late_code.note(*formulas_of(fn))
    with live_calls(trace, late_python(fn), once=differs_when_repeated(fn)):
        return torch_call(trace, fn, *_sized(trace, getattr(fn, "__name__", ""), [*args], kwargs))


def _sized(
    trace: Trace, name: str, args: list[Value], kwargs: dict[str, Value]
) -> tuple[list[Value], dict[str, Value]]:
    if name not in SIZED:
        return args, kwargs
    if name in ("reshape", "view") and not kwargs:
        args = [_of_as_many(trace, *args), *args[1:]]
    return (
        [a if a is args[0] and type(a) is TensorValue else sizes_as_numbers(trace, a) for a in args],
        {key: sizes_as_numbers(trace, value) for key, value in kwargs.items()},
    )


def _of_as_many(trace: Trace, x: Value, *sizes: Value) -> Value:
    """A vector whose length data decides, before it gets a shape of plain numbers: it has as many elements, or the
    call raises."""
    parts = sizes[0].items if len(sizes) == 1 and isinstance(sizes[0], SequenceValue) else sizes
    plain = [n.value for n in parts if type(n) is Constant and type(n.value) is int]
    if type(x) is TensorValue and len(plain) == len(parts):
        shape, wanted = x.spec.shape, math.prod(plain)
        if len(shape) == 1 and is_unbacked(*shape) and wanted >= 0:
            as_many = condition_value(trace, Condition("==", shape[0] - wanted))
            if trace.checks.passes(as_many, True):
                return torch_call(trace, "narrow", [x, Constant(0), Constant(0), Constant(wanted)], {})
    return x


def _refuse_generator(kwargs: dict[str, Value]) -> None:
    generator = kwargs.get("generator")
    unsupported_if(
        not is_none(generator),
        "random",
        "a random number generator object is passed to a torch function",
        cure="use the default generator inside compiled code",
    )


def _method(descr: Any, name: str) -> CallRule:
    refused = REFUSED_METHODS.get(name)
    if refused is not None:
        kind, cause = refused
        refuse = _refusing(f"Tensor.{name}", kind, cause)
        return _reading(name, refuse) if name in _READ else refuse
    target: Any = _OPERATORS.get(name, name)

    def rule(trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
        if not args or type(args[0]) is not TensorValue:
            raise unsupported(
                "unsupported-value", f"Tensor.{name} of {args[0].describe() if args else 'nothing'}"
            )
        _refuse_generator(kwargs)
        return torch_call(trace, target, *_sized(trace, name, [*args], kwargs))

    return rule


_READ = ("item", "tolist", "__int__", "__float__", "__bool__")
_LONGEST_LIST = 32


def _reading(name: str, refuse: CallRule) -> CallRule:
    """Numbers of a tensor stay in the graph: integers as unbacked sizes, others as values that the trace does not look
    at.
    """

    def rule(trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
        x = args[0]
        if len(args) != 1 or kwargs or type(x) is not TensorValue:
            return refuse(trace, *args, **kwargs)
        data = known(trace, x)
        if data is not None and (name == "tolist" or data.numel() == 1 and bool(data.isfinite())):
            return trace.fresh(getattr(data, name)())
        shape, dtype = x.spec.shape, x.example.dtype
        if not trace.sizes.takes_data:
            one = trace.sizes.hands_on and name == "item" and all(type(n) is int and n == 1 for n in shape)
            return HeldNumber(trace, x) if one else refuse(trace, *args, **kwargs)
        if name == "tolist" and len(shape) == 1 and type(shape[0]) is int and shape[0] <= _LONGEST_LIST:
            return ListValue([rule_of_item(trace, part) for part in x.unpack(trace)])
        if name == "__bool__":
            if any(type(n) is not int or n != 1 for n in shape):
                return refuse(trace, *args, **kwargs)
            return HeldNumber(trace, tensor_call(trace, torch.ne, [x, Constant(0)]))
        whole = not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)
        if {"__int__": whole, "__float__": dtype.is_floating_point}.get(name, not shape or name == "item"):
            if whole:
                return torch_call(trace, "item", [*args], {})
            if all(type(n) is int and n == 1 for n in shape):
                return HeldNumber(trace, x)
        return refuse(trace, *args, **kwargs)

    rule_of_item = rule if name == "item" else _reading("item", refuse)
    return rule


_SUMS = frozenset((operator.add, operator.sub, operator.mul))
_EXACT = 1 << 53  # whole numbers up to here are floats


class HeldNumber(Constant):
    """A float or bool of a tensor: it is handed on, read from an output of the graph, and who looks at it
    breaks the graph.
    """

    __slots__ = ("tensor", "kind")
    held = True

    def __init__(self, trace: Trace, tensor: TensorValue) -> None:
        trace.numbers.read_at[id(self)] = tuple([(frame, frame.step_at) for frame in trace.stack.frames])
        self.source, self.kind = None, type(torch.zeros((), dtype=tensor.example.dtype, device="cpu").item())
        self.tensor = tensor_call(trace, "clone", [torch_call(trace, "detach", [tensor], {})])
        trace.graph.snapshots.append(self.tensor.node)

    def python_type(self) -> type:
        return self.kind

    @property
    def value(self) -> Any:
        stop = unsupported(
            "data-dependent",
            f"data-dependent branch: a test of a {self.kind.__name__} that was read from a tensor",
            cure="keep the value in tensors (torch.where, masks)",
        )
        stop.read_at = self.tensor.trace.numbers.read_at[id(self)] if self.kind is bool else ()
        raise stop

    def binary(
        self, trace: Trace, op: Callable[..., Any], other: Value, reflected: bool = False
    ) -> Value | None:
        """A comparison with a number is handed on too, and sums, differences and products of floats: as Python
        computes, with 64 bits.
        """
        function = INPLACE.get(op, op)
        sums = function in _SUMS and self.kind is float
        held = sums and type(other) is HeldNumber and other.kind is float
        number = other.value if type(other) is Constant and type(other.value) in (int, float, bool) else None
        near = held or number is not None and not abs(number) > _EXACT
        if not near or not sums and op not in COMPARE:
            return super().binary(trace, op, other, reflected)
        pair = [self.wide(trace), other.wide(trace) if type(other) is HeldNumber else other]
        return HeldNumber(trace, tensor_call(trace, function, pair[::-1] if reflected else pair))

    def logical_not(self, trace: Trace) -> HeldNumber:
        """Whether it is false."""
        return HeldNumber(trace, tensor_call(trace, torch.logical_not, [self.tensor]))

    def wide(self, trace: Trace) -> Value:
        """The tensor with 64 bits, which hold any float of a tensor."""
        return torch_call(trace, "to", [self.tensor, Constant(torch.float64)], {})

    def reconstruct(self, emitter: ResultEmitter) -> str:
        return f"{emitter.emit(self.tensor)}.item()"

    def describe(self) -> str:
        return f"a {self.kind.__name__} of a tensor"


def _query(fn: Callable[..., Any], trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    if fn is torch.is_tensor and args and isinstance(args[0], UserObject):
        return inline_function(
            trace, fn, [*args], kwargs
        )  # a plain isinstance: `__torch_function__` is not asked
    trace.calls.asked.add(_name(fn))
    real = [_query_argument(trace, fn, a) for a in args]
    named = {name: _query_argument(trace, fn, v) for name, v in kwargs.items()}
    if QUERIES[fn] != "asked" or _is_ambient(fn, real):
        return constant_result(trace, trace.real(fn, *real, **named))
    if real and fn not in _ABOUT_A_DEVICE or named:
        raise unsupported("unsupported-call", f"{_name(fn)} is called with arguments")
    text = f"the answer to {real}" if real else "the answer"
    source = Const(fn, _name(fn))
    return constant_result(trace, trace.real(trace.reader.ask, source, fn, text, lambda f: f(*real)))


def _is_ambient(fn: Callable[..., Any], args: list[Any]) -> bool:
    """Whether a question about autocast is about facts of the `Ambient` row: whether it is on, and its
    dtype if so.
    """
    device = args[0] if args else "cuda"
    if (
        fn not in (torch.is_autocast_enabled, torch.get_autocast_dtype)
        or device not in Ambient.AUTOCAST_DEVICES
    ):
        return False
    return fn is torch.is_autocast_enabled or torch.is_autocast_enabled(device)


_ABOUT_A_DEVICE = (
    torch.is_autocast_enabled,
    torch.get_autocast_dtype,
    torch.cuda.get_device_capability,
    torch.cuda.get_device_name,
)

# Queries about any objects: all that matters is whether their class takes over torch calls.
_OF_ANYTHING = frozenset(
    [
        *(fn for fn in QUERIES if "has_torch_function" in _name(fn)),
        torch.overrides.is_tensor_like,
        torch.is_tensor,
        torch.is_storage,
    ]
)


def _query_argument(trace: Trace, fn: Callable[..., Any], value: Value) -> Any:
    """The possible arguments of a query: constants, tensors without data, a bare object for an object of the
    user's.
    """
    if value.is_constant() and not isinstance(value, TensorValue):
        return value.as_constant()
    if isinstance(value, Iterator):
        value = ListValue(value.unpack(trace))
    if isinstance(value, SequenceValue):
        return value.kind([_query_argument(trace, fn, item) for item in value.items])
    if isinstance(value, UserObject):
        if fn is torch.is_tensor and issubclass(value.cls, torch.Tensor):
            return lower(value.tensor, False)  # type: ignore[attr-defined]
        if fn not in _OF_ANYTHING or trace.has_special(value, "__torch_function__"):
            raise unsupported("unsupported-value", f"{_name(fn)} is asked about {value.describe()}")
        return object()
    return lower(value, False)


def _refusing(name: str, kind: str, cause: str) -> CallRule:
    return refusing(kind, f"{name} is called", cause, "call it outside the compiled function")


wrap_held(Builtin, compat.OpOverload, compat.OpOverloadPacket, subclasses=True)


wrap_held(Constant, compat.SDPBackend)


# Single rules -----------------------------------------------------------------------------------------------
builtin_rule(torch.overrides.handle_torch_function)(
    refusing("tensor-subclass", "an object with __torch_function__ takes over a torch call")
)


@builtin_rule(torch.nn.functional.one_hot)
def _one_hot(trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    tensor = args[0] if args else kwargs.get("tensor", kwargs.get("input"))
    classes = args[1] if len(args) > 1 else kwargs.get("num_classes", Constant(-1))
    known = tensor if isinstance(tensor, TensorValue) and tensor.example.dtype is torch.int64 else None
    count = classes.value if known is not None and isinstance(classes, Constant) else None
    unsupported_if(
        type(count) is int and count == 0, "unsupported-call", "one_hot without classes, which eager refuses"
    )
    if known is not None and type(count) is int and count > 0:
        return trace.call_python(tensors.one_hot, [known, classes])
    return torch_call(trace, torch.nn.functional.one_hot, [*args], kwargs)


def _row_major_without_gradient(
    fn: Callable[..., Any], trace: Trace, /, *args: Value, **kwargs: Value
) -> Value:
    """A CPU has a kernel of its own where no gradient is asked for, whose result is row-major; PyTorch never
    takes it for subclasses of tensors, so the trial runs the other.
    """
    result = torch_call(trace, fn, [*args], kwargs)
    if isinstance(result, TensorValue):
        example = result.example
        if not example.requires_grad and example.device.type == "cpu":
            return torch_call(trace, "contiguous", [result], {})
    return result


builtin_rule(torch.max_pool1d)(functools.partial(_row_major_without_gradient, torch.max_pool1d))
builtin_rule(torch.nn.functional.max_pool1d)(
    functools.partial(_row_major_without_gradient, torch.nn.functional.max_pool1d)
)


def _is_accepted(rank: int, size: Value, scale: Value, mode: Any, aligned: Value, recompute: Value) -> bool:
    """Whether `interpolate` takes such arguments; its refusals keep its own words."""
    if is_none(size) is is_none(scale) or not (is_none(aligned) or not mode.startswith("nearest")):
        return False
    given = scale if is_none(size) else size
    parts = getattr(given, "items", [given] * rank)
    if isinstance(given, Constant) and isinstance(given.value, tuple):  # a torch.Size
        parts = [Constant(n) for n in given.value]
    if is_none(size):
        return len(parts) == rank
    whole = all(
        isinstance(part, SizeValue) or isinstance(part, Constant) and type(part.value) is int
        for part in parts
    )
    return whole and len(parts) == rank and is_none(recompute)


@builtin_rule(torch.nn.functional.interpolate)
def _interpolate(trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    """PyTorch's own entry takes no symbols: with them, the call is that of the op."""
    names = ("input", "size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias")
    given = {"mode": Constant("nearest"), **dict(zip(names, args)), **kwargs}
    x, mode, size, scale = (
        given.get(name, Constant(None)) for name in ("input", "mode", "size", "scale_factor")
    )
    antialias = given.get("antialias", Constant(False))
    if (
        isinstance(x, TensorValue)
        and isinstance(mode, Constant)
        and isinstance(antialias, Constant)
        and not antialias.value
    ):
        spec, rank = x.spec, len(x.spec.shape) - 2
        more = [given.get(name, Constant(None)) for name in names[4:6]]
        known_op = spec.is_symbolic and (mode.value, rank) in tensors.UPSAMPLING
        if known_op and _is_accepted(rank, size, scale, mode.value, *more):
            return trace.call_python(tensors.interpolate, [x, size, scale, mode, *more])
    return torch_call(trace, torch.nn.functional.interpolate, [*args], kwargs)


@builtin_rule(torch.Tensor.split, torch.split)
def _split(trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    """Into parts whose sizes data decides: what PyTorch checks of them is checked in the graph."""
    given = dict(zip(("tensor", "sizes", "dim"), args)) | {
        {"split_size_or_sections": "sizes", "split_size": "sizes", "self": "tensor"}.get(k, k): v
        for k, v in kwargs.items()
    }
    sizes = given.get("sizes")
    if isinstance(sizes, SequenceValue) and any(
        type(n) is SizeValue and is_unbacked(n.expr) for n in sizes.unpack(trace)
    ):
        return trace.call_python(tensors.split, [given["tensor"], sizes, given.get("dim", Constant(0))])
    target = "split" if isinstance(args[0] if args else None, TensorValue) else torch.split
    return torch_call(trace, target, [*args], kwargs)


def _of_tensors(method: Callable[..., Any], rule: Callable[[Trace, Value], Value]) -> Callable[..., Value]:
    """The rule for tensors; others go into the method, which refuses them."""

    def call(trace: Trace, tensor: Value) -> Value:
        if issubclass(tensor.python_type(), torch.Tensor):
            return rule(trace, tensor)
        return inline_function(trace, method, [tensor], {})

    return call


register_all(
    builtin_rule,
    (
        (
            (torch.Tensor.__iter__,),
            _of_tensors(torch.Tensor.__iter__, lambda trace, tensor: tensor.iterate(trace)),
        ),
        (
            (torch.Tensor.__len__,),
            _of_tensors(torch.Tensor.__len__, lambda trace, tensor: tensor.length(trace)),
        ),
        (
            (torch._shape_as_tensor,),
            lambda trace, tensor: _tensor(trace, tensor.getattr(trace, "shape"), dtype=Constant(torch.int64)),
        ),
        (
            (torch.Tensor,),
            lambda trace, /, *args, **kwargs: _typed_tensor(trace, torch.get_default_dtype(), args, kwargs),
        ),
    ),
)


builtin_rule(torch.Tensor.__hash__)(refusing("unsupported-call", "hash() of a tensor is its address"))


@builtin_rule(torch.as_tensor, torch.asarray)
def _as_tensor(trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    """A tensor as another type or on another device, or a new tensor of numbers."""
    data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
    if type(data) is ArrayValue and not data.scalar:  # shares the memory where nothing else is asked for
        data = torch_call(trace, "detach", [data.tensor(trace)], {})
    if isinstance(data, TensorValue):
        wanted = {
            name: v
            for name, v in kwargs.items()
            if name in ("dtype", "device") and v.as_constant() is not None
        }
        unsupported_if(
            len(args) > 1 or set(kwargs) - {"dtype", "device", "data", "obj"},
            "unsupported-call",
            "as_tensor() of a tensor with unusual arguments",
            cure="use to()",
        )
        return torch_call(trace, "to", [data], wanted) if wanted else data
    return _tensor(trace, *args, **kwargs)


@builtin_rule(torch.tensor)
def _tensor(trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    """A new tensor of numbers."""
    data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
    if type(data) is ArrayValue and len(args) == 1 and kwargs.keys() <= {"dtype", "device"}:
        copied = torch_call(trace, "clone", [data.tensor(trace)], {})
        return torch_call(trace, "to", [copied], kwargs) if kwargs else copied
    if data is None or _holds(data, lambda value: isinstance(value, TensorValue)):
        raise unsupported(
            "data-dependent",
            "a tensor of tensors reads their data",
            cure="use clone(), detach() or torch.stack",
        )
    named = {k: v for k, v in kwargs.items() if k not in ("data", "obj")}
    plain = trace.sizes.symbolic and len(args) < 2 and named.keys() <= {"dtype", "device"}
    if plain and _holds(data, _is_size) and (_holds(data, _is_read) or not _holds(data, _is_no_int)):
        return _of_sizes(trace, data, {"dtype": Constant(torch.int64)} | named)
    if plain and isinstance(data, ListValue | TupleValue) and not _holds(data, _is_numpy):
        if any(type(v) is FloatValue for v in data.items):
            return _of_floats(trace, data.items, named)
    if _holds(data, _is_numpy) and len(args) < 2 and named.get("dtype", Constant(None)).as_constant() is None:
        lower(data, False)  # refuses those that no plain number stands for; their dtypes are lost there
        named["dtype"] = Constant(torch.tensor(data.as_constant()).dtype)
    return torch_call(trace, torch.tensor, [data, *args[1:]], named)


def _of_floats(trace: Trace, items: list[Value], named: dict[str, Value]) -> Value:
    """A new tensor of numbers of which some differ between calls: those are inputs."""
    dtype = named.get("dtype", Constant(None)).as_constant() or torch.get_default_dtype()
    if dtype not in (torch.float32, torch.float64) or any(v.python_type() not in (float, int) for v in items):
        return torch_call(trace, torch.tensor, [ListValue(items)], named)
    each = [trace.call_builtin(torch.tensor, [v], named | {"dtype": Constant(dtype)}) for v in items]
    return torch_call(trace, torch.stack, [ListValue(each)], {})


@builtin_rule(torch.Tensor.new)
def _new(trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    """A new tensor of numbers, or of a size: which, only the class `torch.Size` says, and a graph holds tuples."""
    sized = len(args) == 2 and args[1].python_type() is torch.Size
    return torch_call(trace, "new_empty" if sized else "new", [*args], kwargs)


def _filled(target: Any, trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    """A new tensor full of a number that a tensor holds: made first and written then, so that the number is not read.
    Not where the cast loses something, which eager may refuse.
    """
    place = 2 if target == "new_full" else 1
    given = list(args) if len(args) > place else [*args, kwargs.get("fill_value", Constant(None))]
    fill = given[-1]
    if type(fill) is LateComparison and not kwargs.keys() & {"out", "requires_grad"}:
        found = _of_comparison(trace, target, [*args[:place]], kwargs, fill)
        if found is not None:
            return found
    number: Any = fill.tensor if type(fill) is HeldNumber else fill
    dtype = kwargs.get("dtype", Constant(None)).as_constant() if type(number) is TensorValue else None
    if type(number) is TensorValue and dtype is None:
        like = args[0] if isinstance(args[0], TensorValue) else None
        held = torch.zeros((), dtype=number.example.dtype, device="cpu").item()
        dtype = like.example.dtype if like else torch.tensor(held).dtype
    if (
        dtype is None
        or len(given) != place + 1
        or kwargs.keys() & {"out", "requires_grad"}
        or number.example.requires_grad
        or number.spec.shape
        or torch.promote_types(number.example.dtype, dtype) != dtype
    ):
        return torch_call(trace, target, [*args], kwargs)
    named = {k: v for k, v in kwargs.items() if k != "fill_value"} | {"dtype": Constant(dtype)}
    return torch_call(
        trace, "fill_", [torch_call(trace, target, [*given[:-1], Constant(0)], named), number], {}
    )


def _of_comparison(
    trace: Trace, target: Any, args: list[Value], kwargs: dict[str, Value], late: LateComparison
) -> Value | None:
    """A new tensor full of the answer of a comparison, which is an input of the program; None where it cannot be."""
    number = late.as_float()
    if number is None or not trace.sizes.symbolic or trace.sizes.in_body:
        return None
    like = args[0] if args else kwargs.get("input")
    usual = like.example.dtype if isinstance(like, TensorValue) else torch.bool
    dtype = kwargs.get("dtype", NONE).as_constant() or usual
    zeros = torch_call(trace, target, args, kwargs | {"fill_value": ZERO, "dtype": Constant(torch.float64)})
    found = tensor_call(trace, torch.ne, [zeros, number])
    return found if dtype is torch.bool else torch_call(trace, "to", [found, Constant(dtype)], {})


for _call, _target in (
    (torch.full, torch.full),
    (torch.full_like, torch.full_like),
    (torch.Tensor.new_full, "new_full"),
):
    builtin_rule(_call)(functools.partial(_filled, _target))


def _is_size(value: Value) -> bool:
    return type(value) is SizeValue


def _is_read(value: Value) -> bool:
    return type(value) is SizeValue and is_unbacked(value.expr)


def _is_no_int(value: Value) -> bool:
    return not isinstance(value, SequenceValue) and value.python_type() is not int


def _of_sizes(trace: Trace, value: Value, named: dict[str, Value]) -> Value:
    """A tensor of whole numbers of which some are sizes, or data decides them: they stay in the graph."""
    if isinstance(value, SequenceValue):
        parts = [_of_sizes(trace, item, named) for item in value.unpack(trace)]
        return torch_call(trace, torch.stack, [ListValue(parts)], {})
    unsupported_if(
        not isinstance(value, SizeValue) and value.python_type() is not int,
        "data-dependent",
        "numbers of data beside others become a tensor",
    )
    return torch_call(trace, torch.scalar_tensor, [value], named)


def _holds(value: Value, what: Callable[[Value], bool]) -> bool:
    items = getattr(value, "items", None)
    return what(value) or isinstance(items, list) and any(_holds(item, what) for item in items)


def _is_numpy(value: Value) -> bool:
    return isinstance(value, Constant) and value.python_type().__module__ == "numpy"


class TensorType(Builtin):
    """`torch.LongTensor` and its kin: called with numbers it makes a tensor of them, with sizes one without
    values.
    """

    __slots__ = ()

    def call(self, trace: Trace, args: list[Value], kwargs: dict[str, Value]) -> Value:
        unsupported_if(
            self.value.is_sparse or self.value.is_cuda,
            "unsupported-call",
            f"{self.value.__name__}() is called",
            cure="use torch.tensor or torch.empty",
        )
        return _typed_tensor(trace, self.value.dtype, args, kwargs)


wrap_held(TensorType, type(torch.LongTensor))


def _typed_tensor(trace: Trace, dtype: torch.dtype, args: Sequence[Value], kwargs: dict[str, Value]) -> Value:
    """The results of the constructors that precede `torch.tensor`, for a list of numbers or sizes."""
    is_shape = len(args) == 1 and args[0].python_type() is torch.Size
    are_sizes = args and all(isinstance(a, Constant) and type(a.value) is int for a in args)
    if not kwargs and (is_shape or are_sizes):
        return torch_call(trace, torch.empty, [*args], {"dtype": Constant(dtype)})
    unsupported_if(
        kwargs or len(args) != 1 or args[0].python_type() not in (list, tuple),
        "unsupported-call",
        "a constructor of tensors is called with anything but a list of numbers or sizes",
        cure="use torch.tensor or torch.empty",
    )
    return _tensor(trace, *args, dtype=Constant(dtype))
