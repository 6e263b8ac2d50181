"""The XLA bridge as backends of `torch.compile`: its capture sees xla tensors as plain ones.

>>> torch.compile(model.to("xla"), backend="xla")               # found through the package's entry points
>>> torch.compile(model.to("xla"), backend="xla_trace_everytime")

Loaded when `torch.compile` looks one of these names up, before it captures anything.
"""

from __future__ import annotations

import torch

from dynamotor.extension_api import backend_for_torch_compile, capture_as_plain_tensor

from . import collectives, errors, replication, runtime
from .bridge import trace_everytime, trace_once, trivial
from .core import xla_model
from .tensor import XLATensor

# Collectives are ops with checks around them; this process's place among the replicas stays.
_TRACED = (collectives, errors, replication, runtime, xla_model)
capture_as_plain_tensor(XLATensor, ("dynamotor.xla", "jax"), traced=_TRACED)
for function in (replication.size, replication.rank, replication.place):
    torch.compiler.assume_constant_result(function)

xla_backend = backend_for_torch_compile(trace_once)
xla_everytime_backend = backend_for_torch_compile(trace_everytime)
xla_trivial_backend = backend_for_torch_compile(trivial)
