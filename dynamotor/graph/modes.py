"""Grad mode and autocast, which a trace changes for real: read, and put back.

>>> with preserved_modes():
...     torch._C._set_grad_enabled(False)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

AUTOCAST_DEVICES = ("cpu", "cuda")


@contextlib.contextmanager
def preserved_modes() -> Iterator[None]:
    """Put grad mode and autocast back as they were: a trace changes them for real and may stop anywhere."""
    grad = torch.is_grad_enabled()
    cache = torch.is_autocast_cache_enabled()
    autocast, nesting = autocast_state(), _nesting()
    try:
        yield
    finally:
        torch._C._set_grad_enabled(grad)
        torch.set_autocast_cache_enabled(cache)
        for _ in range(_nesting() - nesting):
            torch.autocast_decrement_nesting()
        if not nesting:
            torch.clear_autocast_cache()
        for device, (enabled, dtype) in autocast.items():
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)


def autocast_state() -> dict[str, tuple[bool, torch.dtype]]:
    """Whether autocast is on, and its type, by kind of device."""
    return {
        device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in AUTOCAST_DEVICES
    }


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
