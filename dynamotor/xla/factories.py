"""Ops that make xla tensors from nothing: they reach PyTorch's XLA dispatch key, where one boxed kernel
records them.

>>> torch.arange(3, device="xla")
"""

from __future__ import annotations

from typing import Any

import torch

from .conversion import mark
from .device import lane_of
from .dispatch import make, specials
from .ir import lock
from .specials import to_device
from .storage import memory_of

aten = torch.ops.aten
_library = torch.library.Library("_", "IMPL")
_aten = torch.library.Library("aten", "IMPL")


def _factory(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The kernel of every op whose arguments hold no xla tensor but whose result shall be one."""
    device = kwargs.pop("device", None)
    with lock:
        lane = lane_of(device if device is not None else "xla")
        if func is aten.empty_strided.default:
            return memory_of(args[0], args[1], kwargs, lane)
        return make(func, args, kwargs, lane)


def _to_copy(
    tensor: torch.Tensor, dtype: torch.dtype | None = None, device: Any = None, **_: Any
) -> torch.Tensor:
    with lock:
        return mark(tensor, to_device(tensor, dtype or tensor.dtype, device))


def _copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    with lock:
        return specials[aten.copy_.default](aten.copy_.default, (target, source), None)


def install() -> None:
    """Register the kernels. `torch.tensor(..., device="xla")` copies with Python dispatch switched off, so
    copies need kernels of their own."""
    _library.fallback(_factory, "XLA")
    _aten.impl("_to_copy", _to_copy, "XLA")
    _aten.impl("copy_", _copy_, "XLA")
