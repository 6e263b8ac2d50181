"""`torch.SymInt` over our sizes: PyTorch's own C++ (composites, autograd formulas, meta kernels) computes
with `Size`s.

>>> to_torch(env.symbol(64)) * 2
2*s0
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from typing import Any, cast

import torch

from . import nested_size
from .nested_size import NestedSize
from .sizes import (
    ShapeEnv,
    Size,
    divide,
    is_contiguous,
    is_unbacked,
    known,
    mapped,
    maximum,
    minimum,
    size,
)


class Condition:
    """An open question about sizes; `ask()` gives the answer, `sure()` only a provable
    one.
    """

    __slots__ = ("kind", "expr", "negated")

    def __init__(self, kind: Any, expr: Size | int, negated: bool = False) -> None:
        self.kind, self.expr, self.negated = kind, expr, negated

    def ask(self) -> bool:
        """The answer, guarded where it is not provable."""
        answer = (
            self.expr.env.ask(self.kind, self.expr)
            if type(self.expr) is Size
            else _plainly(self.kind, self.expr)
        )
        return answer is not self.negated

    def tell(self) -> None:
        """Take it for true from here on (see `ShapeEnv.tell`)."""
        if type(self.expr) is Size:
            self.expr.env.tell("!=" if self.negated and self.kind == "==" else self.kind, self._positive())

    def _positive(self) -> Size | int:
        return -self.expr - 1 if self.negated and self.kind == ">=" else self.expr

    def sure(self, wanted: bool) -> bool:
        """Whether the answer is provably `wanted`."""
        if type(self.expr) is not Size:
            return self.ask() is wanted
        if wanted is not self.negated:
            return known(self.kind, self.expr)
        return known(">=", -self.expr - 1) or self.kind == "==" and known(">=", self.expr - 1)

    def __repr__(self) -> str:
        sign = {">=": "<", "==": "!="}[self.kind] if self.negated else self.kind
        return f"{self.expr} {sign} 0"


def _plainly(kind: str, value: int) -> bool:
    return value >= 0 if kind == ">=" else value == 0


class _Prover:
    """The part of PyTorch's ShapeEnv that its meta functions use."""

    @staticmethod
    def _maybe_evaluate_static(condition: Any) -> bool | None:
        if type(condition) is not Condition:
            return bool(condition)
        return True if condition.sure(True) else False if condition.sure(False) else None

    @staticmethod
    def evaluate_sym_node(
        node: SizeNode, size_oblivious: bool = False, fallback_value: bool | None = None
    ) -> Any:
        """`guard_or_false(x)` and its like: PyTorch falls back only where no hint is known; ours always
        is.
        """
        if node.is_bool() and fallback_value is not None and node._is_open():
            return fallback_value
        return node.bool_() if node.is_bool() else node.int_()


class PlainNode:
    """What PyTorch asks of every `SymNode` (torch/csrc/utils/python_symnode.h, 2.13): this is no constant."""

    __slots__ = ()
    constant = None

    def is_nested_int(self) -> bool:
        return False

    def has_hint(self) -> bool:
        return True

    def maybe_as_int(self) -> Any:
        return None

    maybe_as_float = maybe_as_bool = maybe_as_int

    def clone(self) -> Any:
        return self

    def __repr__(self) -> str:
        return self.str()  # type: ignore[attr-defined]

    __str__ = _graph_repr = __repr__


class SizeNode(PlainNode):
    """The content of our `torch.SymInt`, `SymBool` and `SymFloat`: a Size, a Condition or a plain number."""

    __slots__ = ("expr", "env")

    def __init__(self, expr: Any, env: ShapeEnv) -> None:
        self.expr, self.env = expr, env

    # Value
    def is_int(self) -> bool:
        return type(self.expr) is Size or type(self.expr) is int

    def is_bool(self) -> bool:
        return type(self.expr) is Condition or type(self.expr) is bool

    def is_float(self) -> bool:
        return type(self.expr) is float

    def is_constant(self) -> bool:
        """A float is none: PyTorch's operators take constants out of SymInts and SymBools alone."""
        return type(self.expr) in (int, bool)

    def is_symbolic(self) -> bool:
        return type(self.expr) not in (int, bool, float)

    @property
    def hint(self) -> Any:
        return self.expr.hint if type(self.expr) is Size else self.expr

    @property
    def _hint(self) -> int | None:
        """Of sizes alone: PyTorch's helpers would take a condition's hint for a disproof."""
        return self.expr.hint if type(self.expr) is Size else None

    @property
    def shape_env(self) -> type[_Prover]:
        """What PyTorch's `statically_known_true` asks."""
        return _Prover

    def maybe_as_int(self) -> int | None:
        return self.expr if type(self.expr) is int else None

    def maybe_as_float(self) -> float | None:
        return self.expr if type(self.expr) is float else None

    def maybe_as_bool(self) -> bool | None:
        return self.expr if type(self.expr) is bool else None

    def str(self) -> builtins.str:
        return repr(self.expr)

    # Becoming a plain value
    def int_(self) -> int:
        return int(self.expr)

    def bool_(self) -> bool:
        return self.expr.ask() if type(self.expr) is Condition else bool(self.expr)

    def guard_int(self, file: builtins.str, line: int) -> int:
        return self.int_()

    def guard_float(self, file: builtins.str, line: int) -> float:
        return float(self.expr)

    def guard_bool(self, file: builtins.str, line: int) -> bool:
        return self.bool_()

    guard_size_oblivious = guard_bool

    def guard_or_false(self, file: builtins.str, line: int) -> bool:
        """Asked where False is right, if slower, whatever the answer is."""
        return self.guard_bool(file, line) if not self._is_open() else False

    def guard_or_true(self, file: builtins.str, line: int) -> bool:
        """Asked where True is right whatever the answer is."""
        return self.guard_bool(file, line) if not self._is_open() else True

    def _is_open(self) -> bool:
        """Whether this is a question about data that nothing proves."""
        asked = self.expr
        return (
            type(asked) is Condition
            and is_unbacked(asked.expr)
            and not (asked.sure(True) or asked.sure(False))
        )

    def expect_true(self, file: builtins.str, line: int) -> bool:
        """The kernel's demand: unknown here where it depends on data, and asked again when the node runs."""
        if self._is_open() and self.expr.kind == ">=":  # an equality may also be a broadcast that is none
            self.expr.tell()
            return True
        return self.guard_bool(file, line)

    expect_size = expect_true

    def statically_known_true(self, file: builtins.str = "", line: int = 0) -> bool:
        return self.expr.sure(True) if type(self.expr) is Condition else bool(self.expr)

    # Making nodes
    def _node(self, expr: Any) -> SizeNode:
        return SizeNode(expr, self.env)

    def wrap_int(self, value: int) -> SizeNode:
        return self._node(value)

    wrap_float = wrap_bool = wrap_int

    def sym_float(self) -> SizeNode:
        return self._node(float(self.expr))

    def sym_ite(self, then: SizeNode, other: SizeNode) -> SizeNode:
        return then if self.bool_() else other

    def sym_not(self) -> SizeNode:
        if type(self.expr) is Condition:
            return self._node(Condition(self.expr.kind, self.expr.expr, not self.expr.negated))
        return self._node(not self.expr)

    def sym_and(self, other: SizeNode) -> SizeNode:
        return other if self.bool_() else self._node(False)

    def sym_or(self, other: SizeNode) -> SizeNode:
        return self._node(True) if self.bool_() else other

    and_, or_ = sym_and, sym_or

    def sym_sum(self, parts: list[SizeNode]) -> SizeNode:
        return self._node(sum(part.expr for part in parts))

    def is_contiguous(self, sizes: list[SizeNode], strides: list[SizeNode]) -> SizeNode:
        return self._node(is_contiguous([s.expr for s in sizes], [s.expr for s in strides]))


def _binary(compute: Callable[[ShapeEnv, Any, Any], Any]) -> Callable[[SizeNode, SizeNode], SizeNode]:
    return lambda a, b: SizeNode(compute(a.env, a.expr, b.expr), a.env)


def _question(
    kind: str, left_first: bool, strict: bool, negated: bool = False
) -> Callable[[SizeNode, SizeNode], SizeNode]:
    """`a - b` (or `b - a`), less one when strict, compared with 0."""

    def node(a: SizeNode, b: SizeNode) -> SizeNode:
        x, y = (a.expr, b.expr) if left_first else (b.expr, a.expr)
        return SizeNode(Condition(kind, x - y - strict, negated), a.env)

    return node


_BINARY: dict[str, Callable[[ShapeEnv, Any, Any], Any]] = {
    "add": lambda env, a, b: a + b, "sub": lambda env, a, b: a - b, "mul": lambda env, a, b: a * b,
    "floordiv": lambda env, a, b: divide(env, a, b)[0],
    "int_floordiv": lambda env, a, b: divide(env, a, b)[0],
    "mod": lambda env, a, b: divide(env, a, b)[1],
    "pow": lambda env, a, b: a**b, "pow_by_natural": lambda env, a, b: a**b,
    "float_pow": lambda env, a, b: a**b,
    "truediv": lambda env, a, b: a / b, "int_truediv": lambda env, a, b: a / b,
    "float_truediv": lambda env, a, b: a / b,
    "sym_min": minimum, "sym_max": maximum,
}  # fmt: skip
_OF_FLOATS = ("sqrt", "cos", "cosh", "sin", "sinh", "tan", "tanh", "asin", "acos", "atan", "log2")
_UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": lambda a: -a,
    "pos": lambda a: a,
    "abs": abs,
    "ceil": math.ceil,
    "floor": math.floor,
    "trunc": math.trunc,
    **{f"sym_{name}": getattr(math, name) for name in _OF_FLOATS},
}
_QUESTIONS = {
    "eq": _question("==", True, False), "ne": _question("==", True, False, negated=True),
    "ge": _question(">=", True, False), "gt": _question(">=", True, True),
    "le": _question(">=", False, False), "lt": _question(">=", False, True),
}  # fmt: skip


COMPARISONS = frozenset(_QUESTIONS)


def comparison(name: str, env: ShapeEnv, a: Size | int, b: Size | int) -> Condition:
    """`a < b` and its like (by the operator's name), not asked yet."""
    return _QUESTIONS[name](SizeNode(a, env), SizeNode(b, env)).expr


def _unary(compute: Callable[[Any], Any]) -> Callable[[SizeNode], SizeNode]:
    return lambda a: SizeNode(
        a.expr if type(a.expr) is Size and compute in _WHOLE else compute(a.expr), a.env
    )


_WHOLE = (math.ceil, math.floor, math.trunc)
for _name, _compute in _BINARY.items():
    setattr(SizeNode, _name, _binary(_compute))
for _name, _one in _UNARY.items():
    setattr(SizeNode, _name, _unary(_one))
for _name, _ask in _QUESTIONS.items():
    setattr(SizeNode, _name, _ask)


SYMBOLIC = (torch.SymInt, torch.SymBool, torch.SymFloat)


def to_torch(value: Any) -> Any:
    """Sizes as PyTorch takes them: a SymInt for a Size, lists and tuples by element."""
    return mapped(_one_to_torch, value)


def _one_to_torch(value: Any) -> Any:
    if type(value) is Size:
        return torch.SymInt(cast(Any, SizeNode(value, value.env)))
    return nested_size.to_sym_int(value) if type(value) is NestedSize else value


def from_torch(value: Any) -> Any:
    """What PyTorch computed, with Sizes (or plain numbers) in the place of SymInts; questions are asked."""
    kind = type(value)
    if kind is torch.SymInt:
        nested = nested_size.from_node(value.node)
        if nested is not None:
            return nested
        expr = value.node.expr
        return size(expr.terms, expr.env) if type(expr) is Size else expr
    if kind is torch.SymBool:
        return value.node.bool_()
    if kind is torch.SymFloat:
        return float(value.node.expr)
    if kind is tuple or kind is list or kind is torch.Size:
        return (list if kind is list else tuple)([from_torch(v) for v in value])
    return value
