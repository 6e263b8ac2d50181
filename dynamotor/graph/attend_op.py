"""`torch.ops.dynamotor.attend`: attention of a few queries over many keys, which a step of decoding asks for.

>>> out = torch.ops.dynamotor.attend(q, k, v, mask, 0.125, q.stride())     # q: [batch, heads, rows, width]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .op_definition import layout, require, require_fits
from .spec import TensorSpec

_library = torch.library.Library("dynamotor", "FRAGMENT")
_ARGUMENTS = "Tensor query, Tensor key, Tensor value, Tensor? mask, float scale, SymInt[] stride"
_library.define(f"attend({_ARGUMENTS}) -> Tensor")
_library.define(f"attend.out({_ARGUMENTS}, *, Tensor(a!) out) -> Tensor(a!)")


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    stride: Sequence[int],
) -> torch.Tensor:
    """softmax(scale · query keyᵀ + mask) value by PyTorch's own attention.

    query: [batch, heads, rows, e], key: [batch, heads, length, e], value: [batch, heads, length, f], mask:
    floats that broadcast to [batch, heads, rows, length] (-inf: not attended). The result,
    [batch, heads, rows, f], has the given strides.
    """
    found = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scale)
    return torch.empty_strided(found.shape, stride, dtype=query.dtype, device=query.device).copy_(found)


def attend_out(*given: Any, out: torch.Tensor) -> torch.Tensor:
    """`attend` into the memory of `out`."""
    return out.copy_(attend(*given))


_library.impl("attend", attend, "CompositeExplicitAutograd")
_library.impl("attend.out", attend_out, "CompositeExplicitAutograd")


@layout(torch.ops.dynamotor.attend.default)
def _attend_layout(
    query: TensorSpec,
    key: TensorSpec,
    value: TensorSpec,
    mask: TensorSpec | None,
    scale: float,
    stride: Sequence[int],
) -> TensorSpec:
    require(query.shape[-1] == key.shape[-1] and tuple(query.shape[:2]) == tuple(key.shape[:2]))
    require(tuple(key.shape[:3]) == tuple(value.shape[:3]))
    if mask is not None:
        require_fits(mask.shape, (*query.shape[:3], key.shape[2]))
    return TensorSpec((*query.shape[:3], value.shape[3]), tuple(stride), query.dtype, query.device)
