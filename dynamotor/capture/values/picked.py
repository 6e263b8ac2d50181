"""The smaller or larger one of a number and a tensor of one element (`min(max(t, 0), 1)`): which of the two
objects it is, the tensor's data decide.

Arithmetic with tensors takes it as a tensor that holds its number; a result of the function is the object
itself, chosen behind the graph. Any other use breaks the graph, where the choice is made in the same way.

>>> max(t, 0) * x      # where(t < 0, 0, t) * x
>>> return max(t, 0)   # t, or the integer 0
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...graph.shape_tensor import ShapeTensor
from ..breaks import unsupported
from .base import ResultEmitter, Trace, Value
from .constant import Constant
from .operators import INPLACE
from .tensor import TensorValue, tensor_call

_ARITHMETIC = frozenset(
    (operator.add, operator.sub, operator.mul)
)  # the same with a number and a tensor of it
# The comparison of the tensor with the other one that decides, where the tensor comes first, and where last.
_REPLACED_BY_LATER = {max: operator.lt, min: operator.gt}
_TAKEN = {max: operator.gt, min: operator.lt}


class PickedValue(Value):
    """`number` where `condition` (a tensor) holds, else `other`."""

    __slots__ = ("condition", "number", "other")

    def __init__(self, condition: TensorValue, number: Constant, other: TensorValue | PickedValue) -> None:
        super().__init__()
        self.condition, self.number, self.other = condition, number, other

    def python_type(self) -> type:
        raise unsupported(
            "data-dependent",
            "data-dependent branch: min() or max() of a number and a tensor gives one of the two",
            cure="use torch.clamp, torch.minimum or torch.maximum",
        )

    def tensor(self, trace: Trace) -> TensorValue:
        """A tensor that holds the number that this is."""
        other = self.other if isinstance(self.other, TensorValue) else self.other.tensor(trace)
        return tensor_call(trace, torch.where, [self.condition, self.number, other])

    def reconstruct(self, emitter: ResultEmitter) -> str:
        number, condition, other = map(emitter.emit, (self.number, self.condition, self.other))
        return f"({number} if {condition} else {other})"

    def describe(self) -> str:
        return "a number or a tensor, as data decides"


def pick(trace: Trace, fn: Callable[..., Any], args: Sequence[Value]) -> PickedValue | None:
    """`min` or `max` of a tensor and a number, in either order; None for other arguments."""
    place = next((i for i, value in enumerate(args) if _is_plain(value)), None)
    if len(args) != 2 or place is None or trace.sizes.in_body:
        return None
    one, number = args[place], args[1 - place]
    assert isinstance(one, TensorValue | PickedValue)
    as_tensor = one if isinstance(one, TensorValue) else one.tensor(trace)
    if type(number) is not Constant or not _fits(number.value, as_tensor.example.dtype):
        return None
    if place == 0:  # the number replaces the tensor if it goes beyond it
        condition = tensor_call(trace, _REPLACED_BY_LATER[fn], [as_tensor, number])
    else:
        taken = tensor_call(trace, _TAKEN[fn], [as_tensor, number])
        condition = tensor_call(trace, torch.logical_not, [taken])
    return PickedValue(condition, number, one)


def _is_plain(value: Value) -> bool:
    """Whether it is a float tensor without dimensions and without a gradient, or one of such and a number."""
    if type(value) is PickedValue:
        return True
    if type(value) is not TensorValue or type(value.example) is not ShapeTensor:
        return False
    example = value.example
    return example.is_floating_point() and not example.dim() and not example.requires_grad


def _fits(number: Any, dtype: torch.dtype) -> bool:
    """Whether a tensor of this type holds exactly this number."""
    if type(number) not in (int, float) or abs(number) > torch.finfo(dtype).max:
        return False
    return bool(torch.tensor(number, dtype=dtype, device="cpu").item() == number)


def picked_binary(trace: Trace, op: Callable[..., Any], left: Value, right: Value) -> Value | None:
    """Sums, differences and products with a tensor; None: the graph breaks."""
    picked, x = (left, right) if type(left) is PickedValue else (right, left)
    inplace = op in INPLACE
    if (
        type(picked) is not PickedValue
        or type(x) is not TensorValue
        or type(x.example) is not ShapeTensor
        or INPLACE.get(op, op) not in _ARITHMETIC
        or inplace
        and picked is left  # a write into the tensor, if it is that
    ):
        return None
    tensor = picked.tensor(trace)
    if x.example.dtype is not tensor.example.dtype:
        return None
    return trace.binary(op, tensor if picked is left else x, x if picked is left else tensor)
