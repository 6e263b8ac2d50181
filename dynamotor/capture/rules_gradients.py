"""`.grad` of leaves from outside, read and set in a trace, and functions that work on lists of gradients.

The gradient that is there at the call is an input like any other tensor, or None; a trace runs no backward, so
nothing but the program changes it. One that the program sets is set behind the graph.

>>> total = sum(p.grad.square().sum() for p in model.parameters()); model.zero_grad()
"""

from __future__ import annotations

import torch

from ..base import compat
from ..graph.shape_tensor import ShapeTensor
from .polyfills import tensors
from .source import Attr
from .values.base import MISSING, Trace, Value, builtin_rule, calls_python
from .values.constant import is_none
from .values.data_writes import layout
from .values.tensor import TensorValue, attribute_rules, attribute_setters, refuse_autograd_state


@attribute_rules.register("grad")
def _gradient(trace: Trace, tensor: TensorValue) -> Value:
    if not _has_own(trace, tensor):
        raise refuse_autograd_state()
    given = tensor.attributes.get("grad")
    return given or trace.wrap(Attr(tensor.source, "grad"), tensor.obj.grad)


@attribute_setters.register("grad")
def _gradient_is_set(trace: Trace, tensor: TensorValue, value: Value) -> bool:
    if not _has_own(trace, tensor) or value is tensor or not (is_none(value) or _is_alike(tensor, value)):
        return False
    tensor.attributes["grad"] = value
    trace.effects.touch(tensor)
    return True


def _has_own(trace: Trace, tensor: TensorValue) -> bool:
    """Whether the tensor is a plain leaf from outside, and the code runs in the call: not once more in its
    backward.
    """
    outside = tensor.obj is not MISSING and type(tensor.example) is ShapeTensor and tensor.carrier is None
    if not outside or trace.sizes.in_body or trace.graph.recompute:
        return False
    leaf = trace.reader.attribute(tensor.source, tensor.obj, "is_leaf")
    return leaf is not None and leaf.is_constant() and leaf.as_constant() is True


def _is_alike(tensor: TensorValue, value: Value) -> bool:
    """Whether autograd takes the value for a gradient."""
    if (
        not isinstance(value, TensorValue)
        or type(value.example) is not ShapeTensor
        or value.carrier is not None
    ):
        return False
    return layout(value.example)[:3] == layout(tensor.example)[:3]


builtin_rule(compat.group_tensors)(calls_python(tensors.group_tensors))
builtin_rule(torch.optim.Optimizer.zero_grad)(calls_python(tensors.zero_grad))
