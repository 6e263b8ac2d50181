"""Predictions of the shape rules for each aten op that a program runs: shape, strides, dtype.

Nothing is compiled, so that this takes a millisecond a program; a finding names the op and its arguments.

>>> with Foretold() as seen:
...     f(x)
>>> seen.wrong
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dynamotor.graph.result_strides import suggests_channels_last
from dynamotor.graph.shape_tensor import DataDependent
from dynamotor.graph.shapes import UnsupportedOp, infer_spec
from dynamotor.graph.spec import TensorSpec


class Foretold(TorchDispatchMode):
    """Asks for the spec of every functional op that runs, and compares it with the result."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: dict[str, str] = {}  # by op
        self.count, self.refused = 0, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable or not _dense((args, kwargs)):
            return func(*args, **kwargs)
        given = _specs(args), {k: _specs(v) for k, v in kwargs.items()}
        result = func(*args, **kwargs)
        self.count += 1
        try:
            foretold = infer_spec(func, *given)
        except (DataDependent, UnsupportedOp) as error:
            self.refused[f"{error.code} {func}"] += 1
            return result
        problem = _differs(result, foretold)
        if problem:
            self.wrong.setdefault(str(func), f"{problem}; arguments {given}")
        return result


def _specs(value: Any) -> Any:
    """The arguments with specs in the place of tensors."""
    if isinstance(value, torch.Tensor):
        return TensorSpec.of(value)
    return type(value)(map(_specs, value)) if type(value) in (tuple, list) else value


def _dense(value: Any) -> bool:
    """Whether all tensors are ones that a graph may hold."""
    if isinstance(value, torch.Tensor):
        return (
            value.layout is torch.strided
            and not value.is_conj()
            and not value.is_neg()
            and not value.is_quantized
        )
    if isinstance(value, dict):
        return all(map(_dense, value.values()))
    return all(map(_dense, value)) if isinstance(value, (tuple, list)) else True


def _differs(result: Any, spec: Any) -> str:
    """How a result differs from its spec."""
    if isinstance(result, (tuple, list)):
        return next((d for r, s in zip(result, spec, strict=True) if (d := _differs(r, s))), "")
    if not isinstance(result, torch.Tensor) or spec is None or result.layout is not torch.strided:
        return ""
    if tuple(result.shape) != tuple(spec.shape) or result.dtype is not spec.dtype:
        return f"{result.dtype}{list(result.shape)} in eager, {spec.dtype}{list(spec.shape)} foretold"
    # Strides where sizes are 1 say nothing, but for the format that other ops read from them.
    told = suggests_channels_last(spec) == suggests_channels_last(TensorSpec.of(result))
    strides = [(s, t) for n, s, t in zip(result.shape, result.stride(), spec.stride, strict=True) if n > 1]
    if result.numel() and (not told or any(s != t for s, t in strides)):
        return f"strides {result.stride()} in eager, {spec.stride} foretold, shape {tuple(result.shape)}"
    return ""
