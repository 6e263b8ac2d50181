"""Functions of tensors whose composites forget, on tensors without data, to look at the data."""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten
UPSAMPLING = {  # by mode and number of dimensions
    ("nearest", 1): aten.upsample_nearest1d.default, ("nearest", 2): aten.upsample_nearest2d.default,
    ("nearest", 3): aten.upsample_nearest3d.default, ("nearest-exact", 1): aten._upsample_nearest_exact1d.default,
    ("nearest-exact", 2): aten._upsample_nearest_exact2d.default, ("nearest-exact", 3): aten._upsample_nearest_exact3d.default,
    ("linear", 1): aten.upsample_linear1d.default, ("bilinear", 2): aten.upsample_bilinear2d.default,
    ("trilinear", 3): aten.upsample_trilinear3d.default, ("bicubic", 2): aten.upsample_bicubic2d.default,
}  # fmt: skip


def one_hot(tensor: torch.Tensor, num_classes: int) -> torch.Tensor:
    """As eager writes it, so that a class out of range is an index out of range."""
    zeros = torch.zeros((*tensor.shape, num_classes), dtype=torch.int64, device=tensor.device)
    return zeros.scatter(-1, tensor.unsqueeze(-1), 1)


def split(x: torch.Tensor, sizes: Any, dim: int) -> tuple[torch.Tensor, ...]:
    """Parts of sizes that data decides, which eager checks in one go."""
    whole, end, parts = x.shape[dim], 0, []
    for n in sizes:
        torch._check(n >= 0)
        end = end + n
    torch._check(end == whole)
    end = 0
    for n in sizes:
        torch._check(end + n <= whole)
        parts.append(x.narrow(dim, end, n))
        end = end + n
    return tuple(parts)


def interpolate(
    x: torch.Tensor, size: Any, scale: Any, mode: str, aligned: bool | None, recompute: bool | None
) -> torch.Tensor:
    """`interpolate` down to the op, whose C++ entry takes plain sizes only."""
    rank = x.dim() - 2
    shape, scales = [], []
    for d in range(rank):
        step = scale[d] if isinstance(scale, (tuple, list)) else scale
        scales.append(None if step is None or recompute else float(step))
        if step is None:
            shape.append(size[d] if isinstance(size, (tuple, list)) else size)
        else:
            shape.append(_scaled(x.shape[2 + d], step))
    op = UPSAMPLING[mode, rank]
    return op(x, shape, *scales) if mode.startswith("nearest") else op(x, shape, bool(aligned), *scales)


def _scaled(n: int, step: float) -> int:
    """floor(n * step); exact powers of two keep a size that is a symbol one."""
    if step == int(step):
        return n * int(step)
    return n // int(1 / step) if step in (0.5, 0.25, 0.125) else int(float(n) * step)


def group_tensors(
    lists: list[list[Any]], with_indices: bool = False
) -> dict[tuple[torch.device, torch.dtype], tuple[list[list[Any]], list[int]]]:
    """Lists of tensors, or None, cut into groups of one device and dtype by the first list."""
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[list[Any]], list[int]]] = {}
    for number, first in enumerate(lists[0]):
        parts, numbers = groups.setdefault((first.device, first.dtype), ([[] for _ in lists], []))
        for part, items in zip(parts, lists, strict=True):
            if items:
                part.append(items[number])
        if with_indices:
            numbers.append(number)
    return groups


def zero_grad(optimizer: Any, set_to_none: bool = True) -> None:
    """`Optimizer.zero_grad`, without its entry in profiles."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None and set_to_none:
                p.grad = None
            elif p.grad is not None:
                if p.grad.grad_fn is not None:
                    p.grad.detach_()
                else:
                    p.grad.requires_grad_(False)
                p.grad.zero_()
