"""NumPy in the traced program: on plain numbers and shapes it runs at trace time, functions of arrays are those of
PyTorch where the two agree (values/array.py), and others break the graph.

>>> np.sqrt(2.0), np.prod(x.shape)              # constants of the trace
>>> torch.from_numpy(np.sqrt(x.numpy()))        # a node
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..base.registry import register_all
from .breaks import Unsupported, unsupported
from .guards import BYTES, TypeIs
from .source import Source
from .values.array import (
    ANY,
    BOOLS,
    FLOATS,
    WHOLE,
    ArrayValue,
    compute,
    made,
    on_known,
    operands_of,
    refuse_if,
    refused,
)
from .values.base import CallRule, Trace, Value, builtin_rule, call_finder, run_rule, wrap_held, wrap_rule
from .values.constant import PURE_TYPES, Constant, is_none
from .values.containers import SequenceValue, TupleValue
from .values.klass import Builtin
from .values.number import KINDS, FloatValue
from .values.tensor import TensorValue, torch_call

_PLAIN = (int, float, complex, bool, str, type(None))
_SCALARS: tuple[type, ...] = tuple({np.dtype(code).type for code in "?bhilqBHILQefdFD"})
_CALLABLES: tuple[type, ...] = (np.ufunc, type(np.prod))
PURE_TYPES.update(type(np.dtype(scalar)) for scalar in _SCALARS)
PURE_TYPES.update(base for scalar in _SCALARS for base in scalar.__mro__ if base is not object)


@wrap_rule(*_SCALARS)
def _wrap_scalar(trace: Trace, source: Source, obj: Any) -> Value:
    trace.reader.guard(TypeIs(source, type(obj)))
    if type(obj) in KINDS and trace.sizes.takes_float(source):
        return FloatValue(trace, source, obj)
    trace.reader.ask(source, obj, *BYTES)
    return Constant(obj, source)


wrap_held(Builtin, *_CALLABLES)
wrap_held(Constant, *{type(np.dtype(scalar)) for scalar in _SCALARS})


def _is_plain(obj: Any) -> bool:
    return (
        all(map(_is_plain, obj))
        if isinstance(obj, tuple | list)
        else isinstance(obj, (*_PLAIN, *_SCALARS, np.dtype))
        or obj in _SCALARS
        or isinstance(obj, type)
        and obj in _PLAIN
    )


@call_finder
def _find_numpy(fn: Callable[..., Any]) -> CallRule | None:
    known = isinstance(fn, type) and fn in _SCALARS or any(fn is maker for maker in _MAKERS)
    if type(fn) not in _CALLABLES and not known:
        return None

    def rule(trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
        values = [*args, *kwargs.values()]
        if any(type(v) is ArrayValue for value in values for v in (value, *_items(value))):
            return _of_arrays(trace, fn, [*args], kwargs)
        plain = all(v.is_constant() for v in values) and _is_plain([v.as_constant() for v in values])
        if fn.__name__.startswith("save") or not plain:
            raise _refused(fn, "only plain numbers are computed at trace time")
        real, named = [a.as_constant() for a in args], {name: v.as_constant() for name, v in kwargs.items()}
        result = trace.real(fn, *real, **named)
        if isinstance(result, np.ndarray):
            return made(trace, result)
        if not _is_plain(result):
            raise _refused(fn, f"it gives a {type(result).__name__}")
        return trace.fresh(result)

    return rule


def _refused(fn: Callable[..., Any], cause: str) -> Unsupported:
    return unsupported(
        "unsupported-call", f"numpy.{fn.__name__} is called", cause, cure="use torch's function"
    )


def _items(value: Value) -> list[Value]:
    return value.items if isinstance(value, SequenceValue) else []


# Functions of arrays ----------------------------------------------------------------------------------------
# NumPy's name -> PyTorch's function, by the dtypes of which both give the same.
_NUMBERS = FLOATS | WHOLE
_SAME_NAME = """sqrt exp exp2 expm1 log log2 log10 log1p sin cos tan sinh cosh tanh floor ceil trunc square reciprocal
    isnan isinf isfinite arctan2 hypot maximum minimum"""
_LOGICAL = "logical_and logical_or logical_xor logical_not"
_INVERSE = "sin cos tan sinh cosh tanh"
_UFUNCS: dict[str, tuple[Any, frozenset[torch.dtype]]] = {
    "add": (operator.add, _NUMBERS),
    "subtract": (operator.sub, _NUMBERS),
    "multiply": (operator.mul, _NUMBERS),
    "negative": (operator.neg, _NUMBERS),
    "absolute": (torch.abs, _NUMBERS),
    "divide": (operator.truediv, FLOATS),
    "power": (operator.pow, FLOATS),
    "matmul": (operator.matmul, FLOATS),
    "rint": (torch.round, FLOATS),
    "less": (operator.lt, _NUMBERS),
    "less_equal": (operator.le, _NUMBERS),
    "greater": (operator.gt, _NUMBERS),
    "greater_equal": (operator.ge, _NUMBERS),
    "equal": (operator.eq, _NUMBERS),
    "not_equal": (operator.ne, _NUMBERS),
    **{name: (getattr(torch, name), FLOATS) for name in _SAME_NAME.split()},
    **{name: (getattr(torch, name), BOOLS) for name in _LOGICAL.split()},
    **{f"arc{name}": (getattr(torch, f"a{name}"), FLOATS) for name in _INVERSE.split()},
}
_MAKERS = np.zeros, np.ones, np.full, np.eye, np.arange, np.linspace, np.array, np.asarray


def _of_arrays(trace: Trace, fn: Callable[..., Any], args: list[Value], kwargs: dict[str, Value]) -> Value:
    found = on_known(trace, fn, args, kwargs)
    if found is not None:
        return found
    if isinstance(fn, np.ufunc) and fn.__name__ in _UFUNCS and len(args) == fn.nin and not kwargs:
        target, kinds = _UFUNCS[fn.__name__]
        if target in _BOTH_TENSORS:
            args = [ArrayValue.of(a) for a in _tensors_of(trace, args, kinds)]
        return compute(trace, target, args, kinds)
    rule = _FUNCTIONS.get(fn)
    if rule is None:
        raise refused(f"{fn.__name__} of arrays", "there is no rule for it")
    return run_rule(trace, fn, rule, args, kwargs)


def _tensors_of(trace: Trace, args: list[Value], kinds: frozenset[torch.dtype]) -> list[Value]:
    """Operands with tensors in the place of numbers."""
    given = operands_of(trace, args, kinds)
    dtype = Constant(next(a.example.dtype for a in given if isinstance(a, TensorValue)))
    return [
        a
        if isinstance(a, TensorValue)
        else torch_call(trace, torch.full, [Constant(()), a], {"dtype": dtype})
        for a in given
    ]


_BOTH_TENSORS = frozenset((torch.maximum, torch.minimum, torch.arctan2, torch.hypot))
_FUNCTIONS: dict[Any, CallRule] = {}


def _array_function(name: str, *parameters: str) -> Callable[[Callable[..., Value]], Callable[..., Value]]:
    """Register the rule of `numpy.<name>` and of the method of that name; arguments under other names
    than `parameters` is left to NumPy. Rules get Values, None where nothing is given."""

    def add(rule: Callable[..., Value]) -> Callable[..., Value]:
        def call(trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
            found = on_known(trace, getattr(np, name), [*args], kwargs)
            if found is not None:
                return found
            if parameters == ("axes",) and len(args) > 2:
                args = args[0], trace.make_tuple([*args[1:]])
            given = dict(zip(("a", *parameters), args))
            refuse_if(
                len(args) > len(parameters) + 1
                or kwargs.keys() - set(parameters)
                or given.keys() & kwargs.keys(),
                f"{name} with unusual arguments",
            )
            given |= {key: value for key, value in kwargs.items() if not is_none(value)}
            return rule(trace, given["a"], *[given.get(key) for key in parameters])

        _FUNCTIONS[getattr(np, name)] = call
        method = vars(np.ndarray).get(name)
        if method is not None:
            builtin_rule(method)(call)
        return call

    return add


def _row_major(trace: Trace, a: Value, name: str) -> None:
    """Refuse an array in another memory order: NumPy lays the result out by it in an order of its own, or copies
    where a tensor's view would do.
    """
    if type(a) is not ArrayValue or not a.tensor(trace).example.is_contiguous():
        raise refused(f"{name} of an array that is not row-major")


def _reduce(
    name: str,
    target: Any,
    kinds: frozenset[torch.dtype],
    trace: Trace,
    a: Value,
    axis: Value | None,
    *rest: Value | None,
) -> Value:
    if type(a) is not ArrayValue or a.scalar:
        raise refused(f"{name} of {a.describe()}")
    example = a.tensor(trace).example
    refuse_if(
        any(type(n) is not int or not n for n in example.shape),
        f"{name} of no numbers, or of a number of them that changes",
    )
    keep = rest[-1] is not None and rest[-1].as_constant() is True
    named = {} if len(rest) == 1 else {"correction": rest[0] or Constant(0)}
    if axis is not None and not is_none(axis):
        refuse_if(not example.dim(), f"{name} along an axis of a number")
        _row_major(trace, a, name)
        named |= {"dim": axis, "keepdim": Constant(keep)}
    elif keep:
        raise refused(f"{name} with keepdims of all axes")
    elif named:
        named["dim"] = Constant(None)
    return compute(trace, target, [a], kinds, named)


_target: Any
for _name, _target, _kinds, *_more in (
    ("sum", torch.sum, ANY),
    ("mean", torch.mean, FLOATS),
    ("max", torch.amax, _NUMBERS),
    ("min", torch.amin, _NUMBERS),
    ("prod", torch.prod, FLOATS),
    ("any", torch.any, BOOLS),
    ("all", torch.all, BOOLS),
    ("std", torch.std, FLOATS, "ddof"),
    ("var", torch.var, FLOATS, "ddof"),
):
    _array_function(_name, "axis", *_more, "keepdims")(functools.partial(_reduce, _name, _target, _kinds))


def _viewed(trace: Trace, a: Value, method: str, *args: Value) -> Value:
    if type(a) is not ArrayValue or a.scalar:
        raise refused(f"{method} of {a.describe()}")
    return ArrayValue.of(torch_call(trace, method, [a.tensor(trace), *args], {}))


@_array_function("expand_dims", "axis")
def _expand_dims(trace: Trace, a: Value, axis: Value | None) -> Value:
    if axis is None or type(axis.as_constant()) is not int:
        raise refused("expand_dims along several axes")
    return _viewed(trace, a, "unsqueeze", axis)


@_array_function("swapaxes", "axis1", "axis2")
def _swapaxes(trace: Trace, a: Value, first: Value | None, second: Value | None) -> Value:
    if first is None or second is None:
        raise refused("swapaxes with unusual arguments")
    return _viewed(trace, a, "transpose", first, second)


@builtin_rule(np.ndarray.flatten)
def _flatten(trace: Trace, array: Value) -> Value:
    return _viewed(trace, _viewed(trace, array, "reshape", Constant(-1)), "clone")


def _along(
    name: str, target: Any, kinds: frozenset[torch.dtype], trace: Trace, a: Value, axis: Value | None
) -> Value:
    _row_major(trace, a, name)
    if axis is None:
        raise refused(f"{name} of all numbers")
    return compute(trace, target, [a], kinds, {"dim": axis})


for _name, _target, _kinds in (
    ("argmax", torch.argmax, _NUMBERS),
    ("argmin", torch.argmin, _NUMBERS),
    ("cumsum", torch.cumsum, FLOATS),
    ("cumprod", torch.cumprod, FLOATS),
):
    _array_function(_name, "axis")(functools.partial(_along, _name, _target, _kinds))


def _filled(name: str, target: Any, trace: Trace, a: Value) -> Value:
    _row_major(trace, a, name)
    return compute(trace, target, [a], ANY)


for _target in (torch.zeros_like, torch.ones_like):
    _array_function(_target.__name__)(functools.partial(_filled, _target.__name__, _target))


register_all(
    _array_function,
    (
        (("squeeze",), lambda trace, a: _viewed(trace, a, "squeeze")),
        (
            ("transpose", "axes"),
            lambda trace, a, axes: (
                a.getattr(trace, "T") if axes is None else _viewed(trace, a, "permute", axes)
            ),
        ),
        (("copy",), lambda trace, a: _viewed(trace, _viewed(trace, a, "clone"), "contiguous")),
        (  # a copy where it has holes
            ("ravel",),
            lambda trace, a: _viewed(trace, _viewed(trace, a, "reshape", Constant(-1)), "contiguous"),
        ),
    ),
)


@_array_function("where", "x", "y")
def _where(trace: Trace, condition: Value, x: Value | None, y: Value | None) -> Value:
    if x is None or y is None or type(condition) is not ArrayValue:
        raise refused("where of a condition alone")
    asked = operands_of(trace, [condition], BOOLS)
    result = torch_call(trace, torch.where, [*asked, *operands_of(trace, [x, y], _NUMBERS)], {})
    assert isinstance(result, TensorValue)
    return ArrayValue.of(result)


@_array_function("clip", "a_min", "a_max")
def _clip(trace: Trace, a: Value, low: Value | None, high: Value | None) -> Value:
    if low is None or high is None or type(low) is not Constant or type(high) is not Constant:
        raise refused("clip by anything but two numbers")
    return compute(trace, torch.clamp, [a, low, high], FLOATS)


def _joined(name: str, target: Any, trace: Trace, arrays: Value, axis: Value | None) -> Value:
    items = arrays.items if isinstance(arrays, SequenceValue) else []
    parts = [a.tensor(trace) for a in items if type(a) is ArrayValue]
    refuse_if(not items or len(parts) != len(items), f"{name} of anything but a list of arrays")
    for array in items:
        _row_major(trace, array, name)
    operands_of(trace, items, ANY)  # of one dtype
    result = torch_call(trace, target, [TupleValue(parts), axis or Constant(0)], {})
    assert isinstance(result, TensorValue)
    return ArrayValue.of(result)


_copied = _FUNCTIONS[np.copy]  # the method's, whose result is row-major


def _copied_in_order(trace: Trace, a: Value, /, *args: Value, **kwargs: Value) -> Value:
    """`numpy.copy` and `numpy.array` keep the order of memory."""
    if type(a) is ArrayValue:
        _row_major(trace, a, "copy")
    return _copied(trace, a, *args, **kwargs)


_FUNCTIONS[np.copy] = _copied_in_order
for _name, _target in (("concatenate", torch.cat), ("stack", torch.stack)):
    _array_function(_name, "axis")(functools.partial(_joined, _name, _target))
_FUNCTIONS[np.asarray] = lambda trace, a, /, *args, **kwargs: (
    a
    if type(a) is ArrayValue and not args and not kwargs
    else _FUNCTIONS[np.array](trace, a, *args, **kwargs)
)
_FUNCTIONS[np.array] = lambda trace, a, /, *args, **kwargs: _FUNCTIONS[
    np.copy if type(a) is ArrayValue else np.stack
](trace, a, *args, **kwargs)


def _describing(kind: Any) -> None:
    """What describes a type is an object of NumPy's that stays as it is."""

    @builtin_rule(kind)
    def rule(trace: Trace, obj: Value) -> Value:
        known = obj.is_constant() and _is_plain(obj.as_constant())
        refuse_if(not known, f"{kind.__name__} of an argument that is not plain")
        return trace.real_call(kind, obj.as_constant())


for _kind in (np.dtype, np.iinfo, np.finfo):
    _describing(_kind)


def _known_method(fn: Callable[..., Any], trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    writes = fn.__name__ in ("sort", "partition") or fn.__name__.startswith("__i")
    known = bool(args) and type(args[0]) is ArrayValue and not writes
    found = on_known(trace, fn, [*args], kwargs) if known else None
    if found is None:
        raise refused(f"ndarray.{fn.__name__}()", "there is no rule for it")
    return found


@call_finder
def _find_method(fn: Callable[..., Any]) -> CallRule | None:
    """Methods of arrays without a rule of their own: on numbers that the trace knows, unless they write them."""
    is_of_arrays = isinstance(fn, _METHODS) and fn.__objclass__ is np.ndarray
    return functools.partial(_known_method, fn) if is_of_arrays else None


_METHODS = types.MethodDescriptorType, types.WrapperDescriptorType


# Between arrays and tensors ---------------------------------------------------------------------------------
@builtin_rule(torch.Tensor.numpy)
def _numpy(trace: Trace, tensor: Value) -> Value:
    example = tensor.example if type(tensor) is TensorValue else None
    if example is None or example.requires_grad or example.device.type != "cpu" or example.dtype not in ANY:
        raise unsupported(
            "data-dependent", "Tensor.numpy is called", "it hands the tensor's data to Python",
            "call it outside the compiled function",
        )  # fmt: skip
    return ArrayValue.of(tensor.getattr(trace, "data"))  # NumPy's writes count as no version of the tensor


@builtin_rule(torch.from_numpy)
def _from_numpy(trace: Trace, array: Value) -> Value:
    if type(array) is not ArrayValue or array.scalar:
        raise unsupported("unsupported-call", "torch.from_numpy() of anything but an array")
    return torch_call(trace, "detach", [array.tensor(trace)], {})


def _in_python(name: str, trace: Trace, array: Value) -> Value:
    """Numbers of an array as Python's."""
    if type(array) is not ArrayValue:
        raise refused(f"{name}() with unusual arguments")
    return trace.call_method(array.tensor(trace), name, [])


for _name in ("item", "tolist"):
    builtin_rule(getattr(np.ndarray, _name))(functools.partial(_in_python, _name))


@builtin_rule(np.ndarray.reshape, np.reshape)
def _reshape(trace: Trace, array: Value, *shape: Value) -> Value:
    refuse_if(not shape, "reshape with unusual arguments")
    return _viewed(trace, array, "reshape", *shape)


@builtin_rule(np.ndarray.astype)
def _astype(trace: Trace, array: Value, dtype: Value) -> Value:
    if type(array) is not ArrayValue or array.scalar:
        raise refused("astype with unusual arguments")
    try:
        wanted = torch.from_numpy(np.empty(0, dtype=dtype.as_constant())).dtype
    except TypeError:
        raise refused("astype to a type that tensors lack") from None
    had = array.tensor(trace).example.dtype
    refuse_if(wanted not in ANY or (had in FLOATS and wanted not in FLOATS), f"astype from {had} to {wanted}")
    _row_major(trace, array, "astype")
    to = torch_call(trace, "to", [array.tensor(trace), Constant(wanted)], {"copy": Constant(True)})
    return ArrayValue.of(to)
