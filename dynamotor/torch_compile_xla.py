"""The XLA bridge as backends of `torch.compile`: its capture sees xla tensors as plain ones.

>>> torch.compile(model.to("xla"), backend="dynamotor_xla")               # found through the package's entry points
>>> torch.compile(model.to("xla"), backend="dynamotor_xla_trace_everytime")

Loaded when `torch.compile` looks one of these names up, before it captures anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.variables import builder

from .base.events import counters
from .xla.bridge import trace_everytime, trace_once
from .xla.tensor import XLATensor

_wrap = builder.VariableBuilder._wrap


def _wrap_plain(self: Any, value: Any) -> Any:
    return self.wrap_tensor(value) if type(value) is XLATensor else _wrap(self, value)


builder.VariableBuilder._wrap = _wrap_plain


def xla_backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
    """`trace_once` under `torch.compile`'s capture. Graphs with symbolic sizes run op by op (counted)."""
    return _bridge(trace_once, gm, example_inputs)


def xla_everytime_backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
    """`trace_everytime` under `torch.compile`'s capture."""
    return _bridge(trace_everytime, gm, example_inputs)


def _bridge(backend: Callable, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    if not all(isinstance(x, torch.Tensor) for x in example_inputs):
        counters["fallback"]["torch.compile: symbolic sizes"] += 1
        return gm.forward
    return backend(gm, list(example_inputs))
