"""Shapes of results for the aten ops that have no meta kernel of their own: without one an op would run on
the CPU.

>>> torch.ops.aten._masked_softmax(torch.ones(2, 3, device="meta"), mask)
tensor(..., device='meta', size=(2, 3))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._meta_registrations  # PyTorch's own rows come first: ours only fill its gaps

aten = torch.ops.aten


def _like(position: int) -> Callable[..., torch.Tensor]:
    """The result has the shape and type of one argument."""
    return lambda *args, **kwargs: torch.empty_like(args[position])


def _geqrf(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(a), a.new_empty((*a.shape[:-2], min(a.shape[-2:])))


def _batch_statistics(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    return x.new_empty(x.shape[1], dtype=dtype), x.new_empty(x.shape[1], dtype=dtype)


SHAPES: dict[str, Callable[..., Any]] = {
    "multi_margin_loss_backward": _like(1),
    "multilabel_margin_loss_backward": _like(1),
    "binomial": _like(0),
    "_standard_gamma_grad": _like(0),
    "_sample_dirichlet": _like(0),
    "_masked_softmax": _like(0),
    "_masked_softmax_backward": _like(0),
    "geqrf": _geqrf,
    "batch_norm_update_stats": _batch_statistics,
}


def install() -> torch.library.Library:
    """Register the rows that this PyTorch lacks. The kernels live as long as the result."""
    library = torch.library.Library("aten", "IMPL")
    for name, shape in SHAPES.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            library.impl(name, shape, "Meta")
    return library


_library = install()
