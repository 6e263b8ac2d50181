"""Jagged tensors from outside, and attention over them where PyTorch splits them by their lengths: it runs as it is,
between compiled parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..base.compat import NestedTensor, nested_functions
from ..graph.shape_tensor import ShapeTensor
from .source import DictItem, InstanceDict, SizeOf, Source
from .values.base import Trace, Value
from .values.tensor import TensorValue, live_calls, torch_call


def note_lengths(trace: Trace, source: Source) -> None:
    """Of a jagged tensor from outside: how many rows there are, and the longest and shortest one, are equal to
    other sizes by chance."""
    held = InstanceDict(source)
    cached = [DictItem(DictItem(held, "_metadata_cache"), name) for name in ("min_seqlen", "max_seqlen")]
    rows = [DictItem(held, name) for name in ("_offsets", "_lengths")]
    trace.sizes.alone.update([SizeOf(part, 0) for part in (*rows, *cached)])


def splits_by_lengths(args: Iterable[Value]) -> bool:
    """Whether attention of these operands reads the lengths: ragged rows of heads outside of a GPU."""
    examples: list[Any] = [value.example for value in args if isinstance(value, TensorValue)]
    return any(
        type(x) is NestedTensor and x.device.type != "cuda" and (x.dim() < 4 or x._ragged_idx != 1)
        for x in examples
    )


def split_attention(
    trace: Trace, fn: Callable[..., Any], args: list[Value], kwargs: dict[str, Value]
) -> Value:
    """The call, made by PyTorch each time."""
    with live_calls(trace, "attention over jagged tensors splits them by their lengths"):
        return torch_call(trace, fn, args, kwargs)


def jagged_attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """`scaled_dot_product_attention`; of tensors without data, one that looks like the result: rows as ragged as the
    query's, as wide as the value's."""
    if not isinstance(query._values, ShapeTensor):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, *args, **kwargs)
    rows, more = query.transpose(1, 2).values(), key.values().sum() + value.values().sum()
    made = (rows[..., :1] * more).expand(*rows.shape[:-1], value.shape[-1]).contiguous()
    as_ragged = nested_functions.nested_view_from_values_offsets_lengths
    return as_ragged(made, query.offsets(), query.lengths()).transpose(1, 2)
