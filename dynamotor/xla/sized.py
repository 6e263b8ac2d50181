"""Ops whose result is as long as the data say: the length is read at a sync, the data stay on the device.

>>> torch.nonzero(torch.tensor([0, 3, 5], device="xla"))
tensor([[1],
        [2]], device='xla:0')
"""

from __future__ import annotations

from typing import Any

import torch

from .dispatch import specials
from .lowering import aten, decomposition
from .specials import bind


@specials.register(aten.nonzero.default)
def _nonzero(func: Any, args: tuple, kwargs: Any) -> torch.Tensor:
    return torch.nonzero_static(args[0], size=int(torch.count_nonzero(args[0])))


@specials.register(aten.masked_select.default)
def _masked_select(func: Any, args: tuple, kwargs: Any) -> torch.Tensor:
    x, mask = torch.broadcast_tensors(*args)
    torch._check(mask.dtype is torch.bool, lambda: "masked_select: expected BoolTensor for mask")
    return aten.take(x, mask.reshape(-1).nonzero()[:, 0])


@specials.register(aten.bincount.default)
def _bincount(func: Any, args: tuple, kwargs: Any) -> torch.Tensor:
    x, weights, shortest = bind(func, args, kwargs).values()
    torch._check(
        x.dim() == 1 and not x.dtype.is_floating_point and (not x.numel() or int(x.min()) >= 0),
        lambda: "bincount only supports 1-d non-negative integral inputs.",
    )
    size = max(int(x.max()) + 1 if x.numel() else 0, shortest)
    each = torch.ones_like(x, dtype=torch.int64) if weights is None else weights
    each = each if each.dtype in (torch.int64, torch.float32) else each.double()
    return torch.zeros(size, dtype=each.dtype, device=x.device).index_add(0, x.long(), each)


@specials.register(aten._unique2.default)
def _unique(func: Any, args: tuple, kwargs: Any) -> tuple[torch.Tensor, ...]:
    """By a sort: sorted, whatever is asked; positions and counts come with it."""
    x = args[0]
    values, order = x.reshape(-1).sort(stable=True)
    places, run, counts = _runs(values)
    return values[places], torch.empty_like(order).scatter(0, order, run).reshape(x.shape), counts


@specials.register(aten.unique_consecutive.default)
def _unique_consecutive(func: Any, args: tuple, kwargs: Any) -> tuple[torch.Tensor, ...]:
    x, inverse, counted, dim = bind(func, args, kwargs).values()
    rows = x.reshape(-1) if dim is None else x.movedim(dim, 0).flatten(1) if x.numel() else x
    places, run, counts = _runs(rows)
    values = rows[places] if dim is None else x.index_select(dim, places)
    run, nothing = run if dim is not None else run.reshape(x.shape), places.new_empty(0)
    return values, run if inverse else nothing, counts if counted else nothing


def _runs(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of runs of equal rows: where each begins, which one a row is in, how long each is."""
    differs = rows[1:] != rows[:-1]
    first = torch.ones_like(rows[:, 0] if rows.dim() > 1 else rows, dtype=torch.bool)
    first[1:] = differs.any(1) if rows.dim() > 1 else differs
    places = first.nonzero()[:, 0]
    return places, first.cumsum(0) - 1, torch.diff(places, append=places.new_full((1,), len(rows)))


@specials.register("torchvision::nms")
def _nms(func: Any, args: tuple, kwargs: Any) -> torch.Tensor:
    """torchvision's: the boxes that are kept, from the highest score down."""
    boxes, scores, overlap = bind(func, args, kwargs).values()
    order = scores.sort(dim=0, descending=True, stable=True).indices
    rank = torch.arange(len(boxes), 0, -1, device=boxes.device).double()
    limits = [torch.tensor(limit, device=boxes.device, dtype=torch.float64) for limit in (0.0, overlap)]
    kept, count = torch.ops.dynamotor_xla.nms(boxes[order], rank, *limits, len(boxes))
    return order[kept[: int(count)]]


@decomposition(aten.histogram.bin_ct)
def _histogram(x, bins, *, range=None, weight=None, density=False):  # noqa: A002 - aten's name
    low, high = (
        (x.new_tensor(end) for end in range) if range else x.aminmax() if x.numel() else x.new_tensor([0, 1])
    )
    low, high = torch.where(low == high, low - 0.5, low), torch.where(low == high, high + 0.5, high)
    return _counted(x, torch.linspace(low, high, bins + 1, dtype=x.dtype), weight=weight, density=density)


@decomposition(aten.histogram.bins_tensor)
def _counted(x, bins, *, weight=None, density=False):
    """(what lies between one edge and the next, the last one included; the edges)."""
    x, each = x.reshape(-1), torch.ones_like(x) if weight is None else weight
    inside = (x >= bins[0]) & (x <= bins[-1])
    place = torch.searchsorted(bins, x, right=True).clamp(1, len(bins) - 1) - 1
    counts = torch.zeros_like(bins[1:]).index_add(0, place, torch.where(inside, each.reshape(-1), 0))
    return counts / (counts.sum() * bins.diff()) if density else counts, bins
