"""PyTorch's lazy modules (`LazyLinear`, ...) get their final class when a trace first calls them, as eager's
first call would make them; the trace is then made again, over the module that it runs from then on.

>>> dynamotor.compile(torch.nn.LazyLinear(4))(torch.ones(2, 3))     # one graph, over weights of 4 by 3
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin

from .breaks import OfTrace
from .values.base import MISSING, Trace, Value
from .values.constant import Constant
from .values.tensor import TensorValue


class Afresh(OfTrace):
    """Ends a trace that changed its own inputs: it starts again."""


def initialise(trace: Trace, cls: type, module: Any, args: list[Value], kwargs: dict[str, Value]) -> None:
    """Initialise a lazy module for a call, and raise Afresh; does nothing where eager's call may find another
    state of random numbers, may not come here, or does more than PyTorch's own classes do."""
    if (
        not issubclass(cls, LazyModuleMixin)
        or not cls.__module__.startswith("torch.nn.modules.")
        or kwargs
        or module is MISSING
        or not _only_waits(module)
        or trace.calls.draws
        or trace.checks.any
        or trace.sizes.in_body
        or trace.graph.recompute
    ):
        return
    inputs = [_stand_in(arg) for arg in args]
    if any(x is MISSING for x in inputs):
        return
    try:
        module._infer_parameters(module, tuple(inputs))
    except Exception:  # of an input that does not fit, before anything is changed: eager raises it
        return
    raise Afresh


def _only_waits(module: torch.nn.Module) -> bool:
    """Whether its initialisation is all that is hooked before a call."""
    hook = vars(module).get("_initialize_hook")
    return hook is not None and list(module._forward_pre_hooks) == [hook.id]


def _stand_in(value: Value) -> object:
    """What shows the module the sizes of its input: that is all that PyTorch's classes look at."""
    if type(value) is TensorValue:
        return value.spec.hinted().empty().to("meta")
    return value.value if type(value) is Constant else MISSING
