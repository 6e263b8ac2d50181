"""Which XLA type holds a torch dtype.

`XLA_USE_BF16=1` keeps torch.float and torch.double as bfloat16 on the device, `XLA_DOWNCAST_BF16=1` keeps
torch.float as bfloat16 and torch.double as float32; tensors report their torch dtype either way.

>>> jax_dtype(torch.float32)
dtype('float32')
"""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

_NATIVE: dict[torch.dtype, np.dtype] = {
    torch.float64: jnp.dtype(jnp.float64),
    torch.float32: jnp.dtype(jnp.float32),
    torch.float16: jnp.dtype(jnp.float16),
    torch.bfloat16: jnp.dtype(jnp.bfloat16),
    torch.int64: jnp.dtype(jnp.int64),
    torch.int32: jnp.dtype(jnp.int32),
    torch.int16: jnp.dtype(jnp.int16),
    torch.int8: jnp.dtype(jnp.int8),
    torch.uint8: jnp.dtype(jnp.uint8),
    torch.uint16: jnp.dtype(jnp.uint16),
    torch.uint32: jnp.dtype(jnp.uint32),
    torch.uint64: jnp.dtype(jnp.uint64),
    torch.bool: jnp.dtype(jnp.bool_),
    torch.complex64: jnp.dtype(jnp.complex64),
    torch.complex128: jnp.dtype(jnp.complex128),
    torch.float8_e4m3fn: jnp.dtype(jnp.float8_e4m3fn),
    torch.float8_e5m2: jnp.dtype(jnp.float8_e5m2),
}


def _table() -> dict[torch.dtype, np.dtype]:
    table = dict(_NATIVE)
    if os.environ.get("XLA_USE_BF16") == "1":
        table[torch.float32] = table[torch.float64] = _NATIVE[torch.bfloat16]
    elif os.environ.get("XLA_DOWNCAST_BF16") == "1":
        table[torch.float32], table[torch.float64] = _NATIVE[torch.bfloat16], _NATIVE[torch.float32]
    return table


TORCH_TO_JAX = _table()
JAX_TO_TORCH = {held: dtype for dtype, held in _NATIVE.items()}
# What aten computes in float32 and rounds once.
LOW_PRECISION = tuple(jnp.dtype(t) for t in (jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2))


def jax_dtype(dtype: torch.dtype) -> np.dtype:
    """The XLA type of a torch dtype. KeyError where XLA has none (quantised types, complex32)."""
    return TORCH_TO_JAX[dtype]


def torch_dtype(dtype: np.dtype) -> torch.dtype:
    """The torch dtype of a jax array's dtype."""
    return JAX_TO_TORCH[jnp.dtype(dtype)]


def is_float(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def is_complex(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.complexfloating)


def convert(x: jax.Array, dtype: Any) -> jax.Array:
    """Conversion as aten's CPU kernels do it. XLA clamps floats that a small integer cannot hold, aten wraps
    them around; and XLA makes `a * convert(mask)` the choice of `a` or 0, which hides a NaN or an infinity
    in `a`: a mask becomes a choice of two numbers here.
    """
    if is_complex(x.dtype) and not is_complex(dtype):
        x = x != 0 if dtype == jnp.bool_ else x.real
    if x.dtype == jnp.bool_ and (is_float(dtype) or is_complex(dtype)):
        return jnp.where(x, jnp.ones((), dtype), jnp.zeros((), dtype))
    if is_float(x.dtype) and dtype in (jnp.uint8, jnp.int8, jnp.int16, jnp.uint16):
        x = x.astype(jnp.int64)
    return x.astype(dtype)
