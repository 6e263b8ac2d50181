"""Factories and copies: full, arange, linspace, eye, *_like, new_*, empty (zeros), fill, clone, dtype
conversion; tensors put together, repeated, turned and padded.

>>> _arange(0, 1, 0.25, out=Spec((4,), torch.float32))
Array([0.  , 0.25, 0.5 , 0.75], dtype=float32)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from .dtypes import LOW_PRECISION, convert, is_complex, is_float, jax_dtype
from .lowering import Lifted, Spec, aten, op, rows
from .promotion import cast


def _filled(out: Spec, value: object) -> jax.Array:
    value = value.array if isinstance(value, Lifted) else jnp.asarray(value)
    return jnp.broadcast_to(convert(value, jax_dtype(out.dtype)), out.shape)


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
    aten.zeros, aten.zeros_like, aten.new_zeros, aten.zero, aten._efficientzerotensor, aten.empty,
    aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided, aten.empty_permuted,
    out=True,
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
        aten.eye: lambda *args, dtype=None, out: jnp.eye(out.shape[0], out.shape[1], dtype=jnp.bool_),
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


# -- shapes changed ------------------------------------------------------------------------------------------


@op(aten.cat, aten.concat, out=True)
def _cat(tensors, dim=0, *, out: Spec):
    """Tensors of shape (0,) join with anything, as they always did in PyTorch."""
    dtype = jax_dtype(out.dtype)
    parts = [t.astype(dtype) for t in tensors if t.shape != (0,) or len(out.shape) == 1]
    return jnp.concatenate(parts, dim) if parts else jnp.zeros(out.shape, dtype)


rows(
    op,
    {
        aten.repeat: lambda x, repeats: jnp.tile(
            x.reshape((1,) * (len(repeats) - x.ndim) + x.shape), tuple(repeats)
        ),
        aten.flip: lambda x, dims: jnp.flip(x, tuple(dims)) if x.ndim else x,
        aten.tril: lambda x, diagonal=0: jnp.tril(x, diagonal),
        aten.triu: lambda x, diagonal=0: jnp.triu(x, diagonal),
    },
)


@op(aten.resize)
def _resize(x: jax.Array, size: Sequence[int]) -> jax.Array:
    """The first elements in a new shape; elements beyond the old end are zero here and undefined in aten."""
    count = math.prod(size)
    flat = x.reshape(-1)[:count]
    return jnp.pad(flat, (0, count - flat.size)).reshape(tuple(size))


# -- padding, where a negative width cuts --------------------------------------------------------------------


@op(aten.constant_pad_nd, lift=(float,))
def _constant_pad(x, pad, value=0):
    """`pad` lists (before, after) from the last dimension on."""
    widths = [(0, 0, 0)] * x.ndim
    for i in range(len(pad) // 2):
        widths[-1 - i] = (pad[2 * i], pad[2 * i + 1], 0)
    return lax.pad(x, cast(value, x.dtype), widths)


def _padded(x: jax.Array, padding: Sequence[int], mode: str) -> jax.Array:
    widths = [(0, 0)] * (x.ndim - len(padding) // 2) + [*zip(padding[-2::-2], padding[::-2])]
    x = jnp.pad(x, [(max(before, 0), max(after, 0)) for before, after in widths], mode)
    return x[
        tuple([slice(max(-before, 0), n - max(-after, 0)) for n, (before, after) in zip(x.shape, widths)])
    ]


def _transposed(rule: Callable, grad: jax.Array, x: jax.Array, padding: Sequence[int]) -> jax.Array:
    """Padding is linear: its transpose adds the gradients of all copies of an element, those of half floats
    in float32.
    """
    wide = jnp.dtype(jnp.float32) if grad.dtype in LOW_PRECISION else grad.dtype
    _, pull = jax.vjp(lambda value: rule(value, padding), jnp.zeros(x.shape, wide))
    return pull(grad.astype(wide))[0]


for _name, _mode in (("reflection", "reflect"), ("replication", "edge")):
    for _dims in ("1d", "2d", "3d"):
        op(getattr(aten, f"{_name}_pad{_dims}"))(partial(_padded, mode=_mode))
        op(getattr(aten, f"{_name}_pad{_dims}_backward"))(partial(_transposed, partial(_padded, mode=_mode)))
