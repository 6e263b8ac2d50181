"""The functions that stand directly in the package: `torch_xla.device()`, `torch_xla.manual_seed(0)` and the like.

>>> import dynamotor.xla as torch_xla
>>> torch_xla.manual_seed(0)
>>> x = torch.randn(2, 2, device=torch_xla.device())
"""

from __future__ import annotations

import torch

from . import rng
from .core import xla_model as xm
from .device import xla_devices


def device(index: int | None = None) -> torch.device:
    """Device number `index` of `devices()`; the current one, where no number is given. DM660 for a wrong one."""
    return xm.xla_device(index)


def devices() -> list[torch.device]:
    """The devices of this process."""
    return xla_devices()


def real_devices() -> list[str]:
    """The hardware of this process's devices, as "CPU:0", "CUDA:1"."""
    return xm.xla_real_devices()


def device_count() -> int:
    """The number of devices of this process."""
    return len(xla_devices())


def manual_seed(seed: int, device: str | torch.device | None = None) -> None:
    """Set the seed of the random numbers of a device (the current one, where none is named)."""
    rng.set_state(seed, device or xm.xla_device())
