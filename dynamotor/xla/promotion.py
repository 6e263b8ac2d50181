"""Which type an op computes in: aten's promotion for what is compared, the result's type for what is
calculated.

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
from .lowering import Spec, Target, op

_WRAPPED = {bool: torch.bool, int: torch.int64}


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


def dtype_of(value: Any) -> torch.dtype:
    """The torch dtype of an array, or of the tensor that aten would wrap a Python number in."""
    if is_array(value):
        return torch_dtype(value.dtype)
    if isinstance(value, complex):
        return torch.complex128 if torch.get_default_dtype() is torch.float64 else torch.complex64
    return _WRAPPED.get(type(value), torch.get_default_dtype())


def result_type(*values: Any) -> torch.dtype:
    """aten's result type: tensors with dimensions decide, then 0-d tensors, then Python numbers; a lower rank
    only lifts the category (boolean, integer, floating, complex). Source of the rule: torch.result_type's
    documentation."""
    ranks: list[torch.dtype | None] = [None, None, None]
    for value in values:
        rank = (0 if value.ndim else 1) if is_array(value) else 2
        dtype = dtype_of(value)
        ranks[rank] = dtype if ranks[rank] is None else torch.promote_types(ranks[rank], dtype)
    return _combine(_combine(ranks[0], ranks[1]), ranks[2])


def _combine(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    if higher is None or lower is None:
        return higher or lower
    if higher.is_complex:
        return higher
    if higher.is_floating_point:
        return higher.to_complex() if lower.is_complex else higher
    if higher is torch.bool or lower.is_floating_point or lower.is_complex:
        return torch.promote_types(higher, lower)
    return higher


def cast(value: Any, dtype: np.dtype) -> Any:
    """An array or a Python number as an array of `dtype`; numbers out of range wrap as aten's do; anything
    else as it is.
    """
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
    dtype = jax_dtype(result_type(*(v for v in values if v is not None)))
    return [cast(v, dtype) for v in values]


def widened_float(x: jax.Array) -> jax.Array:
    """In the type that aten computes in, with integers and booleans in the default dtype."""
    return cast(x, compute_dtype(float_dtype(torch_dtype(x.dtype))))


def elementwise(*targets: Target, lift: bool = False) -> Callable[[Callable], Callable]:
    """Register a rule whose positional tensors and numbers all arrive in the type that the result is computed
    in.

    A tensor of a wider type (a 0-d float32 beside bfloat16) is rounded to the result's type first, as aten
    does, except in the plain arithmetic that can be lifted, where aten does not either.
    """

    def register(fn: Callable) -> Callable:
        @wraps(fn)
        def rule(*args: Any, out: Spec, **kwargs: Any) -> Any:
            dtype = compute_dtype(out.dtype)
            if not lift:
                args = tuple(in_type(a, out) for a in args)
            return fn(*(cast(a, dtype) for a in args), **kwargs)

        op(*targets, out=True, lift=lift)(rule)
        return fn

    return register


def comparison(*targets: Target) -> Callable[[Callable], Callable]:
    """Register a rule whose positional arguments arrive in the type that aten compares them in."""

    def register(fn: Callable) -> Callable:
        op(*targets)(wraps(fn)(lambda *args: fn(*promoted(*args))))
        return fn

    return register
