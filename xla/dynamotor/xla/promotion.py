"""Which type an op computes in: aten's promotion for compared operands, the result's type for arithmetic.

float16 and bfloat16 compute in float32 and round once, as aten's kernels do; integers of a float op compute
in the default dtype and never in float64, which jax would choose for them.

>>> @elementwise(aten.hypot)
... def _hypot(x, y):
...     return jnp.hypot(x, y)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from .dtypes import LOW_PRECISION, convert, jax_dtype, torch_dtype
from .lowering import LITERALS, Lifted, Numbers, Spec, Target, op


def compute_dtype(dtype: torch.dtype) -> np.dtype:
    """The type that aten computes in to give `dtype`: float32 for the types below it, the type itself
    otherwise.
    """
    held = jax_dtype(dtype)
    return jnp.dtype(jnp.float32) if held in LOW_PRECISION else held


def float_dtype(dtype: torch.dtype) -> torch.dtype:
    """The result of a float op (sin, mean of booleans) on `dtype`: integers and booleans give the default
    dtype.
    """
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.get_default_dtype()


def is_array(value: Any) -> bool:
    """True for a tensor argument (a jax or numpy array), False for a Python number or anything else."""
    return isinstance(value, (jax.Array, np.ndarray, np.generic))


def result_type(*values: Any) -> torch.dtype:
    """aten's result type, asked of PyTorch: tensors with dimensions decide, then 0-d tensors, then Python
    numbers."""
    values = tuple(v.like if type(v) is Lifted else v for v in values)
    ranked = sorted(values, key=lambda v: (0 if v.ndim else 1) if is_array(v) else 2)
    like = [
        torch.empty((1,) * (v.ndim > 0), dtype=torch_dtype(v.dtype), device="meta") if is_array(v) else v
        for v in ranked
    ]
    found = torch.as_tensor(like[0], device="meta")
    for other in like[1:]:
        found = found.to(torch.result_type(found, other))
    return found.dtype


def cast(value: Any, dtype: np.dtype) -> Any:
    """An array or a Python number as an array of `dtype`; numbers out of range wrap as aten's do; anything
    else as it is.
    """
    if type(value) is Lifted:  # an integer type takes it by way of int64: it wraps, as aten's do
        value = value.array.astype(jnp.int64) if jnp.issubdtype(dtype, jnp.integer) else value.array
    if is_array(value):
        return value if value.dtype == dtype else convert(jnp.asarray(value), dtype)
    if isinstance(value, (bool, int, float, complex)):
        with np.errstate(all="ignore"):
            return np.asarray(value).astype(dtype)[()]
    return value


def in_type(value: Any, out: Spec) -> Any:
    """A tensor rounded to the type of the result and in the type that it is computed in; anything else as it
    is.
    """
    return cast(cast(value, jax_dtype(out.dtype)), compute_dtype(out.dtype)) if is_array(value) else value


def promoted(*values: Any) -> list[Any]:
    """The values cast to their common type, in which aten compares and chooses them; None stays None."""
    common = result_type(*(v for v in values if v is not None))
    if common in _PARTS:
        return [None if v is None else _rounded_parts(cast(v, jnp.complex64), _PARTS[common]) for v in values]
    return [cast(v, jax_dtype(common)) for v in values]


# Complex types that XLA lacks, and the type of their parts. PyTorch 2.14 made the second one.
_PARTS = {torch.complex32: jnp.float16}
if hasattr(torch, "bcomplex32"):
    _PARTS[torch.bcomplex32] = jnp.bfloat16


def _rounded_parts(x: jax.Array, part: Any) -> jax.Array:
    return jax.lax.complex(*(p.astype(part).astype(jnp.float32) for p in (jnp.real(x), jnp.imag(x))))


def widened_float(x: jax.Array) -> jax.Array:
    """In the type that aten computes in, with integers and booleans in the default dtype."""
    return cast(x, compute_dtype(float_dtype(torch_dtype(x.dtype))))


def elementwise(
    *targets: Target,
    lift: Numbers = False,
    literals: frozenset[float] = LITERALS,
    rounds: bool = True,
    jumps: bool = False,
) -> Callable[[Callable], Callable]:
    """Register a rule whose positional tensors and numbers all arrive in the type that the result is computed
    in.

    `rounds`: a tensor of a wider type (a 0-d float32 beside bfloat16) is rounded to the result's type first,
    as aten does except in plain arithmetic; `jumps`: numbers are too, as where the result jumps with them.
    """

    def register(fn: Callable) -> Callable:
        @wraps(fn)
        def rule(*args: Any, out: Spec, **kwargs: Any) -> Any:
            dtype = compute_dtype(out.dtype)
            if jumps:
                args = tuple(cast(a, jax_dtype(out.dtype)) for a in args)
            elif rounds:
                args = tuple(in_type(a, out) for a in args)
            return fn(*(cast(a, dtype) for a in args), **kwargs)

        op(*targets, out=True, lift=lift, literals=literals)(rule)
        return fn

    return register


def comparison(*targets: Target) -> Callable[[Callable], Callable]:
    """Register a rule whose positional arguments arrive in the type that aten compares them in."""

    def register(fn: Callable) -> Callable:
        op(*targets, lift=True)(wraps(fn)(lambda *args: fn(*promoted(*args))))
        return fn

    return register
