"""The real object that a value stands for in the call that is captured, for functions whose result is taken
as a constant.

>>> now(trace, x)      # x = linear(inputs): computed once, from the inputs of this call
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...graph.spec import duplicate
from ..breaks import unsupported, unsupported_if
from .base import MISSING, Trace, Value
from .containers import DictValue, SequenceValue
from .known import run_node
from .tensor import TensorValue, writes_inputs


def now(trace: Trace, value: Value) -> Any:
    """The object, as the program would have it here. Raises Unsupported where the trace changed something
    that it may be made of, or nothing says what it is.
    """
    if trace.effects.changes_objects or writes_inputs(trace) or trace.sizes.in_body:
        raise _unknown(value, "the program changed objects before")
    if isinstance(value, TensorValue):
        return value.obj if value.source is not None else _computed(trace, value.node)
    if isinstance(value, DictValue) and value.source is None:
        return {key.as_constant(): now(trace, item) for key, item in value.load().values()}
    if isinstance(value, SequenceValue) and value.source is None:
        return value.kind([now(trace, item) for item in value.items])
    return value.real() if not value.is_constant() and value.real() is not MISSING else value.as_constant()


def _computed(trace: Trace, wanted: fx.Node) -> torch.Tensor:
    """Run the graph up to a node, on copies of the real inputs."""
    unsupported_if(
        trace.draws, "random", "a function whose result is constant takes a tensor of random numbers"
    )
    env: dict[fx.Node, Any] = {}
    held: dict[int, torch.UntypedStorage] = {}
    copies = (duplicate(e, held) if isinstance(e, torch.Tensor) else e for e in trace.graph.examples)
    with torch.no_grad():
        for node in trace.graph.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(copies)
            else:
                run_node(node, env)
            if node is wanted:
                break
    return env[wanted]


def _unknown(value: Value, cause: str) -> Exception:
    return unsupported(
        "unsupported-value", f"{value.describe()} is given to a function whose result is constant", cause
    )
