"""Calls that take a changing float as a number, where no formula takes it as a tensor: PyTorch makes the
call each time, with the number of that call, between two compiled parts of the graph.

>>> F.dropout(x, p), torch.cdist(x, y, p), F.cross_entropy(x, y, label_smoothing=s)
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import torch

from ...base.compat import OpOverload, OpOverloadPacket
from ...graph.result_strides import is_dense
from ...graph.shape_tensor import ShapeTensor, shape_mode, spec_of
from ...graph.sizes import equal, hint, leaves_in, mapped
from .base import Trace, Value
from .constant import Constant
from .number import FloatValue
from .number_inputs import is_option, number_rules, number_tensor, with_inputs
from .tensor import TensorValue, call_with_numbers, function_name, lower, torch_call

_OTHERS = (lambda v: v / 2, lambda v: v * 2, lambda v: v * 16 + 1)  # numbers that would show in a shape


class WithNumbers:
    """The target of a node: `target` with numbers in the place of some tensors.

    numbers: the number of the capture for each place, which a trial run uses.
    """

    def __init__(self, target: Callable[..., Any] | str, numbers: dict[int | str, float]) -> None:
        self.__name__ = self.__qualname__ = function_name(target)
        self.__module__ = __name__
        self.run = getattr(torch.Tensor, target) if isinstance(target, str) else target
        self.numbers = numbers

    @classmethod
    def of(cls, target: Callable[..., Any] | str, given: dict[int | str, Value]) -> WithNumbers:
        """The call with those numbers among its arguments that differ between calls."""
        return cls(target, {place: v.at_this_call for place, v in given.items() if type(v) is FloatValue})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given: dict[int | str, Any] = dict(enumerate(args))
        given.update(kwargs)
        for place, number in self.numbers.items():
            tensor = given[place]
            given[place] = number if isinstance(tensor, ShapeTensor) else tensor.item()
        return self.with_numbers(given)

    def with_numbers(self, given: dict[int | str, Any]) -> Any:
        """The call with these arguments, by position or name."""
        named = {name: value for name, value in given.items() if isinstance(name, str)}
        return self.run(*[value for place, value in given.items() if isinstance(place, int)], **named)


@call_with_numbers.define
def _call_with_numbers(
    trace: Trace, target: Callable[..., Any] | str, args: list[Value], kwargs: dict[str, Value]
) -> Value | None:
    """The call by a formula over tensors of the numbers, or else as PyTorch's own with numbers."""
    rule = number_rules.get(function_name(target))
    found = rule(trace, *args, **kwargs) if rule is not None and is_option(target, args, kwargs) else None
    if found is not None:
        return _laid_out(trace, WithNumbers.of(target, given := _by_place(args, kwargs)), given, found)
    if len(args) == 2:
        changed, operands = with_inputs(trace, target, args, kwargs)
        if operands is not args:
            return torch_call(trace, changed, operands, kwargs)
    return _late(trace, target, args, kwargs)


def _late(
    trace: Trace, target: Callable[..., Any] | str, args: list[Value], kwargs: dict[str, Value]
) -> Value | None:
    """The call as a node that PyTorch runs; None where the numbers are constants of the program."""
    given = _by_place(args, kwargs)
    numbers = {place: v for place, v in given.items() if type(v) is FloatValue}
    if (
        not _is_torchs(target)
        or trace.graph.recompute
        or trace.graph.live
        or not trace.sizes.takes_data
        or not all(number.kind is float and _is_ordinary(trace, number) for number in numbers.values())
    ):
        return None
    made = WithNumbers.of(target, given)
    if _decides_shapes(made, given):
        return None
    tensors: dict[int | str, Value] = {place: number_tensor(trace, v) for place, v in numbers.items()}
    names = ", ".join(number.text for number in numbers.values())
    trace.graph.live = "DM281", f"{made.__name__} takes {names}, which differs between calls, as a number"
    try:
        return torch_call(
            trace,
            made,
            [tensors.get(place, value) for place, value in enumerate(args)],
            {name: tensors.get(name, value) for name, value in kwargs.items()},
        )
    finally:
        trace.graph.live = None


def _is_torchs(target: Any) -> bool:
    """Whether it is a function of PyTorch's, not a custom operator or a function with a backward of its own."""
    if isinstance(target, OpOverload | OpOverloadPacket):
        return str(target).startswith("aten")
    return isinstance(
        target, str | types.BuiltinFunctionType | types.FunctionType | types.MethodDescriptorType
    )


def _is_ordinary(trace: Trace, number: FloatValue) -> bool:
    """Whether a number is finite and neither 0 nor 1, where functions may return their argument itself; guarded."""
    return bool(number.ask("whether it is finite, not 0 and not 1", _ordinary))


def _ordinary(value: float) -> bool:
    return math.isfinite(value) and value not in (0.0, 1.0)


def _decides_shapes(call: WithNumbers, given: dict[int | str, Value]) -> bool:
    """Whether the result has another shape, layout or type beside other numbers."""
    own = _specs(call, given, lambda v: v)
    return own is None or any(other not in (None, own) for other in (_specs(call, given, f) for f in _OTHERS))


def _specs(
    call: WithNumbers, given: dict[int | str, Value], change: Callable[[float], float]
) -> list[Any] | None:
    """The specs of the tensors that PyTorch's own function gives beside changed numbers; None where it raises."""
    lowered = {place: lower(v, False) for place, v in given.items() if place not in call.numbers}
    numbers = {place: change(number) for place, number in call.numbers.items()}
    try:
        with shape_mode():
            apart = mapped(lambda x: x.clone() if isinstance(x, ShapeTensor) else x, lowered)  # of writes
            found = call.with_numbers({place: numbers.get(place, apart.get(place)) for place in given})
    except Exception:  # no number for this function
        return None
    return [spec_of(x) for x in leaves_in(found) if isinstance(x, torch.Tensor)]


def _laid_out(trace: Trace, call: WithNumbers, given: dict[int | str, Value], found: Value) -> Value:
    """A formula's result with the strides of PyTorch's own function: a kernel may write rows where the formula's
    elementwise ones keep the order of their operands.
    """
    tensors = [v.example for v in given.values() if isinstance(v, TensorValue)]
    if type(found) is not TensorValue or any(found.example is x for x in tensors):
        return found
    if all(x.is_contiguous() for x in (found.example, *tensors)):
        return found
    specs, own = _specs(call, given, lambda v: v), spec_of(found.example)
    if not specs or not equal(specs[0].shape, own.shape) or equal(specs[0].stride, own.stride):
        return found
    if not is_dense(specs[0]):
        return found
    if specs[0].is_contiguous:
        return torch_call(trace, "contiguous", [found], {})
    order = sorted(range(len(own.shape)), key=lambda d: (-hint(specs[0].stride[d]), d))
    rows = torch_call(trace, "permute", [found, Constant(tuple(order))], {})
    back = tuple(map(order.index, range(len(order))))
    return torch_call(trace, "permute", [torch_call(trace, "contiguous", [rows], {}), Constant(back)], {})


def _by_place(args: list[Value], kwargs: dict[str, Value]) -> dict[int | str, Value]:
    """Arguments by their position or name."""
    given: dict[int | str, Value] = dict(enumerate(args))
    given.update(kwargs)
    return given
