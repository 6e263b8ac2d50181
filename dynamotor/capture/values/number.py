"""A float of Python's, or a 64-bit number of NumPy's, that differs between calls: an input of the program
where a tensor meets it, a number elsewhere.

A `FloatValue` is a `Constant` whose `value` specialises, as a size's does. Values computed from it and plain
numbers is computed again at each call, by Python, before the program runs; a comparison is a guard.

>>> trace.binary(operator.truediv, Constant(1.0), FloatValue(trace, source, 0.7))      # 1.0 / 0.7, no guard
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..guards import BYTES, ConstEquals
from ..source import Called, Source
from .base import Trace, Value
from .constant import Constant, Number
from .operators import COMPARE, INPLACE

Step = Callable[[float], Any]
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
_UNARY = (operator.neg, operator.pos, abs)
# Functions of one float that give another.
FUNCTIONS = (float, abs, math.sqrt, math.exp, math.log, math.log2, math.sin, math.cos, math.tan, math.tanh)


class FloatValue(Number):
    """A float from outside (`root`), or what `step` makes of it. text: for people."""

    __slots__ = ("trace", "root", "now", "step", "text", "kind")

    def __init__(
        self, trace: Trace, root: Source, now: float, step: Step | None = None, text: str = ""
    ) -> None:
        self.trace, self.root, self.now, self.step, self.text = trace, root, now, step, text or str(root)
        self.kind = type(now if step is None else step(now))
        self.source = root if step is None else _computed(trace, root, step, self.text, self.kind)

    @property
    def value(self) -> float:
        """The number as it is at this call: the program is for this one alone."""
        if type(self.now) is float:
            self.trace.reader.guard(ConstEquals(self.root, self.now))
        else:
            self.trace.reader.ask(self.root, self.now, *BYTES)
        return self.now if self.step is None else self.step(self.now)

    def binary(
        self, trace: Trace, op: Callable[..., Any], other: Value, reflected: bool = False
    ) -> Value | None:
        if not other.is_constant():
            odd = isinstance(getattr(other, "base", None), Constant)  # of a subclass of int, float or str
            return super().binary(trace, op, other, reflected) if odd else None
        as_asked, op = op, INPLACE.get(op, op)  # an error names the former
        step = self._with(op, other, reflected)
        if step is None:
            return super().binary(trace, as_asked, other, reflected)
        names = (_text(other), self.text) if reflected else (self.text, _text(other))
        text = f"{op.__name__}({', '.join(names)})"
        if op in COMPARE:
            return Constant(trace.reader.ask(self.root, self.now, text, step))
        return self.after(step, text) or super().binary(trace, as_asked, other, reflected)

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

    def after(self, step: Step, text: str) -> FloatValue | None:
        """The result of a function of the outside float; None where that is no float."""
        try:
            found = step(self.now)
        except (ArithmeticError, ValueError):
            return None
        return FloatValue(self.trace, self.root, self.now, step, text) if type(found) in KINDS else None

    def unary(self, trace: Trace, op: Callable[..., Any]) -> Value:
        return (self.apply(op) if op in _UNARY else None) or super().unary(trace, op)

    def apply(self, fn: Callable[[float], Any]) -> FloatValue | None:
        """`fn(self)`, computed at each call."""
        mine = self.step or _itself
        return self.after(lambda v: fn(mine(v)), f"{fn.__name__}({self.text})")

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
            self.trace.reader.ask(self.root, self.now, f"the type of {self.text}", lambda v: type(step(v)))
        return self.source

    def describe(self) -> str:
        return f"the float {self.text}"


_EXACT = 1 << 53  # integers up to here are floats


def _itself(value: float) -> float:
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
