"""The size of a jagged tensor that differs from row to row, and its strides: a name for the offsets, times a
number.

PyTorch's own `NestedIntNode` multiplies by plain numbers alone; here the number may be an expression.

>>> from_node(torch.nested.nested_tensor([a, b], layout=torch.jagged).shape[1].node)
NestedSize(offsets=0, coefficient=1)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..base.compat import NestedIntNode
from .sizes import Dim


@dataclass(frozen=True, slots=True)
class NestedSize:
    """`coefficient` times the size that the tensor of offsets stands for, which PyTorch gave a number. Equal
    where it is one tensor."""

    offsets: int | str
    coefficient: Dim = 1

    def __mul__(self, other: Dim) -> NestedSize:
        return replace(self, coefficient=self.coefficient * other)

    __rmul__ = __mul__

    def __str__(self) -> str:
        return f"j{self.offsets}" if self.coefficient == 1 else f"{self.coefficient}*j{self.offsets}"


_multiply = NestedIntNode.mul


def _multiply_by_expressions(node: Any, other: object) -> object:
    """PyTorch's product, and that with an expression (`sym_int.SizeNode`), where rows are as wide."""
    expression = getattr(other, "expr", None)
    return _multiply(node, other) if expression is None else NestedIntNode(node.t_id, node.coeff * expression)


setattr(NestedIntNode, "mul", _multiply_by_expressions)  # noqa: B010  (to the checker a method is no variable)


def from_node(node: Any) -> NestedSize | None:
    """The nested size of a `SymInt`'s node; None for any other."""
    return NestedSize(node.t_id, node.coeff) if type(node) is NestedIntNode else None


def to_sym_int(nested: NestedSize) -> torch.SymInt:
    """The `SymInt` that PyTorch computes with."""
    return torch.SymInt(NestedIntNode(nested.offsets, nested.coefficient))
