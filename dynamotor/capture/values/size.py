"""A size in a trace: an integer expression over symbols, and `torch.Size`s, calls and operators that hold
one.

A `SizeValue` is a `Constant` whose `value` specialises: code that knows nothing of symbols reads a number and
is right for this number alone (the guard says so). Rules that avoid such a guard are here.

>>> trace.binary(operator.floordiv, SizeValue(trace, n), Constant(2))      # floordiv(s0, 2), no guard
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...base.narrowing import checked
from ...base.registry import register_all
from ...graph.data_sizes import holds
from ...graph.nested_size import NestedSize
from ...graph.sizes import Size, hint, is_unbacked, maximum, minimum
from ...graph.sym_int import COMPARISONS, Condition, comparison, from_torch, to_torch
from ..guards import ConstEquals, Length, TypeIs
from ..source import SeqItem, Source
from .base import ResultEmitter, Trace, Value, find_rule, run_rule, size_rules, wrap_rule
from .constant import Constant, Number
from .containers import SequenceValue, TupleValue
from .jagged_size import NestedSizeValue
from .number import FUNCTIONS, FloatValue, Outside, together
from .operators import COMPARE, INPLACE

_EXACT = frozenset(
    (
        operator.add,
        operator.sub,
        operator.mul,
        operator.floordiv,
        operator.mod,
        operator.pow,
        divmod,
        *COMPARE,
    )
)


class SizeValue(Number):
    """An int that is known as an expression."""

    __slots__ = ("trace", "expr")
    kind = int

    def __init__(self, trace: Trace, expr: Size) -> None:
        self.source, self.trace, self.expr = None, trace, expr

    @property
    def value(self) -> int:
        return int(self.expr)

    def binary(
        self, trace: Trace, op: Callable[..., Any], other: Value, reflected: bool = False
    ) -> Value | None:
        as_asked, op = op, INPLACE.get(op, op)  # an error names the former
        number = number_of(other)
        if not other.is_constant():
            return None
        if op in (operator.truediv, operator.mul) and type(other) is Constant:
            quotient = _quotient(trace, op, self.expr, other.value, reflected)
            if quotient is not None:
                return quotient
        if number is None or op not in _EXACT:
            found = _computed(self, op, other, reflected)
            return super().binary(trace, as_asked, other, reflected) if found is None else found
        a, b = (number, self.expr) if reflected else (self.expr, number)
        if (
            op in (operator.floordiv, operator.mod, divmod)
            and b == 0
            or op is operator.pow
            and type(b) is Size
        ):
            return super().binary(trace, as_asked, other, reflected)
        if op.__name__ in COMPARISONS:
            return condition_value(trace, comparison(op.__name__, self.expr.env, a, b))
        result = op(a, b)
        return (
            TupleValue([size_value(trace, r) for r in result]) if op is divmod else size_value(trace, result)
        )

    def unary(self, trace: Trace, op: Callable[..., Any]) -> Value:
        return (
            size_value(trace, op(self.expr))
            if op in (operator.neg, operator.pos)
            else super().unary(trace, op)
        )

    def truth(self, trace: Trace) -> bool:
        return bool(self.expr)

    def reconstruct(self, emitter: ResultEmitter) -> str:
        return emitter.size(self.expr)

    def lowered(self, node: bool) -> Any:
        """A torch call's argument: a node of the graph, or a `torch.SymInt` for the trial run; a number where
        it must be one.
        """
        sizes = self.trace.sizes
        used = sizes.used(self.expr)
        return sizes.node(self.trace.graph, used) if node else to_torch(used)

    def from_outside(self) -> FloatValue | None:
        return _from_outside(self.trace, self.expr, lambda n: n, str(self.expr))

    def describe(self) -> str:
        return f"the size {self.expr}"


def _from_outside(trace: Trace, expr: Size, step: Callable[[int], Any], text: str) -> FloatValue | None:
    """The result of a function of a size as a `FloatValue`; None where the size is no expression of sizes from
    outside."""
    sources, symbols = trace.sizes.sources, sorted(expr.symbols, key=lambda symbol: symbol.order)
    if not symbols or not sources.keys() >= set(symbols):
        return None
    outside = tuple(
        [Outside(sources[s], s.hint, functools.partial(int, Size({(s,): 1}, expr.env))) for s in symbols]
    )
    if len(symbols) == 1:
        return together(trace, outside, lambda n: step(expr.value({symbols[0]: n})), f"size {text}")
    return together(trace, outside, lambda v: step(expr.value(dict(zip(symbols, v)))), f"size {text}")


def _computed(mine: Number, op: Callable[..., Any], other: Value, reflected: bool) -> Value | None:
    """The result of an operator that gives a float of a size, computed at each call."""
    found = mine.from_outside()
    return None if found is None else found.computed(op, other, reflected)


class QuotientValue(Number):
    """A float that is a size over a positive integer: its roundings are sizes."""

    __slots__ = ("trace", "over", "by")
    kind = float

    def __init__(self, trace: Trace, over: Size, by: int) -> None:
        self.source, self.trace, self.over, self.by = None, trace, over, by

    @property
    def value(self) -> float:
        return int(self.over) / self.by

    def binary(
        self, trace: Trace, op: Callable[..., Any], other: Value, reflected: bool = False
    ) -> Value | None:
        if not other.is_constant():
            return None
        found = _computed(self, op, other, reflected)
        return super().binary(trace, op, other, reflected) if found is None else found

    def from_outside(self) -> FloatValue | None:
        by = self.by
        return _from_outside(self.trace, self.over, lambda n: n / by, f"{self.over} / {by}")

    def rounded(self, trace: Trace, fn: Callable[..., Any]) -> Value | None:
        """`fn(self)`, where that is a size for all values."""
        if fn is math.ceil:
            return size_value(trace, -((-self.over) // self.by))
        return size_value(trace, self.over // self.by) if fn is math.floor or self.over >= 0 else None

    def reconstruct(self, emitter: ResultEmitter) -> str:
        return f"({emitter.size(self.over)} / {self.by})"

    def describe(self) -> str:
        return f"the float {self.over} / {self.by}"


_EXACT_FLOATS = 1 << 53  # integers up to here are floats, and their quotients round as they do


def _quotient(
    trace: Trace, op: Callable[..., Any], expr: Size, number: Any, reflected: bool
) -> QuotientValue | None:
    """`expr / number`, or `expr * number` of half, a quarter and the like, as a quotient."""
    if op is operator.mul:
        by = int(1 / number) if type(number) is float and 2**-10 <= number < 1 else 0
        if not by or 1 / by != number or by & (by - 1):
            return None
    elif type(number) is int and 0 < number < _EXACT_FLOATS and not reflected:
        by = number
    else:
        return None
    exact = not is_unbacked(expr) and expr <= _EXACT_FLOATS and expr >= -_EXACT_FLOATS
    return QuotientValue(trace, expr, by) if exact else None


class ConditionValue(Number):
    """A comparison of sizes that only data decides: whoever needs the answer breaks the graph."""

    __slots__ = ("trace", "condition")
    kind = bool

    def __init__(self, trace: Trace, condition: Condition) -> None:
        self.source, self.trace, self.condition = None, trace, condition

    @property
    def value(self) -> bool:
        return self.condition.ask()

    def reconstruct(self, emitter: ResultEmitter) -> str:
        asked = self.condition
        assert type(asked.expr) is Size
        return f"(({emitter.size(asked.expr)} {asked.kind} 0) is {not asked.negated})"

    def describe(self) -> str:
        return f"whether {self.condition}"


class LateComparison(ConditionValue):
    """A comparison of sizes from outside: a guard where the program looks at it, computed at each call where it is
    handed on."""

    __slots__ = ()

    @property
    def now(self) -> bool:
        """The answer at this call, without a guard."""
        return self._answer(hint(self.condition.expr))

    def _answer(self, number: int) -> bool:
        asked = self.condition
        return (number >= 0 if asked.kind == ">=" else number == 0) is not asked.negated

    def as_float(self) -> FloatValue | None:
        """1.0 or 0.0, computed at each call."""
        expr, text = checked(Size, self.condition.expr), f"truth of {self.condition}"
        return _from_outside(self.trace, expr, lambda n: float(self._answer(n)), text)

    def logical_not(self) -> LateComparison:
        """Whether it is false."""
        asked = self.condition
        return LateComparison(self.trace, Condition(asked.kind, asked.expr, not asked.negated))


def condition_value(trace: Trace, condition: Condition) -> Value:
    """The value of a comparison: the answer where it is provable."""
    if condition.sure(True) or condition.sure(False):
        return Constant(condition.sure(True))
    return (ConditionValue if is_unbacked(condition.expr) else LateComparison)(trace, condition)


class SizesValue(TupleValue):
    """A `torch.Size` of which some sizes are expressions."""

    __slots__ = ()

    def python_type(self) -> type:
        return torch.Size

    def as_constant(self) -> Any:
        return torch.Size(super().as_constant())

    def binary(
        self, trace: Trace, op: Callable[..., Any], other: Value, reflected: bool = False
    ) -> Value | None:
        if not issubclass(other.python_type(), tuple):
            result = TupleValue(self.items).binary(trace, op, other, reflected)
        else:
            pair = TupleValue(self.items), TupleValue(other.unpack(trace))
            left, right = reversed(pair) if reflected else pair
            result = left.binary(trace, op, right)
        return SizesValue(result.items) if type(result) is TupleValue else result

    def reconstruct(self, emitter: ResultEmitter) -> str:
        return f"{emitter.constant(torch.Size)}({super().reconstruct(emitter)})"


@wrap_rule(torch.Size)
def _wrap_sizes(trace: Trace, source: Source, obj: torch.Size) -> Value:
    """A constant, until one of its sizes has differed between calls: a shape is handed on behind a graph break."""
    items = [SeqItem(source, i) for i in range(len(obj))]
    if not any(map(trace.sizes.policy.varies, items)):
        trace.reader.guard(ConstEquals(source, obj))
        return Constant(obj, source)
    trace.reader.guard(TypeIs(source, torch.Size))
    trace.reader.guard(Length(source, len(obj)))
    return SizesValue(map(trace.wrap, items, obj), source, obj, trace)


def size_value(trace: Trace, number: Any) -> Value:
    """The value of an int or bool, of an expression of one, or of a jagged tensor's size."""
    if type(number) is NestedSize:
        return NestedSizeValue(trace, number, *trace.tensors.nested[number.offsets])
    return SizeValue(trace, number) if type(number) is Size else Constant(number)


def size_result(trace: Trace, result: Any) -> Value | None:
    """The value of a result of PyTorch that holds a symbolic size; None for other results."""
    kind = type(result)
    if kind in (torch.SymInt, torch.SymBool, torch.SymFloat):
        return size_value(trace, from_torch(result))
    if kind in (torch.Size, tuple) and any(type(n) is torch.SymInt for n in result):
        return (SizesValue if kind is torch.Size else TupleValue)(
            [size_value(trace, from_torch(n)) for n in result]
        )
    return None


def number_of(value: Value) -> Size | int | None:
    """The int or expression of a value, None for anything else."""
    if type(value) is SizeValue:
        return value.expr
    if type(value) in (FloatValue, QuotientValue):
        return None
    return int(value.value) if isinstance(value, Constant) and isinstance(value.value, int) else None


_NUMBERS = (SizeValue, QuotientValue, FloatValue)


def symbolic_binary(trace: Trace, op: Callable[..., Any], left: Value, right: Value) -> Value | None:
    """An operator of which one side is known and the other symbolic; None: go on in the ordinary way."""
    if isinstance(left, SequenceValue) and isinstance(right, Constant) and type(right.value) is torch.Size:
        return (
            SizesValue(right.unpack(trace)).binary(trace, op, left, True)
            if issubclass(left.python_type(), tuple)
            else None
        )
    if type(left) in _NUMBERS or not isinstance(left, Constant):
        return None
    if type(right) in _NUMBERS:
        return right.binary(trace, op, left, True)
    if isinstance(left.value, tuple) and isinstance(right, SequenceValue):
        kind = SizesValue if type(left.value) is torch.Size else TupleValue
        return kind([trace.make(n) for n in left.value]).binary(trace, op, right)
    return None


# Calls of known functions with an expression among the arguments; a rule gives None to go on with the
# ordinary one.
SizeRule = Callable[..., Value | None]


def size_rule(*functions: Any) -> Callable[[Any], Any]:
    """Register the rule of functions."""

    def add(rule: SizeRule) -> Any:
        for fn in functions:
            size_rules[fn] = functools.partial(_before, fn, rule)
        return rule

    return add


def _before(fn: Callable[..., Any], rule: SizeRule, trace: Trace, /, *args: Value, **kwargs: Value) -> Value:
    found = None if kwargs else run_rule(trace, fn, rule, args, kwargs)
    if found is not None:
        return found
    ordinary = find_rule(fn)
    return (
        trace.real_call(fn, *[a.as_constant() for a in args])
        if ordinary is None
        else run_rule(trace, fn, ordinary, args, kwargs)
    )


register_all(
    size_rule,
    (
        (
            (callable,),
            lambda trace, obj: Constant(False) if isinstance(obj, Number) else None,
        ),
        (
            (operator.index, torch.sym_int),
            lambda trace, number: number if type(number) is SizeValue else None,
        ),
        (
            (abs,),
            lambda trace, number: (
                size_value(trace, abs(number.expr))
                if type(number) is SizeValue
                else number.apply(abs)
                if type(number) is FloatValue
                else None
            ),
        ),
        (
            (torch.Size,),
            lambda trace, items: (
                SizesValue(items.unpack(trace)) if isinstance(items, SequenceValue) else None
            ),
        ),
    ),
)


@size_rule(round)
def _round(trace: Trace, x: Value, digits: Value | None = None) -> Value | None:
    if digits is not None:
        return x.rounded(digits) if type(x) is FloatValue else None
    return x if type(x) is SizeValue else None


@size_rule(isinstance)
def _isinstance(trace: Trace, obj: Value, kinds: Value) -> Value | None:
    like = obj.python_type()() if isinstance(obj, Number) else None
    return (
        Constant(isinstance(like, kinds.as_constant())) if like is not None and kinds.is_constant() else None
    )


def _rounding(fn: Callable[..., Any], trace: Trace, /, *args: Value) -> Value | None:
    value = args[0] if len(args) == 1 else None
    if type(value) is QuotientValue:
        return value.rounded(trace, fn)
    if type(value) is FloatValue:
        return Constant(value.ask(fn.__name__, fn))
    return value if type(value) is SizeValue else None


for _fn in (int, math.floor, math.ceil, math.trunc):
    size_rule(_fn)(functools.partial(_rounding, _fn))


def _function(fn: Callable[[float], float], trace: Trace, /, *args: Value) -> Value | None:
    """A function of one float."""
    number = args[0].from_outside() if len(args) == 1 and isinstance(args[0], Number) else None
    return None if number is None else number.apply(fn)


for _of_float in FUNCTIONS:
    if _of_float is not abs:
        size_rule(_of_float)(functools.partial(_function, _of_float))


def _numbers(trace: Trace, args: Sequence[Value]) -> list[Any] | None:
    items: Sequence[Value] = (
        args[0].unpack(trace) if len(args) == 1 and isinstance(args[0], SequenceValue) else args
    )
    numbers = [number_of(item) for item in items]
    return None if any(n is None for n in numbers) else numbers


def _folding(fold: Callable[[Any, Any, Any], Any], trace: Trace, /, *args: Value) -> Value | None:
    numbers = _numbers(trace, args)
    if not numbers:
        return None
    total = numbers[0]
    for n in numbers[1:]:
        total = fold(trace.sizes.env, total, n)
    return size_value(trace, total)


size_rule(min, torch.sym_min)(functools.partial(_folding, minimum))
size_rule(max, torch.sym_max)(functools.partial(_folding, maximum))
size_rule(torch.sym_sum)(functools.partial(_folding, lambda env, a, b: a + b))


@size_rule(math.prod, torch.Size.numel)
def _product(trace: Trace, /, *args: Value) -> Value | None:
    numbers = _numbers(trace, args) if isinstance(args[0], SequenceValue) else None
    return None if numbers is None else size_value(trace, math.prod(numbers))


@size_rule(torch._check)
def _check(trace: Trace, condition: Value, *message: Value) -> Value | None:
    return demand(trace, condition.condition) if type(condition) is ConditionValue else None


@size_rule(torch._check_with)
def _check_with(trace: Trace, error: Value, condition: Value, *message: Value) -> Value | None:
    """The call is repeated in eager, which raises the error that is asked for."""
    return _check(trace, condition)


@size_rule(torch._check_is_size)
def _check_is_size(trace: Trace, size: Value, *message: Value) -> Value | None:
    if type(size) is not SizeValue or not is_unbacked(size.expr):
        return None
    return demand(trace, Condition(">=", size.expr))


def demand(trace: Trace, condition: Condition) -> Value:
    """Add a node that raises where the condition does not hold; the rest of the trace relies on it."""
    if not condition.sure(True):
        node = trace.sizes.node(trace.graph, trace.sizes.used(condition.expr))
        trace.graph.call_function(holds, (condition.kind, node, condition.negated), {})
        condition.tell()
    return Constant(None)
