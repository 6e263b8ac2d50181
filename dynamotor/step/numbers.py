"""Numbers that change from step to step (learning rates, step counts), traced as `torch.SymFloat`s over graph
nodes.

A number is a node of the recorded graph that gives one float64. Arithmetic on it records nodes; a question
about it (`n > 5`) is answered as it is now and noted, so that the program is used only while the answer stays
the same; C++ or Python code that needs the plain number gets it under such a note.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from ..graph.shapes import UnsupportedOp
from ..graph.sym_int import PlainNode

aten = torch.ops.aten
Operand = fx.Node | float | int
IS_PYTHON = "a number of Python's"  # in the meta of a node: it follows Python, exceptions included, not aten


class NumberRecorder(Protocol):
    """What numbers need of the recorder. `raised`: what ended the trace, though Python may have caught it."""

    raised: Exception | None

    def emit(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """A node for an op on nodes."""

    def hint(self, node: Operand) -> float | None:
        """The number as it is now; None where only the step itself will know."""

    def note(self, question: Question, answer: bool) -> None:
        """The program holds only while the question has this answer."""


@dataclass(frozen=True)
class Question:
    """A comparison (`eq`, `lt`, `le` or `ne`) of two numbers."""

    kind: str
    left: Operand
    right: Operand


ANSWERS = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}


class NumberNode(PlainNode):
    """The content of our `torch.SymFloat` and `SymBool`: a node, a question or a plain number. `kind`:
    whether Python has an int or a float here; None where that depends on the numbers.
    """

    __slots__ = ("value", "recorder", "kind")

    def __init__(
        self, value: Operand | Question | bool, recorder: NumberRecorder, kind: type | None = None
    ) -> None:
        self.value, self.recorder = value, recorder
        self.kind = kind if isinstance(value, fx.Node) else type(value)

    def is_int(self) -> bool:
        return False

    def is_bool(self) -> bool:
        return type(self.value) is Question or type(self.value) is bool

    def is_float(self) -> bool:
        return not self.is_bool()

    def is_constant(self) -> bool:
        return type(self.value) in (int, float, bool)

    def is_symbolic(self) -> bool:
        return True

    def str(self) -> builtins.str:
        return f"number({self.value})"

    def wrap_float(self, value: float) -> NumberNode:
        return NumberNode(value, self.recorder)

    wrap_int = wrap_bool = wrap_float

    def sym_float(self) -> NumberNode:
        return self

    # Becoming a plain value
    def guard_float(self, file: builtins.str = "", line: int = 0) -> float:
        """The number as it is now, which then is part of the program."""
        if isinstance(self.value, fx.Node):
            known = _known(self.recorder, self.value)
            self.recorder.note(Question("eq", self.value, known), True)
            return known
        return float(self.value)  # type: ignore[arg-type]

    def guard_bool(self, file: builtins.str = "", line: int = 0) -> bool:
        """The answer as it is now, which then is assumed."""
        if type(self.value) is Question:
            q = self.value
            answer = ANSWERS[q.kind](_known(self.recorder, q.left), _known(self.recorder, q.right))
            self.recorder.note(q, answer)
            return answer
        return bool(self.value)

    def expect_true(self, file: builtins.str = "", line: int = 0) -> bool:
        """Something is checked of a number (that a root is taken of nothing negative): no branch."""
        if type(self.value) is Question:
            left, right = self.recorder.hint(self.value.left), self.recorder.hint(self.value.right)
            return left is None or right is None or ANSWERS[self.value.kind](left, right)
        return bool(self.value)

    bool_ = guard_size_oblivious = guard_or_false = guard_or_true = guard_bool

    def guard_int(self, file: builtins.str = "", line: int = 0) -> int:
        return int(self.guard_float())

    int_ = guard_int

    def sym_not(self) -> NumberNode:
        return NumberNode(not self.guard_bool(), self.recorder)

    # Arithmetic
    def neg(self) -> NumberNode:
        return self._emit(aten.neg.default, self.value, kind=self.kind)

    def pos(self) -> NumberNode:
        return self

    def _emit(self, func: Any, *args: Any, kind: type | None) -> NumberNode:
        node = self.recorder.emit(func, args, {})
        node.meta[IS_PYTHON] = True
        return NumberNode(node, self.recorder, kind)


def _known(recorder: NumberRecorder, value: Operand) -> float:
    known = recorder.hint(value)
    if known is None:
        recorder.raised = UnsupportedOp(
            "DM506", "the optimizer branches on a number that only the step itself will know"
        )
        raise recorder.raised
    return known


def _power(a: NumberNode, b: NumberNode) -> NumberNode:
    nodes = [isinstance(x.value, fx.Node) for x in (a, b)]
    func = aten.pow.Tensor_Tensor if all(nodes) else aten.pow.Tensor_Scalar if nodes[0] else aten.pow.Scalar
    counts = _is_whole(b.value) and not b.value < 0  # type: ignore[operator]
    kind = int if a.kind is int and counts else None if a.kind is b.kind is int else float
    return a._emit(func, a.value, b.value, kind=kind)


_OF_TENSORS = (aten.maximum.default, aten.minimum.default, aten.remainder.Tensor)


def _full(recorder: NumberRecorder, value: Any, like: Any) -> fx.Node:
    return recorder.emit(
        aten.full.default, ([], float(value)), {"dtype": torch.float64, "device": like.meta["val"].device}
    )


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, float)) and value % 1 == 0


def _common(func: Any, a: NumberNode, b: NumberNode) -> type | None:
    """What Python makes of two numbers. PyTorch hands 1 over as 1.0: a constant like that is of any kind."""
    first = a.kind if isinstance(a.value, fx.Node) or not _is_whole(a.value) else b.kind
    second = b.kind if isinstance(b.value, fx.Node) or not _is_whole(b.value) else a.kind
    if first is second:
        return first
    return None if func in (aten.maximum.default, aten.minimum.default) else float


def _binary(func: Any) -> Any:
    def apply(a: NumberNode, b: NumberNode) -> NumberNode:
        x, y = a.value, b.value
        if not isinstance(x, fx.Node):  # the first operand of an aten op is a tensor
            x = _full(a.recorder, x, y)
        if func in _OF_TENSORS and not isinstance(y, fx.Node):
            y = _full(a.recorder, y, x)
        return a._emit(func, x, y, kind=float if func is aten.div.Tensor else _common(func, a, b))

    return apply


def _raising(record: Any, by_divisor: bool) -> Any:
    """An operation that raises for some numbers: now, where Python would; later, the program is not for such
    numbers. `by_divisor`: the second number alone decides whether it does.
    """

    def apply(a: NumberNode, b: NumberNode) -> NumberNode:
        found = record(a, b)
        try:
            a.recorder.hint(found.value)
        except ArithmeticError:
            if not by_divisor:
                a.guard_float()
                b.guard_float()
            elif isinstance(b.value, fx.Node):
                a.recorder.note(Question("eq", b.value, 0), True)
            raise
        return found

    return apply


def _question(kind: str, swapped: bool = False) -> Any:
    def ask(a: NumberNode, b: NumberNode) -> NumberNode:
        sides: tuple[Any, Any] = (b.value, a.value) if swapped else (a.value, b.value)
        return NumberNode(Question(kind, *sides), a.recorder)

    return ask


_ARITHMETIC = {
    "add": aten.add.Tensor,
    "sub": aten.sub.Tensor,
    "mul": aten.mul.Tensor,
    "sym_max": aten.maximum.default,
    "sym_min": aten.minimum.default,
}
_divided = _raising(_binary(aten.div.Tensor), True)
for _name in ("truediv", "float_truediv", "int_truediv"):
    setattr(NumberNode, _name, _divided)
for _name in ("pow", "float_pow"):
    setattr(NumberNode, _name, _raising(_power, False))
for _name, _remainder in {"mod": _raising(_binary(aten.remainder.Tensor), True)}.items():
    setattr(NumberNode, _name, _remainder)
for _name, _func in _ARITHMETIC.items():
    setattr(NumberNode, _name, _binary(_func))
for _name, _asked in {
    "eq": _question("eq"),
    "ne": _question("ne"),
    "lt": _question("lt"),
    "le": _question("le"),
    "gt": _question("lt", True),
    "ge": _question("le", True),
}.items():
    setattr(NumberNode, _name, _asked)


def traced(node: fx.Node, recorder: NumberRecorder, kind: type = float) -> torch.SymFloat:
    """The number that a node gives."""
    return torch.SymFloat(cast(Any, NumberNode(node, recorder, kind)))


def kind_of(value: Any) -> type | None:
    """The type that Python has for a number, traced or plain; None where it depends on other numbers."""
    node: Any = value.node if type(value) is torch.SymFloat else None
    return type(value) if node is None else node.kind


def node_behind(value: Any) -> Any:
    """The node (or plain number) of a traced number; anything else as it is."""
    return value.node.value if type(value) is torch.SymFloat and type(value.node) is NumberNode else value


class TensorsOfNumbers(TorchFunctionMode):
    """While on, `torch.tensor(number)` and `torch.as_tensor(number)` take traced numbers, not what they are
    now.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.tensor, torch.as_tensor) and args and type(args[0]) is torch.SymFloat:
            return torch.full((), args[0], **(kwargs or {}))  # type: ignore[call-overload]
        return func(*args, **(kwargs or {}))


def _extreme(plain: Callable[..., Any], symbolic: Callable[..., Any], *values: Any, **kwargs: Any) -> Any:
    if kwargs or len(values) < 2 or not any(type(v) is torch.SymFloat for v in values):
        return plain(*values, **kwargs)
    return functools.reduce(symbolic, values)


@contextlib.contextmanager
def extremes_beside(function: Callable[..., Any]) -> Iterator[None]:
    """While on, `max` and `min` in the functions of a function's module take traced numbers without asking
    which is which.
    """
    module = inspect.unwrap(function).__globals__
    names = {
        "max": functools.partial(_extreme, max, torch.sym_max),
        "min": functools.partial(_extreme, min, torch.sym_min),
    }
    added = [name for name in names if name not in module]
    module.update((name, names[name]) for name in added)
    try:
        yield
    finally:
        for name in added:
            del module[name]
