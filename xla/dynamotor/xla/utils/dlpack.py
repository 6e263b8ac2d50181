"""Tensors of the device and arrays of other libraries, without a copy where the device is shared.

>>> from_dlpack(jnp.ones(3))
"""

from __future__ import annotations

from typing import Any

import jax
import torch

from .. import transfer


def to_dlpack(xla_tensor: Any) -> Any:
    """A DLPack capsule of an xla tensor's contents; pending work is computed first."""
    return transfer.array(xla_tensor).__dlpack__()


def from_dlpack(ext_data: Any) -> torch.Tensor:
    """An xla tensor with the data of an object that knows `__dlpack__` (a jax array, a CPU tensor)."""
    return transfer.wrap_array(jax.dlpack.from_dlpack(ext_data))
