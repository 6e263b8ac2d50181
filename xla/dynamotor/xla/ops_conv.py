"""Convolutions of one to three dimensions. One forward is written; the transposed form and all gradients are
its transposes. Pools go along one dimension after the other (`_Taps`: which positions each output reads).

XLA:CPU is slow at grouped, strided-gradient and very small convolutions (70 ms where aten takes 2): there
they are sums of one product for every offset of the kernel.

>>> torch.nn.functional.conv2d(x, weight, stride=2, padding=1)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .dtypes import convolution_precision, is_float, on_cpu, per_dimension, wide
from .lowering import aten, op, rows


class Window(NamedTuple):
    """How a kernel walks over the spatial dimensions: one number each, and the number of groups of
    channels.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


# -- the forward ---------------------------------------------------------------------------------------------


def _forward(x: jax.Array, weight: jax.Array, window: Window, by_offset: bool) -> jax.Array:
    """(N, C, *spatial) with (O, C / groups, *kernel) to (N, O, *out)."""
    if by_offset:
        return _by_offset(x, weight, window)
    spatial = "DHW"[3 - (x.ndim - 2) :]
    return jax.lax.conv_general_dilated(
        x,
        weight,
        window.stride,
        [(p, p) for p in window.padding],
        rhs_dilation=window.dilation,
        feature_group_count=window.groups,
        dimension_numbers=(f"NC{spatial}", f"OI{spatial}", f"NC{spatial}"),
        precision=convolution_precision(x.dtype),
    )


def _by_offset(x: jax.Array, weight: jax.Array, window: Window) -> jax.Array:
    """The sum over the kernel's offsets of (positions, C) times (C, O): plain products where channels are
    last.
    """
    spatial, kernel, groups = x.ndim - 2, weight.shape[2:], window.groups
    x = jnp.pad(jnp.moveaxis(x, 1, -1), ((0, 0), *((p, p) for p in window.padding), (0, 0)))
    out = _out_size(x.shape[1:-1], kernel, window._replace(padding=(0,) * spatial))
    total = jnp.zeros((x.shape[0], *out, weight.shape[0]), x.dtype)
    for offset in itertools.product(*map(range, kernel)):
        starts = [o * d for o, d in zip(offset, window.dilation)]
        part = x[
            (slice(None), *(slice(a, a + s * (n - 1) + 1, s) for a, s, n in zip(starts, window.stride, out)))
        ]
        total = total + _channels(part, weight[(..., *offset)], groups)
    return jnp.moveaxis(total, -1, 1)


def _channels(x: jax.Array, weight: jax.Array, groups: int) -> jax.Array:
    """(..., C) by (O, C / groups): a product, one a group, or for depthwise kernels a multiplication."""
    precision = convolution_precision(x.dtype)
    if groups == 1:
        return jnp.einsum("...c,oc->...o", x, weight, precision=precision)
    if weight.shape == (groups, 1) and x.shape[-1] == groups:
        return x * weight[:, 0]
    grouped = x.reshape(*x.shape[:-1], groups, weight.shape[1])
    result = jnp.einsum(
        "...gc,goc->...go", grouped, weight.reshape(groups, -1, weight.shape[1]), precision=precision
    )
    return result.reshape(*x.shape[:-1], weight.shape[0])


def _out_size(size: tuple[int, ...], kernel: tuple[int, ...], window: Window) -> tuple[int, ...]:
    return tuple(
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(size, kernel, window.stride, window.padding, window.dilation)
    )


_MANY_CHANNELS, _FEW_POSITIONS = 16, 64


def _wants_offsets(
    x_shape: tuple[int, ...], weight: jax.Array | jax.ShapeDtypeStruct, window: Window, gradient: bool
) -> bool:
    """Whether products by offset beat XLA's own convolution; `gradient`: for the gradient of x (or the
    transposed form).
    """
    if not is_float(weight.dtype):
        return True  # integers: XLA has no such convolution on a GPU
    if not on_cpu():
        return False
    kernel = weight.shape[2:]
    if window.groups > 1 or math.prod(kernel) == 1:
        return True
    few = math.prod(_out_size(x_shape[2:], kernel, window)) <= _FEW_POSITIONS
    strided = gradient and max(window.stride) > 1
    return weight.shape[1] >= _MANY_CHANNELS and (few or strided)


# -- its transposes ------------------------------------------------------------------------------------------


def _input_gradient(grad: jax.Array, weight: jax.Array, shape: tuple[int, ...], window: Window) -> jax.Array:
    """The transpose in x: from the output's shape back to `shape`. Positions that no window covers get
    zero.
    """
    covered = _out_size(shape[2:], weight.shape[2:], window)
    grad = jnp.pad(grad, ((0, 0), (0, 0), *((0, n - g) for n, g in zip(covered, grad.shape[2:]))))
    by_offset = _wants_offsets(shape, weight, window, True)
    transpose = jax.linear_transpose(
        lambda x: _forward(x, weight, window, by_offset), jax.ShapeDtypeStruct(shape, weight.dtype)
    )
    return transpose(grad)[0]


def _weight_gradient(grad: jax.Array, x: jax.Array, shape: tuple[int, ...], window: Window) -> jax.Array:
    """The transpose in the weight."""
    like = jax.ShapeDtypeStruct(shape, x.dtype)
    by_offset = _wants_offsets(x.shape, like, window, False)
    return jax.linear_transpose(lambda w: _forward(x, w, window, by_offset), like)(grad)[0]


def _window(weight: jax.Array, stride, padding, dilation, groups: int) -> Window:
    spatial = weight.ndim - 2
    return Window(
        per_dimension(stride, spatial),
        per_dimension(padding, spatial),
        per_dimension(dilation, spatial),
        groups,
    )


def _ready(*arrays: jax.Array) -> list[jax.Array]:
    """Arrays in the type that the convolution runs in: float32 for low precision on a CPU, where XLA rounds
    partial sums.
    """
    return [wide(a) if on_cpu() else a for a in arrays]


@op(aten.convolution, aten.convolution_overrideable)
def _convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    window = _window(weight, stride, padding, dilation, groups)
    x, weight = _ready(x, weight)
    if not transposed:
        result = _forward(x, weight, window, _wants_offsets(x.shape, weight, window, False))
    else:
        extra = per_dimension(output_padding, x.ndim - 2)
        size = [
            (n - 1) * s - 2 * p + d * (k - 1) + e + 1
            for n, k, s, p, d, e in zip(
                x.shape[2:], weight.shape[2:], window.stride, window.padding, window.dilation, extra
            )
        ]
        result = _input_gradient(x, weight, (x.shape[0], weight.shape[1] * groups, *size), window)
    return result if bias is None else wide(result) + wide(bias).reshape(1, -1, *(1,) * (x.ndim - 2))


@op(aten.convolution_backward)
def _convolution_backward(
    grad, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, wanted
):
    window = _window(weight, stride, padding, dilation, groups)
    bias_gradient = jnp.sum(wide(grad), axis=(0, *range(2, grad.ndim)))
    grad, x, weight = _ready(grad, x, weight)
    if transposed:
        full = (
            _forward(grad, weight, window, _wants_offsets(grad.shape, weight, window, False))
            if wanted[0]
            else None
        )
        dx = full if full is None else full[(..., *(slice(n) for n in x.shape[2:]))]
        large, small = (
            grad,
            jnp.pad(
                x,
                (
                    (0, 0),
                    (0, 0),
                    *(
                        (0, n - m)
                        for n, m in zip(_out_size(grad.shape[2:], weight.shape[2:], window), x.shape[2:])
                    ),
                ),
            ),
        )
    else:
        dx = _input_gradient(grad, weight, x.shape, window) if wanted[0] else None
        large, small = x, grad
    dw = _weight_gradient(small, large, weight.shape, window) if wanted[1] else None
    return tuple(0 if v is None else v for v in (dx, dw, bias_gradient))


@op(aten._convolution)
def _named(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups, *settings):
    return _convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)


# -- pooling -------------------------------------------------------------------------------------------------


class _Taps(NamedTuple):
    """`positions[j, o]`: what output o reads in its j-th place; `valid[j, o]`: whether that is inside.
    `stride`: of a regular window, None otherwise. `reach[o]`: the window's length with its padding, which
    average pools divide by."""

    positions: np.ndarray
    valid: np.ndarray
    stride: int | None
    reach: np.ndarray


def _regular(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> _Taps:
    count = (
        size + 2 * padding - dilation * (kernel - 1) - 1 + (stride - 1 if ceil_mode else 0)
    ) // stride + 1
    if ceil_mode and (count - 1) * stride >= size + padding:
        count -= 1  # the last window would start in the right padding
    starts = np.arange(count) * stride - padding
    positions = starts[None, :] + np.arange(kernel)[:, None] * dilation
    reach = np.minimum(starts + kernel, size + padding) - starts
    return _Taps(positions, (positions >= 0) & (positions < size), stride, reach)


def _adaptive(size: int, count: int) -> _Taps:
    if count and size % count == 0:
        return _regular(size, size // count, size // count, 0, 1, False) if size else _empty(count)
    outputs = np.arange(count)
    starts, ends = outputs * size // max(count, 1), -((outputs + 1) * -size // max(count, 1))
    longest = int((ends - starts).max(initial=1))
    positions = starts[None, :] + np.arange(longest)[:, None]
    return _Taps(np.minimum(positions, size - 1), positions < ends, None, ends - starts)


def _empty(count: int) -> _Taps:
    return _Taps(np.zeros((1, count), int), np.zeros((1, count), bool), None, np.zeros(count, int))


def _reads(x: jax.Array, axis: int, taps: _Taps) -> Iterator[jax.Array]:
    """For each place in the window the values read along `axis` (negative): outside zero, or anything for
    irregular windows.
    """
    if taps.stride is None:
        for positions in taps.positions:
            yield jnp.take(x, positions, axis=axis)
        return
    low, high = -int(taps.positions.min(initial=0)), int(taps.positions.max(initial=0)) - x.shape[axis] + 1
    widths = [(0, 0, 0)] * x.ndim
    widths[axis] = (low, max(high, 0), 0)
    padded = jax.lax.pad(x, jnp.zeros((), x.dtype), widths) if low or high > 0 else x
    for positions in taps.positions + low:
        start, end = (int(positions[0]), int(positions[-1]) + 1) if len(positions) else (0, 0)
        yield jax.lax.slice_in_dim(padded, start, end, taps.stride, axis % x.ndim)


def _row(values: np.ndarray, axis: int) -> np.ndarray:
    """A vector along a negative axis, to broadcast."""
    return values.reshape(values.shape + (1,) * (-axis - 1))


# -- maximum -------------------------------------------------------------------------------------------------


def _max_along(
    x: jax.Array, index: jax.Array, axis: int, taps: _Taps, scale: int
) -> tuple[jax.Array, jax.Array]:
    """The maximum along an axis and where it was: `index` of that element + position * scale."""
    shifts = (_row((positions * scale).astype(np.int32), axis) for positions in taps.positions)
    places = (place + shift for place, shift in zip(_reads(index, axis, taps), shifts))
    reads = zip(_reads(x, axis, taps), places, taps.valid)
    best, where, seen = next(reads)
    for value, place, valid in reads:
        better = (value > best) | (value != value) | _row(~seen, axis)
        better = better & _row(valid, axis)
        best, where, seen = jnp.where(better, value, best), jnp.where(better, place, where), seen | valid
    return best, where


def _max_pool(x: jax.Array, all_taps: Sequence[_Taps]) -> tuple[jax.Array, jax.Array]:
    """Maxima and their linear positions within the pooled dimensions."""
    index, sizes = jnp.zeros((1,) * x.ndim, jnp.int32), x.shape[-len(all_taps) :]
    index = jnp.broadcast_to(index, x.shape)
    for back, taps in enumerate(reversed(all_taps), start=1):
        x, index = _max_along(x, index, -back, taps, math.prod(sizes[len(sizes) - back + 1 :]))
    return x, index


def _window_taps(x: jax.Array, spatial: int, kernel, stride, padding, dilation, ceil_mode) -> list[_Taps]:
    kernel = per_dimension(kernel, spatial)
    stride = per_dimension(stride, spatial) if stride else kernel
    rows = zip(
        x.shape[-spatial:], kernel, stride, per_dimension(padding, spatial), per_dimension(dilation, spatial)
    )
    return [_regular(*row, ceil_mode) for row in rows]


def _adaptive_taps(x: jax.Array, spatial: int, output_size) -> list[_Taps]:
    return [_adaptive(n, o) for n, o in zip(x.shape[-spatial:], per_dimension(output_size, spatial))]


def _to_indices(grad: jax.Array, shape: Sequence[int], indices: jax.Array, spatial: int) -> jax.Array:
    """Gradients added up at the positions that the maxima came from."""
    outer, inner = math.prod(shape[:-spatial]), math.prod(shape[-spatial:])
    rows = jnp.arange(outer)[:, None]
    flat = jnp.zeros((outer, inner), wide(grad).dtype)
    pooled = math.prod(grad.shape[-spatial:])
    return flat.at[rows, indices.reshape(outer, pooled)].add(wide(grad).reshape(outer, pooled)).reshape(shape)


def _backward_at_indices(spatial: int, grad, x, *rest):
    """The indices are the last argument."""
    return _to_indices(grad, x.shape, rest[-1], spatial)


def _unpool(spatial: int, x, indices, output_size, *_):
    """Values put back at their indices, zero elsewhere."""
    outer, inner = math.prod(x.shape[:-spatial]), math.prod(output_size)
    flat = (
        jnp.zeros((outer, inner), x.dtype)
        .at[jnp.arange(outer)[:, None], indices.reshape(outer, -1)]
        .set(x.reshape(outer, -1))
    )
    return flat.reshape(*x.shape[:-spatial], *output_size)


# -- average -------------------------------------------------------------------------------------------------


def _sum_along(x: jax.Array, axis: int, taps: _Taps) -> jax.Array:
    """The sum of each window along an axis."""
    places, count = taps.positions.shape
    if count == 1 and places == x.shape[axis] and taps.valid.all():
        return jnp.sum(x, axis=axis, keepdims=True)
    total: Any = 0
    for value, valid in zip(_reads(x, axis, taps), taps.valid):
        regular_or_full = taps.stride is not None or valid.all()
        total = total + (value if regular_or_full else jnp.where(_row(valid, axis), value, 0))
    return total


def _average(x: jax.Array, all_taps: Sequence[_Taps], divisor: np.ndarray | int) -> jax.Array:
    for back, taps in enumerate(reversed(all_taps), start=1):
        x = _sum_along(x, -back, taps)
    count = jnp.broadcast_to(jnp.asarray(divisor, x.dtype), x.shape)
    return x / count if is_float(x.dtype) else jax.lax.div(x, count)  # integers round to zero


def _counts(all_taps: Sequence[_Taps], with_padding: bool) -> np.ndarray:
    """How many positions each window has: the outer product of the counts along its dimensions."""
    counts = np.ones((), int)
    for taps in all_taps:
        counts = counts[..., None] * (taps.reach if with_padding else taps.valid.sum(0))
    return counts


def _avg_pool(
    spatial: int,
    x,
    kernel_size,
    stride=(),
    padding=0,
    ceil_mode=False,
    count_include_pad=True,
    divisor_override=None,
):
    all_taps = _window_taps(x, spatial, kernel_size, stride, padding, 1, ceil_mode)
    return _average(wide(x), all_taps, divisor_override or _counts(all_taps, count_include_pad))


def _adaptive_avg_pool(spatial: int, x, output_size):
    all_taps = _adaptive_taps(x, spatial, output_size)
    return _average(wide(x), all_taps, _counts(all_taps, False))


def _backward_of(pool: Callable, grad: jax.Array, x: jax.Array) -> jax.Array:
    """The transpose of a pool of averages, which is linear."""
    return jax.linear_transpose(pool, jax.ShapeDtypeStruct(x.shape, wide(x).dtype))(wide(grad))[0]


# By the op's name: rules that take the number of dimensions first.
POOLS: dict[str, Callable] = {
    "max_pool{}d_with_indices": (
        lambda spatial, x, kernel_size, stride=(), padding=0, dilation=1, ceil_mode=False: _max_pool(
            x, _window_taps(x, spatial, kernel_size, stride, padding, dilation, ceil_mode)
        )
    ),
    "max_pool{}d_with_indices_backward": _backward_at_indices,
    "adaptive_max_pool{}d": (
        lambda spatial, x, output_size: _max_pool(x, _adaptive_taps(x, spatial, output_size))
    ),
    "adaptive_max_pool{}d_backward": _backward_at_indices,
    "max_unpool{}d": _unpool,
    "avg_pool{}d": _avg_pool,
    "avg_pool{}d_backward": (
        lambda spatial, grad, x, *window: _backward_of(lambda v: _avg_pool(spatial, v, *window), grad, x)
    ),
    "_adaptive_avg_pool{}d": _adaptive_avg_pool,
    "_adaptive_avg_pool{}d_backward": (
        lambda spatial, grad, x: _backward_of(
            lambda v: _adaptive_avg_pool(spatial, v, grad.shape[-spatial:]), grad, x
        )
    ),
}
rows(op, {getattr(aten, name.format(n)): partial(rule, n) for name, rule in POOLS.items() for n in (2, 3)})
