"""Ops whose result is as long as the data say: the length is read at a sync, the data stay on the device.

>>> torch.nonzero(torch.tensor([0, 3, 5], device="xla"))
tensor([[1],
        [2]], device='xla:0')
"""

from __future__ import annotations

from typing import Any

import torch

from .dispatch import specials
from .specials import bind

aten = torch.ops.aten


@specials.register(aten.nonzero.default)
def _nonzero(func: Any, args: tuple, kwargs: Any) -> torch.Tensor:
    return torch.nonzero_static(args[0], size=int(torch.count_nonzero(args[0])))


@specials.register(aten.masked_select.default)
def _masked_select(func: Any, args: tuple, kwargs: Any) -> torch.Tensor:
    x, mask = torch.broadcast_tensors(*args)
    if mask.dtype is not torch.bool:
        raise RuntimeError("masked_select: expected BoolTensor for mask")
    return aten.take(x, mask.reshape(-1).nonzero()[:, 0])


@specials.register(aten.bincount.default)
def _bincount(func: Any, args: tuple, kwargs: Any) -> torch.Tensor:
    x, weights, shortest = bind(func, args, kwargs).values()
    if x.dim() != 1 or x.dtype.is_floating_point or (x.numel() and int(x.min()) < 0):
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    size = max(int(x.max()) + 1 if x.numel() else 0, shortest)
    each = torch.ones_like(x, dtype=torch.int64) if weights is None else weights
    each = each if each.dtype in (torch.int64, torch.float32) else each.double()
    return torch.zeros(size, dtype=each.dtype, device=x.device).index_add(0, x.long(), each)


@specials.register(aten._unique2.default)
def _unique(func: Any, args: tuple, kwargs: Any) -> tuple[torch.Tensor, ...]:
    """By a sort: sorted, whatever is asked; positions and counts come with it."""
    x = args[0]
    values, order = x.reshape(-1).sort(stable=True)
    first = torch.ones_like(values, dtype=torch.bool)
    first[1:] = values[1:] != values[:-1]
    places = first.nonzero()[:, 0]
    inverse = torch.empty_like(order).scatter(0, order, first.cumsum(0) - 1).reshape(x.shape)
    return values[places], inverse, torch.diff(places, append=places.new_full((1,), x.numel()))
