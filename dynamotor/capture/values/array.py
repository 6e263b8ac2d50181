"""NumPy arrays in a trace: a tensor on the CPU that shares the array's memory, and the operators and indices that
NumPy and PyTorch agree on.

>>> value = ArrayValue.of(trace.wrap(source, tensor))     # x.numpy()
>>> value.binary(trace, operator.mul, Constant(2.0))      # a node on the tensor, an array again
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ...base.narrowing import checked
from ..breaks import Unsupported, unsupported
from ..source import Called, Const, Source
from .base import MISSING, Iterator, ResultEmitter, Trace, Value, wrap_typed
from .constant import Constant
from .containers import SequenceValue, TupleValue
from .known_data import known
from .size import SizeValue
from .slices import SliceValue
from .tensor import TensorValue, torch_call
from .user_object import UserObject

FLOATS = frozenset((torch.float32, torch.float64))
WHOLE = frozenset((torch.int32, torch.int64))
BOOLS = frozenset((torch.bool,))
_ARITHMETIC = FLOATS | WHOLE
ANY = _ARITHMETIC | BOOLS

# The functions of operators, and the dtypes for which both libraries agree.
_OPERATORS: dict[Callable[..., Any], frozenset[torch.dtype]] = {
    **dict.fromkeys((operator.add, operator.sub, operator.mul, operator.neg), _ARITHMETIC),
    **dict.fromkeys((operator.truediv, operator.pow, operator.matmul), FLOATS),
    **dict.fromkeys((operator.and_, operator.or_, operator.xor, operator.invert), BOOLS),
    **dict.fromkeys(
        (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne), _ARITHMETIC
    ),
}
_IN_PLACE = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}


_PLACES = (int, slice, type(None))


def shared(array: Any) -> torch.Tensor:
    """The tensor over an array's memory; TypeError (the source leads nowhere) where there is none."""
    if type(array) is not np.ndarray or not array.flags.writeable:
        raise TypeError("no array that may be written")
    try:
        return torch.from_numpy(array)
    except ValueError as error:
        raise TypeError(str(error)) from None


class ArrayValue(UserObject):
    """A NumPy array, from outside or over a tensor of the trace; `scalar`: NumPy gives the number itself."""

    __slots__ = ("_tensor", "scalar")

    def __init__(self, source: Source | None = None, obj: Any = MISSING) -> None:
        super().__init__(np.ndarray, source, obj)
        self._tensor: TensorValue | None = None
        self.scalar = False

    @staticmethod
    def of(tensor: Value, scalar: bool = False) -> ArrayValue:
        """The array over a tensor of the trace."""
        assert isinstance(tensor, TensorValue)
        array = ArrayValue()
        array._tensor, array.scalar = tensor, scalar
        if scalar:
            array.cls = type(torch.zeros((), dtype=tensor.example.dtype, device="cpu").numpy()[()])
        return array

    def tensor(self, trace: Trace) -> TensorValue:
        """The tensor over its memory."""
        if self._tensor is None:
            try:
                real = shared(self.obj)
            except TypeError as error:
                raise unsupported("unsupported-value", "an array that is no tensor", str(error)) from None
            found = trace.wrap(Called(self.source, shared), real)
            assert isinstance(found, TensorValue)
            self._tensor = found
        return self._tensor

    def reconstruct(self, emitter: ResultEmitter) -> str:
        tensor = checked(TensorValue, self._tensor)
        name = emitter.new_object(self, f"{emitter.emit(tensor)}.numpy(){'[()]' * self.scalar}")
        if self._is_read_only(emitter.trace):
            emitter.statement(f"{name}.setflags(write=False)")
        return name

    def describe(self) -> str:
        return "a NumPy array"

    # Attributes ---------------------------------------------------------------------------------------------
    def getattr(self, trace: Trace, name: str) -> Value:
        if name in ("shape", "ndim", "size", "T", "dtype"):
            tensor = self.tensor(trace)
            if name == "T":
                order = tuple(reversed(range(tensor.example.dim())))
                return ArrayValue.of(torch_call(trace, "permute", [tensor, Constant(order)], {}), self.scalar)
            if name == "dtype":
                return trace.make(torch.empty(0, dtype=tensor.example.dtype, device="cpu").numpy().dtype)
            return (
                torch_call(trace, "numel", [tensor], {})
                if name == "size"
                else self._sizes(trace, tensor, name)
            )
        if name in ("real", "imag"):
            return self._part(trace, name)
        if self.scalar and name == "item":
            return trace.bind(np.ndarray.item, name, self, np.ndarray)
        return super().getattr(trace, name)

    def _part(self, trace: Trace, name: str) -> Value:
        """A view of complex numbers; of others the array itself, and read-only zeros."""
        tensor = self.tensor(trace)
        if tensor.example.is_complex():
            return ArrayValue.of(torch_call(trace, getattr(torch, name), [tensor], {}), self.scalar)
        if name == "real":
            return self
        refuse_if(self.scalar or not tensor.example.is_contiguous(), "the imaginary part of such an array")
        zeros = ArrayValue.of(torch_call(trace, torch.zeros_like, [tensor], {}))
        trace.tensors.read_only.add(zeros.tensor(trace).memory)
        return zeros

    def _is_read_only(self, trace: Trace) -> bool:
        return self._tensor is not None and self._tensor.memory in trace.tensors.read_only

    def dtype(self, trace: Trace) -> torch.dtype:
        """Of its tensor."""
        return self.tensor(trace).example.dtype

    @staticmethod
    def _sizes(trace: Trace, tensor: TensorValue, name: str) -> Value:
        found = tensor.getattr(trace, name)
        return found if name == "ndim" else trace.make_tuple(found.unpack(trace))

    # Operators ----------------------------------------------------------------------------------------------
    def binary(
        self, trace: Trace, op: Callable[..., Any], other: Value, reflected: bool = False
    ) -> Value | None:
        plain = _IN_PLACE.get(op, op)
        operands: list[Value] = [other, self] if reflected else [self, other]
        found = on_known(trace, plain, operands) if plain is op or self.scalar else None
        if found is not None:
            return found
        refuse_if(plain not in _OPERATORS, f"{op.__name__} of {self.describe()}")
        if op in _IN_PLACE and not self.scalar:
            refuse_if(self._is_read_only(trace), "a write into what may not be written")
            refuse_if(
                type(other) is ArrayValue and other.dtype(trace) is not self.dtype(trace),
                "a write of another type",
            )
            compute(trace, op, [self, other], _OPERATORS[plain])
            return self
        return compute(trace, plain, operands, _OPERATORS[plain])

    def unary(self, trace: Trace, op: Callable[..., Any]) -> Value:
        found = on_known(trace, op, [self])
        if found is not None:
            return found
        refuse_if(op not in _OPERATORS, f"{op.__name__} of {self.describe()}")
        return compute(trace, op, [self], _OPERATORS[op])

    def truth(self, trace: Trace) -> bool:
        return trace.truth(self.tensor(trace))

    # Container protocol -------------------------------------------------------------------------------------
    def length(self, trace: Trace) -> Value:
        refuse_if(self.scalar or not self.tensor(trace).example.dim(), "len() of a number")
        return self.tensor(trace).length(trace)

    def getitem(self, trace: Trace, key: Value) -> Value:
        taken = on_known(trace, operator.getitem, [self, key])
        if taken is not None:
            return taken
        place, whole = self._place(trace, key)
        found = torch_call(trace, operator.getitem, [self.tensor(trace), place], {})
        assert isinstance(found, TensorValue)
        if whole and not found.example.dim():  # NumPy takes the number out
            return ArrayValue.of(torch_call(trace, "clone", [found], {}), True)
        return ArrayValue.of(found)

    def unpack(self, trace: Trace) -> list[Value]:
        n = self.length(trace)
        refuse_if(type(n) is not Constant, "iteration over a number of rows that changes")
        return [self.getitem(trace, Constant(k)) for k in range(n.as_constant())]

    def iterate(self, trace: Trace) -> Iterator:
        return TupleValue(self.unpack(trace)).iterate(trace)

    def setitem(self, trace: Trace, key: Value, value: Value) -> None:
        tensor = self.tensor(trace)
        place, _ = self._place(trace, key)
        operand = operands_of(trace, [self, value], ANY)[1]
        refuse_if(
            self.scalar or self._is_read_only(trace), "a write into a number, or what may not be written"
        )
        torch_call(trace, operator.setitem, [tensor, place, operand], {})

    def _place(self, trace: Trace, key: Value) -> tuple[Value, bool]:
        """An index for the tensor, and whether it is of plain numbers, slices and None."""
        if type(key) is ArrayValue and not key.scalar and not self.scalar:
            tensor = key.tensor(trace)
            if tensor.example.dtype in (torch.bool, torch.int64) and tensor.example.dim():
                return tensor, False
        parts = key.unpack(trace) if key.python_type() is tuple else [key]
        for part in parts:
            number = type(part) is SizeValue or type(part) is Constant and type(part.value) in _PLACES
            refuse_if(
                self.scalar or not (number or isinstance(part, SliceValue) or _is_ellipsis(part)),
                "an index",
                "it is no number, slice or array of positions",
            )
        return key, not any(map(_is_ellipsis, parts))


def _is_ellipsis(value: Value) -> bool:
    return isinstance(value, Constant) and value.value is Ellipsis


# Functions that write their arguments or ask for their memory: not for copies.
_WRITING = """copyto put place putmask put_along_axis fill_diagonal fill resize setfield setflags byteswap __setitem__
    __setstate__ shares_memory may_share_memory tofile dump"""
_NOT_ON_COPIES = frozenset(_WRITING.split())
_MOST = 1024  # numbers of an array that is made of plain ones


def on_known(
    trace: Trace, fn: Callable[..., Any], args: Sequence[Value], kwargs: dict[str, Value] | None = None
) -> Value | None:
    """What NumPy itself gives for arrays whose numbers the trace knows; None where it does not know them, or the
    result shares their memory."""
    name, named = getattr(fn, "__name__", ""), kwargs or {}
    arrays: list[Any] = []
    try:
        real = [_real(trace, value, arrays) for value in args]
        given = {key: _real(trace, value, arrays) for key, value in named.items()}
    except LookupError:
        return None
    if not arrays or name in _NOT_ON_COPIES or name.startswith("save") or "out" in given:
        return None
    try:
        with np.errstate(all="raise"):  # the reaction is a setting of NumPy's
            result = fn(*real, **given)
    except FloatingPointError:
        return None
    except Exception as error:
        raise trace.real_error(error) from None
    if isinstance(result, np.ndarray) and any(np.may_share_memory(result, array) for array in arrays):
        return None
    return made(trace, result) if isinstance(result, np.ndarray | np.generic | bool | int | float) else None


def _real(trace: Trace, value: Value, arrays: list[Any]) -> Any:
    """A value's object, a copy of an array; LookupError where it is not known."""
    if type(value) is ArrayValue:
        data = known(trace, value.tensor(trace)) if value._tensor is not None else None
        if data is None:
            raise LookupError
        arrays.append(data.numpy().copy())
        return arrays[-1][()] if value.scalar else arrays[-1]
    if isinstance(value, SequenceValue) and value.kind in (list, tuple):
        return value.kind([_real(trace, item, arrays) for item in value.items])
    if value.symbolic or not value.is_constant() or not _is_data(value.as_constant()):
        raise LookupError
    return value.as_constant()


def _is_data(obj: Any) -> bool:
    if isinstance(obj, tuple | list):
        return all(map(_is_data, obj))
    if isinstance(obj, type):
        return issubclass(obj, int | float | np.generic)
    return obj is None or isinstance(obj, int | float | str | slice | np.generic | np.dtype | type(Ellipsis))


def made(trace: Trace, result: Any) -> Value:
    """A new array, or number, of which the trace knows all."""
    if not isinstance(result, np.ndarray):
        return trace.fresh(result)
    dtype = torch.from_numpy(result).dtype if result.dtype.kind in "fib" else None
    refuse_if(dtype not in ANY or result.size > _MOST, f"an array of {result.dtype} is made")
    numbers = torch_call(trace, torch.tensor, [trace.fresh(result.tolist())], {"dtype": Constant(dtype)})
    return ArrayValue.of(torch_call(trace, "reshape", [numbers, Constant(result.shape)], {}))


def compute(
    trace: Trace,
    target: Any,
    operands: Sequence[Value],
    kinds: frozenset[torch.dtype],
    kwargs: dict[str, Value] | None = None,
) -> ArrayValue:
    """A torch function of arrays (and numbers), as an array."""
    given = operands_of(trace, operands, kinds)
    if kinds <= _ARITHMETIC:
        refuse_float_errors(trace)
    result = torch_call(trace, target, given, kwargs or {})
    if not isinstance(result, TensorValue):
        raise refused(f"{getattr(target, '__name__', target)} of arrays")
    return ArrayValue.of(result, not result.example.dim())


def operands_of(trace: Trace, values: Sequence[Value], kinds: frozenset[torch.dtype]) -> list[Value]:
    """Arrays as their tensors, and numbers that take the arrays' dtype in both libraries."""
    tensors = [v.tensor(trace) for v in values if type(v) is ArrayValue]
    dtypes = {t.example.dtype for t in tensors}
    mixed = len(dtypes) > 1 and not (dtypes <= FLOATS and all(t.example.dim() for t in tensors))
    refuse_if(mixed or not dtypes <= kinds, "a function of arrays", f"of {sorted(map(str, dtypes))}")
    dtype = max(dtypes, key=lambda dtype: dtype.itemsize)
    return [v.tensor(trace) if type(v) is ArrayValue else _number(v, dtype) for v in values]


def _number(value: Value, dtype: torch.dtype) -> Value:
    number = value.value if type(value) is Constant else None
    if isinstance(number, np.generic | np.ndarray) and torch.as_tensor(number).dtype is dtype:
        number = number.item()
    if type(number) is float and dtype in FLOATS or type(number) is bool and dtype is torch.bool:
        return Constant(number)
    if type(number) is int:
        limit = 1 << 24 if dtype in FLOATS else torch.iinfo(dtype).max if dtype in WHOLE else -1
        if abs(number) <= limit:
            return Constant(number)
    raise refused("a function of arrays", f"an operand is {value.describe()}")


def refuse_float_errors(trace: Trace, what: str = "a function of arrays") -> None:
    """NumPy may be told to raise where a result is no number (`np.seterr`)."""
    ask = np.geterr
    refuse_if(
        trace.reader.ask(Const(ask, "numpy.geterr"), ask, "the setting", _raises),
        what,
        "np.seterr asks for errors",
    )


def real_result(trace: Trace, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`fn(*args, **kwargs)` of real objects. The reaction to an overflow or the like of a number of NumPy's is
    a setting: a row holds it, and an error that it asks for breaks the graph.
    """
    if not _of_numpy(fn, args):
        return fn(*args, **kwargs)
    met: list[str] = []
    with np.errstate(all="call", call=lambda kind, flag: met.append(kind)):
        found = fn(*args, **kwargs)
    if not met:
        return found
    refuse_float_errors(trace, "arithmetic of numbers")
    return fn(*args, **kwargs)  # again, for the warning


_NUMBERS = np.generic, np.ndarray


def _of_numpy(fn: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether a call may compute with NumPy's numbers; runs no code of the user's."""
    bound = type(fn) in (types.BuiltinFunctionType, types.MethodWrapperType)
    owner = getattr(fn, "__self__", None) if bound else None
    return (
        type(fn) is np.ufunc
        or type(fn) is type
        and issubclass(fn, np.generic)
        or any(issubclass(type(arg), _NUMBERS) for arg in (owner, *args))
    )


def _raises(ask: Callable[[], dict[str, str]]) -> bool:
    return not {"ignore", "warn"} >= set(ask().values())


def refuse_if(bad: Any, what: str, cause: str = "its rules may differ from PyTorch's") -> None:
    """Leave it to NumPy where that is so."""
    if bad:
        raise refused(what, cause)


def refused(what: str, cause: str = "its rules may differ from PyTorch's") -> Unsupported:
    """The functions left to NumPy."""
    return unsupported("unsupported-call", f"NumPy: {what}", cause, cure="use torch's functions on tensors")


wrap_typed(lambda trace, source, obj: ArrayValue(source, obj), np.ndarray)
