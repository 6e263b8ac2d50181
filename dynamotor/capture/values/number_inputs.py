"""A changing float as an input of the graph: a tensor of it, with 64 bits and without dimensions.

>>> number_tensor(trace, FloatValue(trace, source, 0.7))
>>> with_inputs(trace, operator.mul, [x, FloatValue(trace, source, 0.7)], {})     # (mul, [x, the tensor])
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ...base.registry import Registry
from ...graph.shape_tensor import ShapeTensor
from ...graph.spec import TensorSpec
from .base import Trace, Value
from .constant import Constant
from .number import FloatValue
from .tensor import TensorValue, function_name, torch_call

# Calls with a float that differs between calls among their options, by the function's name (rules_number_options.py).
number_rules: Registry[str, Callable[..., Value | None]] = Registry("number rule")


def is_option(target: Any, args: list[Value], kwargs: dict[str, Value]) -> bool:
    """Whether a float is more than an operand, which `with_inputs` knows."""
    return bool(kwargs) or len(args) != 2 or function_name(target) not in _WITH_NUMBERS


# Functions of two operands that compute the same with a number and with a tensor of it that has 64 bits and no
# dimensions, where the other operand is a tensor of real numbers.
_WITH_NUMBERS = frozenset(
    [
        f"{form}{name}{end}"
        for name in ("add", "sub", "mul", "div", "truediv", "true_divide", "multiply", "subtract", "divide")
        for form, end in (("", ""), ("i", ""), ("", "_"))
    ]
    + ["lt", "le", "gt", "ge", "eq", "ne", "less", "less_equal", "greater", "greater_equal", "not_equal"]
)
_DIVISIONS = frozenset(("truediv", "div", "true_divide", "divide"))


def with_inputs(
    trace: Trace, target: Any, args: list[Value], kwargs: dict[str, Value]
) -> tuple[Any, list[Value]]:
    """A call of which an operand is a float that differs between calls: the program's input takes its place,
    if nothing else changes by that."""
    place = 0 if type(args[0]) is FloatValue else 1
    number, x = args[place], args[1 - place]
    name = function_name(target)
    if (
        kwargs
        or type(number) is not FloatValue
        or not number.is_exact
        or type(x) is not TensorValue
        or type(x.example) is not ShapeTensor
        or name not in _WITH_NUMBERS
        or not place
        and (isinstance(target, str) or name.endswith("_") or name in _INPLACE_NAMES)
        or trace.sizes.in_body
    ):
        return target, args
    example = x.example
    whole = not (example.is_floating_point() or example.is_complex())
    in_place = name in _INPLACE_NAMES or name.endswith("_")
    is_known = whole or example.dim() or example.dtype in (torch.float32, torch.float64)
    if not is_known or example.is_complex() or whole and (number.kind in (int, np.int64) or in_place):
        return target, args
    value: Value = number_tensor(trace, number)
    dtype = torch.get_default_dtype() if whole else example.dtype
    if dtype is not torch.float64 and (whole or not example.dim()):  # rounded as eager rounds a number
        value = torch_call(trace, "to", [value, Constant(dtype)], {})
    if not place and name in _DIVISIONS:  # PyTorch divides a number by a tensor in this way
        return operator.mul, [torch_call(trace, "reciprocal", [x], {}), value]
    if not place and name == "mul":  # of two factors, kernels round the first
        return target, [x, value]
    return target, [value, x] if not place else [x, value]


def number_tensor(trace: Trace, number: FloatValue) -> TensorValue:
    """The input of the graph that holds a number, in 64 bits."""
    source, tensor = number.tensor()
    key = f"tensor {number.text}"
    if key not in trace.numbers.floats:
        spec = TensorSpec.of(tensor)
        trace.numbers.floats[key] = TensorValue(trace, None, ShapeTensor.make(spec), source, tensor)
        trace.sizes.floats |= {one.source: one.now for one in number.made_of}
    return trace.numbers.floats[key]


_INPLACE_NAMES = frozenset(f"i{name}" for name in ("add", "sub", "mul", "truediv"))
