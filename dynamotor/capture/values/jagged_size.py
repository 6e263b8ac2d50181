"""The size of a jagged tensor that differs from row to row, in a trace: PyTorch makes it of the tensor of offsets, so
the program asks a tensor that has it.

>>> x.view(-1, x.size(1), 4, 8)         # node: size(x, 1)
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from ...graph.nested_size import NestedSize
from ...graph.sizes import Size
from ...graph.sym_int import to_torch
from ..breaks import unsupported
from .base import MISSING, ResultEmitter, Trace, Value
from .constant import Constant


class NestedSizeValue(Value):
    """A size or stride of a jagged tensor, which `tensor` has times one in its dimension `dim`."""

    __slots__ = ("trace", "expr", "tensor", "dim")

    def __init__(self, trace: Trace, expr: NestedSize, tensor: Any, dim: int) -> None:
        self.source, self.trace, self.expr, self.tensor, self.dim = None, trace, expr, tensor, dim

    def python_type(self) -> type:
        return torch.SymInt

    def hash_key(self, trace: Trace) -> Any:
        return self.expr

    def binary(
        self, trace: Trace, op: Callable[..., Any], other: Value, reflected: bool = False
    ) -> Value | None:
        if op in (operator.eq, operator.ne) and (
            isinstance(other, NestedSizeValue) or type(other) is Constant and type(other.value) is int
        ):
            return Constant(self._is(trace, other) is (op is operator.eq))
        if op is operator.mul and type(other) is Constant and type(other.value) is int:
            return NestedSizeValue(trace, self.expr * other.value, self.tensor, self.dim)
        raise unsupported(
            "unsupported-call",
            f"{op.__name__} of {self.describe()} and {other.describe()}",
            cure="compute with the lengths: x.offsets().diff()",
        )

    def _is(self, trace: Trace, other: Value) -> bool:
        """Whether a size is this one: of the same offsets, now and at each call."""
        if not isinstance(other, NestedSizeValue):
            return False
        mine, its = self.tensor.offsets(trace), other.tensor.offsets(trace)
        if mine is not its and mine.obj is not MISSING and its.obj is not MISSING:
            trace.reader.guard_distinct(mine.source, its.source)
        return self.expr == other.expr

    def lowered(self, node: bool) -> Any:
        """A torch call's argument: a node of the graph, or the `torch.SymInt` for the trial run."""
        if not node:
            return to_torch(self.expr)
        size = to_torch(NestedSize(self.expr.offsets))
        graph = self.trace.graph
        found = graph.call_method("size", (self.tensor.tensor.node, self.dim), {}, size)
        if self.expr.coefficient == 1:
            return found
        return graph.call_function(operator.mul, (found, self.expr.coefficient), {}, to_torch(self.expr))

    def reconstruct(self, emitter: ResultEmitter) -> str:
        text = f"{emitter.emit(self.tensor)}.size({self.dim})"
        if self.expr.coefficient == 1:
            return text
        return f"({text} * {_text(emitter, self.expr.coefficient)})"

    def describe(self) -> str:
        return f"the nested size {self.expr}"


def _text(emitter: ResultEmitter, number: Any) -> str:
    return emitter.size(number) if type(number) is Size else repr(number)
