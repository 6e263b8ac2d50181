"""Where the observed code runs: the inputs are moved there, and what programs make themselves is made there.

>>> with on_device("cuda"):
...     observe(function, inputs)
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch

from .compare import AROUND, PLACES


@contextlib.contextmanager
def on_device(name: str) -> Iterator[None]:
    """Within this, observed code runs on this device."""
    torch._C._set_cudnn_allow_tf32(False)  # three digits are no rounding of float32
    PLACES.append(functools.partial(placed, device=name))
    AROUND.append(lambda: torch.device(name))  # of what programs make themselves
    try:
        yield
    finally:
        PLACES.pop()
        AROUND.pop()


def placed(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """The same numbers on the device, laid out in memory as they are, and a leaf where the tensor is one."""
    given = tensor.detach()
    if given.layout is torch.strided and given.numel():
        memory = given.as_strided((extent(given),), (1,)).to(device)
        moved = memory.as_strided(given.shape, given.stride())
        moved = moved.conj() if given.is_conj() else moved
    else:
        moved = given.to(device)
    return moved.requires_grad_(tensor.requires_grad)


def extent(tensor: torch.Tensor) -> int:
    """How many elements of memory are between a tensor's first and last one, both included."""
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
