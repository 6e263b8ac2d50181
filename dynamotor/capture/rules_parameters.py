"""`nn.Parameter(...)` in a trace: a leaf that is made before the graph, at each call, and is filled in it.

The graph takes the new leaf as an input and copies its contents into it, so gradients reach it
as they reach any other input. In eager both share memory: who looks at the other one afterwards breaks the graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..base import compat
from ..graph.shape_tensor import ShapeTensor
from ..graph.spec import TensorSpec
from .breaks import unsupported_if
from .source import Made
from .values.base import Trace, Value, builtin_rule
from .values.constant import FALSE, Constant
from .values.tensor import TensorValue, torch_call


@builtin_rule(compat.make_subclass)
def _make_subclass(trace: Trace, cls: Value, data: Value, require_grad: Value = FALSE) -> Value:
    unsupported_if(
        not _can_be_made(trace, cls, data, require_grad),
        "unsupported-call",
        "a tensor of a subclass, or a parameter that shares memory with a tensor from outside, is made",
        cure="make it outside the compiled function",
    )
    assert isinstance(data, TensorValue)
    leaf = _leaf(data.spec, require_grad.as_constant())
    source = Made(leaf, "a new parameter")
    spec = data.spec
    node = trace.graph.input(source, leaf(), spec, static=False, name="new_parameter")
    example = ShapeTensor.make(spec, requires_grad=require_grad.as_constant())
    made = TensorValue(trace, node, example, cls=nn.Parameter)
    graded = torch.is_grad_enabled()
    set_graded = trace.make(compat.set_grad_enabled)
    trace.call(set_graded, [Constant(False)])
    torch_call(trace, "copy_", [made, data], {})
    trace.call(set_graded, [Constant(graded)])
    trace.tensors.given_away.add(data.memory)
    return made


def _can_be_made(trace: Trace, cls: Value, data: Value, wanted: Value) -> bool:
    if type(data) is not TensorValue or data.source is not None or wanted.python_type() is not bool:
        return False
    example = data.example
    real = example.is_floating_point() or example.is_complex()
    return (
        cls.is_constant()
        and cls.as_constant() is nn.Parameter
        and (real or not wanted.as_constant())
        and not example.spec.is_symbolic
        and example.spec.is_contiguous
        and not example.spec.offset
        and not any(value.memory is example.memory for value in trace.tensors.outside)
        and not (trace.sizes.in_body or trace.graph.recompute or torch.is_inference_mode_enabled())
    )


def _leaf(spec: TensorSpec, wanted: bool) -> Callable[[], nn.Parameter]:
    """Makes an empty parameter of the spec."""
    return lambda: nn.Parameter(spec.empty(), wanted)
