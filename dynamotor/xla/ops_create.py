"""Factories and copies: full, arange, linspace, eye, *_like, new_*, empty (zeros), fill, clone, dtype
conversion.

>>> _arange(0, 1, 0.25, out=Spec((4,), torch.float32))
Array([0.  , 0.25, 0.5 , 0.75], dtype=float32)
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from .dtypes import LOW_PRECISION, convert, is_complex, is_float, jax_dtype
from .lowering import Spec, aten, op, rows


def _filled(out: Spec, value: object) -> jax.Array:
    return jnp.broadcast_to(convert(jnp.asarray(value), jax_dtype(out.dtype)), out.shape)


rows(
    partial(op, out=True, lift=True),
    {
        aten.full: lambda size, fill_value, *, dtype=None, out: _filled(out, fill_value),
        aten.full_like: lambda x, fill_value, *, dtype=None, out: _filled(out, fill_value),
        aten.scalar_tensor: lambda s, *, dtype=None, out: _filled(out, s),
        aten.fill: lambda x, value, *, out: _filled(out, value),
    },
)


@op(
    aten.zeros, aten.zeros_like, aten.new_zeros, aten.zero, aten._efficientzerotensor, aten.empty, aten.empty_like,
    aten.new_empty, aten.empty_strided, aten.new_empty_strided, aten.empty_permuted, out=True,
)  # fmt: skip
def _zeros(*args, dtype=None, out: Spec):
    """What `empty` leaves undefined is zero here."""
    return jnp.zeros(out.shape, jax_dtype(out.dtype))


@op(aten.arange, out=True)
def _arange(start, end=None, step=1, *, dtype=None, out: Spec):
    """start + i·step, in int64 (start and step truncated) or float64, as aten computes it; the length is
    aten's.
    """
    start = 0 if end is None else start
    wide = jnp.float64 if out.dtype.is_floating_point else jnp.int64
    if wide == jnp.int64:
        start, step = int(start), int(step)
    return jnp.asarray(start, wide) + jnp.asarray(step, wide) * lax.iota(wide, out.shape[0])


def _spaced(start: object, end: object, steps: int, out: Spec) -> jax.Array:
    """Counted from `start` up to the middle and from `end` down to it, so that both ends are exact."""
    wide = _step_dtype(out)
    start, end = (jnp.asarray(value).astype(jax_dtype(out.dtype)).astype(wide) for value in (start, end))
    place = lax.iota(jnp.float64, steps).astype(wide)
    if steps == 1:
        return jnp.broadcast_to(start, (1,))
    step = (end - start) / jnp.asarray(steps - 1, wide)
    return jnp.where(place < steps // 2, start + step * place, end - step * (steps - 1 - place))


def _step_dtype(out: Spec) -> jnp.dtype:
    """Steps of integers are float64 in aten, those of half floats are kept wider here."""
    dtype = jax_dtype(out.dtype)
    if is_complex(dtype):
        return dtype
    return (
        jnp.dtype(jnp.float32)
        if dtype in LOW_PRECISION
        else dtype
        if is_float(dtype)
        else jnp.dtype(jnp.float64)
    )


@op(aten.logspace, out=True)
def _logspace(start, end, steps, base=10.0, *, dtype=None, out: Spec):
    place = _spaced(start, end, steps, out)
    return _truncated(jnp.power(jnp.asarray(base, place.dtype), place), out)


def _truncated(values: jax.Array, out: Spec) -> jax.Array:
    return convert(values, jax_dtype(out.dtype))


op(aten.clone)(lambda x: x)


rows(
    partial(op, out=True),
    {
        (aten.ones, aten.ones_like, aten.new_ones): lambda *args, dtype=None, out: jnp.ones(
            out.shape, jax_dtype(out.dtype)
        ),
        aten.eye: lambda *args, dtype=None, out: jnp.eye(*out.shape, dtype=jnp.bool_),
        aten.range: lambda start, end, step=1, *, dtype=None, out: _arange(start, end, step, out=out),
        aten.linspace: lambda start, end, steps, *, dtype=None, out: _truncated(
            _spaced(start, end, steps, out), out
        ),
        aten.tril_indices: lambda row, col, offset=0, *, dtype=None, out: jnp.stack(
            jnp.tril_indices(row, offset, col)
        ),
        aten.triu_indices: lambda row, col, offset=0, *, dtype=None, out: jnp.stack(
            jnp.triu_indices(row, offset, col)
        ),
        aten._to_copy: lambda x, *, dtype=None, out: convert(x, jax_dtype(out.dtype)),
        aten.copy: lambda x, src, *, out: jnp.broadcast_to(convert(src, jax_dtype(out.dtype)), out.shape),
    },
)
