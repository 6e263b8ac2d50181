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
from ...graph.shape_tensor import ShapeTensor, shape_mode, spec_of
from ...graph.sizes import leaves_in, mapped
from .base import Trace, Value
from .number import FloatValue
from .number_inputs import is_option, number_rules, number_tensor, with_inputs
from .tensor import call_with_numbers, function_name, lower, torch_call

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
        return found
    if len(args) == 2:
        changed, operands = with_inputs(trace, target, args, kwargs)
        if operands is not args:
            return torch_call(trace, changed, operands, kwargs)
    return _late(trace, target, args, kwargs)


def _late(
    trace: Trace, target: Callable[..., Any] | str, args: list[Value], kwargs: dict[str, Value]
) -> Value | None:
    """The call as a node that PyTorch runs; None where the numbers are constants of the program."""
    given: dict[int | str, Value] = dict(enumerate(args))
    given.update(kwargs)
    numbers = {place: v for place, v in given.items() if type(v) is FloatValue}
    if (
        not _is_torchs(target)
        or trace.graph.recompute
        or trace.graph.live
        or not trace.sizes.takes_data
        or not all(number.kind is float and _is_ordinary(trace, number) for number in numbers.values())
    ):
        return None
    made = WithNumbers(target, {place: number.at_this_call for place, number in numbers.items()})
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
    lowered = {place: lower(v, False) for place, v in given.items() if place not in call.numbers}

    def specs(change: Callable[[float], float]) -> list[Any] | None:
        numbers = {place: change(number) for place, number in call.numbers.items()}
        try:
            with shape_mode():
                apart = mapped(lambda x: x.clone() if isinstance(x, ShapeTensor) else x, lowered)  # of writes
                found = call.with_numbers({place: numbers.get(place, apart.get(place)) for place in given})
        except Exception:  # no number for this function
            return None
        return [spec_of(x) for x in leaves_in(found) if isinstance(x, torch.Tensor)]

    own = specs(lambda v: v)
    return own is None or any(other not in (None, own) for other in map(specs, _OTHERS))
