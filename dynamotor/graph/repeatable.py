"""Whether a captured graph may be run a second time, beside the call that it was captured for.

>>> if may_run_again(gm, inputs): expected = gm.forward(*copies)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .control_flow import ControlFlow
from .states import STATE_CALLS
from .subgraphs import Transformed

_PLAIN = ("torch", "_operator", "builtins", "math")


def may_run_again(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether the graph has effects on its inputs alone, which are plain tensors with memory of their own."""
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    alone = len({x.untyped_storage()._cdata for x in tensors}) == len(tensors)
    calls = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    return (
        alone
        and "on_backward" not in gm.meta
        and all(type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type == "cpu" for x in tensors)
        and not any(isinstance(f, (Transformed, ControlFlow)) for f in calls)
        and STATE_CALLS.isdisjoint(calls)
        and all(_is_plain(getattr(f, "__module__", None) or "torch") for f in calls)
        and not any("empty" in str(node.target) or "generator" in node.kwargs for node in gm.graph.nodes)
        and not (any("conv" in str(f) for f in calls) and any(map(_is_channels_last, tensors)))
    )


def _is_channels_last(x: torch.Tensor) -> bool:
    """oneDNN's backward of a strided 1×1 convolution over such an image writes beyond memory, as in eager."""
    return x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def _is_plain(module: str) -> bool:
    """Whether a function of a module has no effects: a custom op, or a collective, may have some."""
    ops = module.startswith("torch._ops.")
    return module == "torch._ops.aten" if ops else module.split(".")[0] in _PLAIN
