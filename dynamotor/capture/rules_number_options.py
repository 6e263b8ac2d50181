"""Floats that differ between calls as options of torch functions (`alpha=`, bounds, weights, what is filled
in), and as arguments of custom autograd functions: the call is written with a tensor of the number, an input
of the graph.

>>> torch.add(x, y, alpha=k), x.clamp(max=k), x.lerp(y, k), torch.full((3,), k)
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Sequence

import numpy as np
import torch

from ..graph.shape_tensor import ShapeTensor
from .polyfills import number_options
from .values.base import Kwargs, Trace, Value, builtin_rule
from .values.constant import Constant, is_none
from .values.number import FloatValue
from .values.number_inputs import number_rules, number_tensor
from .values.tensor import TensorValue, torch_call

_NAMES = {
    "__setitem__": "setitem",
    "mod": "remainder",
    "__pow__": "pow",
    "__rpow__": "pow",
    "_threshold": "threshold",
}
# Options that are read as tensors where they are floats; another float among the arguments stays a number.
_NUMBERS = frozenset(
    (
        "alpha",
        "beta",
        "value",
        "min",
        "max",
        "weight",
        "fill_value",
        "data",
        "input",
        "other",
        "negative_slope",
        "scale",
        "exponent",
        "threshold",
        "min_val",
        "max_val",
        "lambd",
        "delta",
        "eps",
        "momentum",
        "nan",
        "posinf",
        "neginf",
        "start",
        "end",
        "rtol",
        "atol",
        "q",
        "maxnorm",
        "margin",
    )
)
# These give floats beside whole numbers. Of others the input's type decides: it rounds the number, or eager refuses.
_OF_WHOLE_NUMBERS = frozenset(
    (
        number_options.clamp,
        number_options.clamp_min,
        number_options.clamp_max,
        number_options.where,
        number_options.remainder,
        number_options.fmod,
    )
)
# Their polyfills have intermediate results, which kernels for 16-bit floats do not round, nor does eager take two types.
_ONE_WIDE_TYPE = frozenset(
    (
        number_options.pow,
        number_options.celu,
        number_options.softplus,
        number_options.softshrink,
        number_options.huber_loss,
        number_options.smooth_l1_loss,
        number_options.layer_norm,
        number_options.rms_norm,
        number_options.group_norm,
        number_options.batch_norm,
        number_options.instance_norm,
        number_options.normalize,
        number_options.logit,
        number_options.cosine_similarity,
        number_options.isclose,
        number_options.quantile,
        number_options.renorm,
        number_options.triplet_margin_loss,
        number_options.margin_ranking_loss,
    )
)


def _rewritten(function: types.FunctionType, trace: Trace, /, *args: Value, **kwargs: Value) -> Value | None:
    """The call by its polyfill; None where it has other arguments, or tensors that a number's type may
    change."""
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    given = dict(zip(names, args)) | {{"self": "input"}.get(name, name): v for name, v in kwargs.items()}
    numbers = {name: v for name, v in given.items() if type(v) is FloatValue}
    tensors = [v for v in given.values() if isinstance(v, TensorValue)]
    if (
        len(args) > len(names)
        or not given.keys() <= set(names)
        or len(given) != len(args) + len(kwargs)
        or not numbers.keys() <= _NUMBERS
        or trace.sizes.in_body
        or not all(map(_takes_number, tensors))
        or function not in _OF_WHOLE_NUMBERS
        and not _is_floating(given.get("input"))
        or any(number.kind is np.int64 for number in numbers.values())
        and not any(tensor.example.is_floating_point() for tensor in tensors)
        or function in _ONE_WIDE_TYPE
        and {tensor.example.dtype for tensor in tensors} not in ({torch.float32}, {torch.float64})
        or not all(number.is_exact and _is_in_range(trace, number, tensors) for number in numbers.values())
    ):
        return None
    found = trace.call_python(function, [], given)
    return None if type(found) is Constant and found.value is NotImplemented else found


def _takes_number(value: TensorValue) -> bool:
    """Whether a tensor keeps its type beside a number, as beside a tensor of it."""
    example = value.example
    integral = example.dtype in (torch.bool, torch.int64)  # a mask or an index
    return type(example) is ShapeTensor and (example.is_floating_point() or integral)


def _is_floating(value: Value | None) -> bool:
    """Whether it is no tensor of whole numbers."""
    return not isinstance(value, TensorValue) or value.example.is_floating_point()


def _is_in_range(trace: Trace, number: FloatValue, tensors: Sequence[TensorValue]) -> bool:
    """Whether the number is finite, and small enough for float32 and the tensors' types; guarded, since eager
    refuses some others."""
    types = [tensor.example.dtype for tensor in tensors if tensor.example.is_floating_point()]
    small = trace.make(min(torch.finfo(dtype).max for dtype in (torch.float32, *types)))
    return trace.truth(trace.binary(operator.le, trace.call(trace.make(abs), [number]), small))


@builtin_rule(number_options.number)
def _number(trace: Trace, value: Value, like: Value) -> Value:
    if is_none(value) or isinstance(value, TensorValue):
        return value
    assert isinstance(like, TensorValue)
    example = like.example
    dtype = example.dtype if example.is_floating_point() else torch.get_default_dtype()
    if type(value) is not FloatValue:
        named: Kwargs = {"dtype": Constant(dtype), "device": Constant(example.device)}
        return torch_call(trace, torch.full, [Constant(()), value], named)
    found: Value = number_tensor(trace, value)
    if dtype is not torch.float64 or example.device.type != "cpu":
        found = torch_call(trace, "to", [found, Constant(example.device), Constant(dtype)], {})
    return found


for _name, _function in vars(number_options).items():
    if isinstance(_function, types.FunctionType) and _name != "number" and not _name.startswith("_"):
        number_rules.add(_name, functools.partial(_rewritten, _function))
for _alias, _name in _NAMES.items():
    number_rules.add(_alias, number_rules[_name])
