"""Calls like one that the trace has made: layers call the same C functions with tensors of the same kinds, and the
first call shows the results of the others.

>>> key = key_of(trace, torch._C._nn.linear, [x, weight], {}, [x, weight])
>>> note(trace, key, result, [x, weight])           # the spec of its result
>>> again(trace, key)                               # a new tensor like it
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...base import compat
from ...graph.modes import AUTOCAST_DEVICES
from ...graph.shape_tensor import ShapeTensor, spec_of
from ...graph.shapes import argument_key, settings_of_shapes
from .base import Trace

Key = tuple[Any, ...]  # the function first
_OF_C = frozenset(
    (
        types.BuiltinFunctionType,
        types.MethodDescriptorType,
        types.WrapperDescriptorType,
        types.BuiltinMethodType,
    )
)


def key_of(
    trace: Trace, run: Callable[..., Any], args: Any, kwargs: dict[str, Any], tensors: Sequence[Any]
) -> Key | None:
    """All that the result of a C function of PyTorch follows from, but for the settings that a trace does not change;
    None where there is more: a history, symbols, autocast, transforms.
    """
    if (
        type(run) not in _OF_C
        or run in trace.tensors.views
        or not tensors
        or trace.reader.watchers  # they are told of each call's settings
        or compat.transform_depth()
        or any(map(torch.is_autocast_enabled, AUTOCAST_DEVICES))
    ):
        return None
    graded, kinds = torch.is_grad_enabled(), []
    for tensor in tensors:
        if type(tensor) is not ShapeTensor or tensor.spec.is_symbolic or graded and tensor.requires_grad:
            return None
        kinds.append((tensor.requires_grad, tensor.is_inference(), tensor.is_conj(), tensor.is_neg()))
    given = argument_key(spec_of(args)), tuple(kwargs), argument_key(spec_of([*kwargs.values()]))
    key = run, given, tuple(kinds), graded, torch.is_inference_mode_enabled(), settings_of_shapes()
    try:
        hash(key)
    except TypeError:
        return None
    return key


def note(trace: Trace, key: Key, result: Any, given: Sequence[ShapeTensor]) -> None:
    """Keep the spec that a call gave which writes nothing: of a new tensor without a history, where only shapes were
    asked."""
    if type(result) is not ShapeTensor or any(result is tensor for tensor in given):
        return
    if any(result.memory is tensor.memory for tensor in given):
        trace.tensors.views.add(key[0])
    elif trace.calls.asks_shapes and not (result.requires_grad or result.is_conj() or result.is_neg()):
        trace.tensors.results[key] = result.spec


def again(trace: Trace, key: Key | None) -> ShapeTensor | None:
    """The result of a call like one before."""
    spec = None if key is None else trace.tensors.results.get(key)
    return None if spec is None else ShapeTensor.make(spec)
