"""The XLA bridge as backends of `torch.compile`: its capture sees xla tensors as plain ones.

>>> torch.compile(model.to("xla"), backend="xla")               # found through the package's entry points
>>> torch.compile(model.to("xla"), backend="xla_trace_everytime")

Loaded when `torch.compile` looks one of these names up, before it captures anything.
"""

from __future__ import annotations

from dynamotor.extension_api import backend_for_torch_compile, capture_as_plain_tensor

from .bridge import trace_everytime, trace_once, trivial
from .tensor import XLATensor

capture_as_plain_tensor(XLATensor, ("dynamotor.xla", "jax"))

xla_backend = backend_for_torch_compile(trace_once)
xla_everytime_backend = backend_for_torch_compile(trace_everytime)
xla_trivial_backend = backend_for_torch_compile(trivial)
