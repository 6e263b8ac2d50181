"""What several families of lowerings share: float32 inside low-precision ops, precision of products, sizes
per dimension.

>>> wide(jnp.ones(2, jnp.bfloat16)).dtype
dtype('float32')
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from .dtypes import LOW_PRECISION


def wide(x: jax.Array | None) -> jax.Array | None:
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
    torch._C._get_float32_matmul_precision,
    torch._C._get_cudnn_allow_tf32,
)


def precision_settings() -> tuple:
    """What they are now."""
    return tuple([setting() for setting in PRECISION_SETTINGS])


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
