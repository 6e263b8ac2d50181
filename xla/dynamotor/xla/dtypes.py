"""Which XLA type holds a torch dtype, and what several families of lowerings share: float32 inside
low-precision ops, precision of products, sizes per dimension.

`XLA_USE_BF16=1` keeps torch.float and torch.double as bfloat16 on the device, `XLA_DOWNCAST_BF16=1` keeps
torch.float as bfloat16 and torch.double as float32; tensors report their torch dtype either way.

>>> jax_dtype(torch.float32)
dtype('float32')
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import torch

from . import compat

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


# What larger numbers become on the CPU, infinities too: NaN in some versions of PyTorch, as in XLA.
_LARGEST_E4M3 = torch.tensor(1e9, device="cpu").to(torch.float8_e4m3fn).item()


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
    if dtype == jnp.float8_e4m3fn and not math.isnan(_LARGEST_E4M3):
        x = jnp.clip(x if is_float(x.dtype) else x.astype(jnp.float32), -_LARGEST_E4M3, _LARGEST_E4M3)
    return x.astype(dtype)


# -- precision -----------------------------------------------------------------------------------------------


Maybe = TypeVar("Maybe", jax.Array, jax.Array | None)


def wide(x: Maybe) -> Maybe:
    """float16, bfloat16 and float8 as float32, others (None too) as they are: aten computes these in float32
    and rounds once.
    """
    return x.astype(jnp.float32) if x is not None and x.dtype in LOW_PRECISION else x


def rounded(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """A wide value with no more bits than a low-precision type keeps, for ops that aten rounds at each step.
    (XLA may leave out a cast there and back.)"""
    if dtype not in LOW_PRECISION:
        return x
    kept = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, exponent_bits=kept.nexp, mantissa_bits=kept.nmant)


def on_cpu() -> bool:
    """Whether graphs run on XLA:CPU, where some ops want another shape of program."""
    return jax.default_backend() == "cpu"


_SINGLE = (jnp.dtype(jnp.float32), jnp.dtype(jnp.complex64))


def matmul_precision(dtype: np.dtype) -> jax.lax.Precision | None:
    """float32 products keep all their bits unless `torch.set_float32_matmul_precision` (or `allow_tf32`)
    allows fewer.
    """
    if jnp.dtype(dtype) not in _SINGLE:
        return None
    return (
        jax.lax.Precision.HIGHEST
        if torch.get_float32_matmul_precision() == "highest"
        else jax.lax.Precision.DEFAULT
    )


def convolution_precision(dtype: np.dtype) -> jax.lax.Precision | None:
    """float32 convolutions keep all their bits unless `torch.backends.cudnn.allow_tf32` (PyTorch's default)
    allows fewer.
    """
    if jnp.dtype(dtype) not in _SINGLE:
        return None
    return jax.lax.Precision.DEFAULT if torch.backends.cudnn.allow_tf32 else jax.lax.Precision.HIGHEST


# PyTorch's settings that the lowerings read: part of every key of an executable.
PRECISION_SETTINGS: tuple[Callable[[], Any], ...] = (
    compat.matmul_precision,
    compat.cudnn_tf32,
)


def contract(multiply: Callable[..., jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    """A product with float32 accumulation: float16 and bfloat16 give float32 (the caller rounds once), other
    types stay.

    `multiply` is `jnp.matmul`, or another function of two operands that knows `precision=` and
    `preferred_element_type=`.
    """
    if x.dtype in LOW_PRECISION and x.dtype == y.dtype and not on_cpu():
        return multiply(x, y, preferred_element_type=jnp.float32)
    x, y = wide(x), wide(y)
    return multiply(x, y, precision=matmul_precision(jnp.result_type(x, y)))


def per_dimension(value: int | Sequence[int], count: int) -> tuple[int, ...]:
    """`stride=2` or `stride=[2]` as aten reads them: one number for all dimensions.

    >>> per_dimension([2], 3)
    (2, 2, 2)
    """
    values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return values * count if len(values) == 1 else values
