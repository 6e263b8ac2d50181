"""A float of Python's, or a 64-bit number of NumPy's, that differs between calls: an input of the program
where a tensor meets it, a number elsewhere.

A `FloatValue` is a `Constant` whose `value` specialises, as a size's does. Values computed from it and plain
numbers is computed again at each call, by Python, before the program runs; a comparison is a guard.

>>> trace.binary(operator.truediv, Constant(1.0), FloatValue(trace, source, 0.7))      # 1.0 / 0.7, no guard
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..guards import BYTES, ConstEquals
from ..source import Called, Joined, Source
from .base import Trace, Value
from .constant import Constant, Number
from .operators import COMPARE, INPLACE

Step = Callable[[Any], Any]  # of a number from outside, or of a tuple of several
KINDS = (float, np.float64, np.int64)
_ARITHMETIC = frozenset(
    (
        operator.add,
        operator.sub,
        operator.mul,
        operator.truediv,
        operator.floordiv,
        operator.mod,
        operator.pow,
    )
)
# What raises for no number of these kinds; of all else, whether it raises is asked at each call.
_NEVER_RAISE = frozenset(
    (operator.add, operator.sub, operator.mul, operator.neg, operator.pos, abs, float, math.tanh)
)
_UNARY = (operator.neg, operator.pos, abs)
# Functions of one float that give another.
FUNCTIONS = (float, abs, math.sqrt, math.exp, math.log, math.log2, math.sin, math.cos, math.tan, math.tanh)


@dataclass(frozen=True)
class Outside:
    """A number from outside that floats are computed from. fix: lets the program be for this number alone."""

    source: Source
    now: float | int
    fix: Callable[[], Any]


class FloatValue(Number):
    """A float from outside (`root`), or the result of `step` for it; of several numbers from outside (`made_of`),
    `root` and `now` are their sources and values together. text: for people."""

    __slots__ = ("trace", "root", "now", "step", "text", "kind", "made_of")

    def __init__(
        self,
        trace: Trace,
        root: Source,
        now: Any,
        step: Step | None = None,
        text: str = "",
        made_of: tuple[Outside, ...] = (),
    ) -> None:
        self.trace, self.root, self.now, self.step, self.text = trace, root, now, step, text or str(root)
        self.kind = type(now if step is None else step(now))
        self.source = root if step is None else _computed(trace, root, step, self.text, self.kind)
        self.made_of = made_of or (Outside(root, now, functools.partial(_fix, trace, root, now)),)

    @property
    def value(self) -> float:
        """The number as it is at this call: the program is for this one alone."""
        for outside in self.made_of:
            outside.fix()
        return self.at_this_call

    def binary(
        self, trace: Trace, op: Callable[..., Any], other: Value, reflected: bool = False
    ) -> Value | None:
        if not other.is_constant():
            odd = isinstance(getattr(other, "base", None), Constant)  # of a subclass of int, float or str
            return super().binary(trace, op, other, reflected) if odd else None
        found = self.computed(op, other, reflected)
        return super().binary(trace, op, other, reflected) if found is None else found

    def computed(self, op: Callable[..., Any], other: Value, reflected: bool = False) -> Value | None:
        """The result for a known number, computed at each call or (a comparison) guarded; None where Python refuses
        it, or gives no float."""
        op = INPLACE.get(op, op)  # an error names the former
        mine: FloatValue = self
        if isinstance(other, Number):
            other = other.from_outside() or other
        if type(other) is FloatValue and other.root != mine.root:
            mine, other = _joined(mine, other)
        step = mine._with(op, other, reflected)
        if step is None:
            return None
        names = (_text(other), mine.text) if reflected else (mine.text, _text(other))
        text = f"{op.__name__}({', '.join(names)})"
        if op in COMPARE:
            return Constant(mine.trace.reader.ask(mine.root, mine.now, text, step))
        return mine.after(step, text, op not in _NEVER_RAISE)

    def from_outside(self) -> FloatValue:
        return self

    def _with(self, op: Callable[..., Any], other: Value, reflected: bool) -> Step | None:
        if op not in _ARITHMETIC and op not in COMPARE:
            return None
        mine = self.step or _itself
        if type(other) is FloatValue and other.root == self.root:
            theirs = other.step or _itself
            return lambda v: op(theirs(v), mine(v)) if reflected else op(mine(v), theirs(v))
        if type(other) is not Constant or type(other.value) not in (int, float, bool):
            return None
        number = other.value
        return lambda v: op(number, mine(v)) if reflected else op(mine(v), number)

    def after(self, step: Step, text: str, may_raise: bool = True) -> FloatValue | None:
        """The result of a function of the outside float; None where that is no float. may_raise: a guard asks, since
        a program that does not read the result raises, too."""
        try:
            found = step(self.now)
        except (ArithmeticError, ValueError):
            return None
        if type(found) not in KINDS:
            return None
        result = FloatValue(self.trace, self.root, self.now, step, text, self.made_of)
        if may_raise:
            result.guarded()
        return result

    def unary(self, trace: Trace, op: Callable[..., Any]) -> Value:
        return (self.apply(op) if op in _UNARY else None) or super().unary(trace, op)

    def apply(self, fn: Callable[[float], Any]) -> FloatValue | None:
        """`fn(self)`, computed at each call."""
        mine = self.step or _itself
        return self.after(lambda v: fn(mine(v)), f"{fn.__name__}({self.text})", fn not in _NEVER_RAISE)

    def rounded(self, digits: Value) -> FloatValue | None:
        """`round(self, digits)` for a known number of digits."""
        mine, n = self.step or _itself, digits.as_constant() if type(digits) is Constant else None
        return self.after(lambda v: round(mine(v), n), f"round({self.text}, {n})") if type(n) is int else None

    def truth(self, trace: Trace) -> bool:
        mine = self.step or _itself
        return trace.reader.ask(self.root, self.now, f"the truth of {self.text}", lambda v: bool(mine(v)))

    def ask(self, text: str, question: Callable[[float], Any]) -> Any:
        """The answer of a question about the number, asked again at each call."""
        mine = self.step or _itself
        return self.trace.reader.ask(self.root, self.now, f"{self.text}: {text}", lambda v: question(mine(v)))

    def tensor(self) -> tuple[Source, torch.Tensor]:
        """Where the program's input comes from at each call, and its present value: a number of 64 bits, on the
        CPU."""
        mine = self.step or _itself
        made = self.trace.numbers.floats
        if self.text not in made:
            made[self.text] = Called(self.root, lambda v: _tensor(_checked(mine, v, self.kind)))
        return made[self.text], _tensor(mine(self.now))

    @property
    def at_this_call(self) -> float:
        """The number without a guard, for a trial of which nothing is kept."""
        return (self.step or _itself)(self.now)

    @property
    def is_exact(self) -> bool:
        """Whether the program's input can have its present value."""
        return is_exact((self.step or _itself)(self.now))

    def guarded(self) -> Source:
        """The source, where that is read behind the program: it must lead to a float."""
        if self.step is not None:
            step = self.step
            question = self.trace.numbers.types.setdefault(self.text, lambda v: type(step(v)))
            self.trace.reader.ask(self.root, self.now, f"the type of {self.text}", question)
        return self.source

    def describe(self) -> str:
        return f"the float {self.text}"


def _fix(trace: Trace, root: Source, now: Any) -> None:
    """Guard a number from outside to be this one."""
    if type(now) is float:
        trace.reader.guard(ConstEquals(root, now))
    else:
        trace.reader.ask(root, now, *BYTES)


def together(trace: Trace, outside: tuple[Outside, ...], step: Step | None, text: str) -> FloatValue:
    """The result of a function of several numbers from outside: of their tuple, or of the only one."""
    if len(outside) == 1:
        (one,) = outside
        return FloatValue(trace, one.source, one.now, step, text, outside)
    now = tuple([one.now for one in outside])
    return FloatValue(trace, Joined(tuple([one.source for one in outside])), now, step, text, outside)


def _joined(*values: FloatValue) -> list[FloatValue]:
    """The same values as functions of all numbers from outside that one of them is computed from."""
    joint = tuple({one.source: one for value in values for one in value.made_of}.values())
    places = {one.source: i for i, one in enumerate(joint)}

    def as_one(value: FloatValue) -> FloatValue:
        step = value.step or _itself
        at = [places[one.source] for one in value.made_of]
        if isinstance(value.root, Joined):
            return together(value.trace, joint, lambda v: step(tuple([v[i] for i in at])), value.text)
        return together(value.trace, joint, lambda v: step(v[at[0]]), value.text)

    return [as_one(value) for value in values]


_EXACT = 1 << 53  # integers up to here are floats


def _itself(value: Any) -> Any:
    return value


def _text(other: Value) -> str:
    return other.text if type(other) is FloatValue else repr(other.as_constant())


def _computed(trace: Trace, root: Source, step: Step, text: str, kind: type) -> Source:
    """The source of a step's result, the same for the same text."""
    key = f"= {text}"
    if key not in trace.numbers.floats:
        trace.numbers.floats[key] = Called(root, lambda v: _checked(step, v, kind))
    return trace.numbers.floats[key]


def _checked(step: Step, value: float, kind: type) -> Any:
    """A step's result; TypeError (the source leads nowhere) where that is of another kind, or an error."""
    try:
        found = step(value)
    except (ArithmeticError, ValueError) as error:
        raise TypeError(str(error)) from None
    if type(found) is not kind:
        raise TypeError(f"{type(found).__name__} in the place of a float")
    return found


def is_exact(number: Any) -> bool:
    """Whether a number of 64 bits is a float."""
    return type(number) is not np.int64 or abs(int(number)) <= _EXACT


def _tensor(number: float) -> torch.Tensor:
    if not is_exact(number):
        raise TypeError("no float is this integer")
    return torch.tensor(number, dtype=torch.float64, device="cpu")
