"""Interpolation: nearest, linear, cubic and the antialiased filters, in one to three dimensions, and values
at points of a grid, with their gradients.

Each dimension is a table of taps: output o is the sum over j of weights[j, o] * x[positions[j, o]]. The
gradient is the transposed table, so that it gathers as well and nothing is scattered. Coordinates are
calculated in aten's precision.

>>> torch.nn.functional.interpolate(x, scale_factor=2, mode="bilinear")
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .dtypes import is_float, wide
from .lowering import aten, op, require

_CUBIC, _CUBIC_ANTIALIASED = -0.75, -0.5


class _Taps(NamedTuple):
    positions: np.ndarray  # (taps, out)
    weights: np.ndarray | None  # the same, None for ones


_Table = Callable[[int, int, "bool", "float | None", np.dtype], _Taps]


def _scale(size: int, count: int, align: bool, factor: float | None, dtype: np.dtype) -> np.floating:
    """Input positions per output position."""
    if align:
        return dtype.type(size - 1) / dtype.type(count - 1) if count > 1 else dtype.type(0)
    return dtype.type(1.0 / factor) if factor else dtype.type(size) / dtype.type(count)


def _nearest(
    size: int, count: int, align: bool, factor: float | None, dtype: np.dtype, shift: float = 0
) -> _Taps:
    """aten calculates these in float32 whatever the data."""
    single = np.dtype(np.float32)
    points = (np.arange(count, dtype=single) + single.type(shift)) * _scale(
        size, count, False, factor, single
    )
    if size == count:
        points = np.arange(count)
    elif count == 2 * size and not shift:
        points = np.arange(count) // 2
    return _Taps(np.minimum(np.floor(points).astype(int), size - 1)[None], None)


def _points(size: int, count: int, align: bool, factor: float | None, dtype: np.dtype) -> np.ndarray:
    """The position of each output among the inputs."""
    scale, outputs, half = (
        _scale(size, count, align, factor, dtype),
        np.arange(count, dtype=dtype),
        dtype.type(0.5),
    )
    return outputs * scale if align else (outputs + half) * scale - half


def _linear(size: int, count: int, align: bool, factor: float | None, dtype: np.dtype) -> _Taps:
    points = np.maximum(_points(size, count, align, factor, dtype), 0)
    low = np.minimum(points.astype(int), size - 1)
    share = np.clip(points - low.astype(dtype), 0, 1).astype(dtype)
    return _Taps(np.stack([low, np.minimum(low + 1, size - 1)]), np.stack([1 - share, share]))


def _cubic_kernel(distance: np.ndarray, a: float) -> np.ndarray:
    """Keys' cubic convolution kernel (R. Keys, 1981) for |distance| < 2."""
    x = np.abs(distance)
    return np.where(x < 1, _near(x, a), np.where(x < 2, _far(x, a), 0)).astype(distance.dtype)


def _near(x: Any, a: float) -> Any:
    return ((a + 2) * x - (a + 3)) * x * x + 1


def _far(x: Any, a: float) -> Any:
    return (((x - 5) * x + 8) * x - 4) * a


def _cubic(size: int, count: int, align: bool, factor: float | None, dtype: np.dtype) -> _Taps:
    points = _points(size, count, align, factor, dtype)
    low = np.floor(points)
    offsets = np.arange(-1, 3)[:, None]
    weights = _cubic_kernel((points - low)[None] - offsets.astype(dtype), _CUBIC)
    return _Taps(np.clip(low.astype(int)[None] + offsets, 0, size - 1), weights)


def _antialiased(
    size: int,
    count: int,
    align: bool,
    factor: float | None,
    dtype: np.dtype,
    *,
    kernel: Callable,
    radius: int,
) -> _Taps:
    """A filter of `radius` that grows with the scale when shrinking; weights add up to one."""
    scale = _scale(size, count, align, factor, dtype)
    stretch = max(scale, dtype.type(1))
    support, centers = dtype.type(radius) * stretch, (np.arange(count, dtype=dtype) + dtype.type(0.5)) * scale
    low = np.maximum((centers - support + dtype.type(0.5)).astype(int), 0)
    high = np.minimum((centers + support + dtype.type(0.5)).astype(int), size)
    offsets = np.arange(max(int((high - low).max(initial=1)), 1))[:, None]
    positions = low + offsets
    distance = (positions.astype(dtype) - centers + dtype.type(0.5)) / stretch
    weights = np.where(positions < high, kernel(distance), 0).astype(dtype)
    total = weights.sum(0)
    return _Taps(np.minimum(positions, size - 1), weights / np.where(total == 0, 1, total))


# -- applying a table ----------------------------------------------------------------------------------------


def _apply(x: jax.Array, axis: int, taps: _Taps) -> jax.Array:
    """Weighted reads along a negative axis."""
    if taps.weights is None:
        return _repeat_or_take(x, axis, taps.positions[0])
    total: Any = 0
    for positions, weights in zip(taps.positions, taps.weights):
        read = jnp.take(x, positions, axis=axis)
        weights = weights.reshape(weights.shape + (1,) * (-axis - 1)).astype(x.dtype)
        total = total + (
            read * weights if (weights != 0).all() else jnp.where(weights != 0, read * weights, 0)
        )
    return total


def _repeat_or_take(x: jax.Array, axis: int, positions: np.ndarray) -> jax.Array:
    """A take, written as a broadcast where every element is repeated equally often."""
    size = x.shape[axis]
    if (
        size
        and len(positions) % size == 0
        and (positions == np.arange(len(positions)) // (len(positions) // size)).all()
    ):
        return jnp.repeat(x, len(positions) // size, axis=axis)
    return jnp.take(x, positions, axis=axis)


def _transposed(taps: _Taps, size: int) -> _Taps:
    """For every input the outputs that read it, with their weights; the table of the gradient."""
    weights = np.ones(taps.positions.shape) if taps.weights is None else taps.weights
    places, outputs = np.nonzero(weights)
    inputs = taps.positions[places, outputs]
    order = np.argsort(inputs, kind="stable")
    inputs, outputs, weights = inputs[order], outputs[order], weights[places, outputs][order]
    rank = np.arange(len(inputs)) - np.searchsorted(inputs, inputs)
    shape = (int(rank.max(initial=0)) + 1, size)
    positions, shares = np.zeros(shape, int), np.zeros(shape, weights.dtype)
    positions[rank, inputs], shares[rank, inputs] = outputs, weights
    return _Taps(positions, shares)


def _tables(
    make: _Table, sizes: Sequence[int], counts: Sequence[int], align: bool, factors: Sequence, dtype
) -> list[_Taps]:
    factors = [*factors, *[None] * (len(sizes) - len(factors))]
    return [make(n, count, align, factor, dtype) for n, count, factor in zip(sizes, counts, factors)]


def _forward(
    make: _Table, x: jax.Array, output_size: Sequence[int], align: bool, factors: Sequence
) -> jax.Array:
    if make not in _EXACT:
        require(is_float(x.dtype), "aten interpolates integers by its own rounding")
        x = wide(x)
    spatial = len(output_size)
    dtype = np.dtype(x.dtype if is_float(x.dtype) else np.float32)
    tables = _tables(make, x.shape[-spatial:], output_size, align, factors, dtype)
    for back, taps in enumerate(reversed(tables), start=1):
        x = _apply(x, -back, taps)
    return x


def _backward(
    make: _Table, grad: jax.Array, output_size, input_size, align: bool, factors: Sequence
) -> jax.Array:
    spatial, grad = len(output_size), wide(grad)
    tables = _tables(make, input_size[-spatial:], output_size, align, factors, np.dtype(grad.dtype))
    for back, (taps, size) in enumerate(zip(reversed(tables), reversed(input_size)), start=1):
        grad = _apply(grad, -back, _transposed(taps, size))
    return grad


_nearest_exact = partial(_nearest, shift=0.5)
_EXACT = (_nearest, _nearest_exact)


def _register(name: str, make: _Table, aligned: int) -> None:
    """Rules of an interpolation and of its gradient; `aligned`: `align_corners` comes behind the sizes."""

    def options(rest: tuple, named: dict) -> tuple:
        return bool(aligned and rest[0]), rest[aligned:] or [*named.values()]

    op(getattr(aten, name).default)(
        lambda x, output_size, *rest, **named: _forward(make, x, output_size, *options(rest, named))
    )
    op(getattr(aten, f"{name}_backward").default)(
        lambda grad, output_size, input_size, *rest, **named: _backward(
            make, grad, output_size, input_size, *options(rest, named)
        )
    )


_INTERPOLATIONS: dict[str, tuple[_Table, int]] = {
    **{f"upsample_nearest{n}d": (_nearest, 0) for n in (1, 2, 3)},
    **{f"_upsample_nearest_exact{n}d": (_nearest_exact, 0) for n in (1, 2, 3)},
    "upsample_linear1d": (_linear, 1),
    "upsample_bilinear2d": (_linear, 1),
    "upsample_trilinear3d": (_linear, 1),
    "upsample_bicubic2d": (_cubic, 1),
    "_upsample_bilinear2d_aa": (
        partial(_antialiased, kernel=lambda d: np.maximum(1 - np.abs(d), 0), radius=1),
        1,
    ),
    "_upsample_bicubic2d_aa": (
        partial(_antialiased, kernel=partial(_cubic_kernel, a=_CUBIC_ANTIALIASED), radius=2),
        1,
    ),
    "_upsample_lanczos2d_aa": (
        partial(
            _antialiased, kernel=lambda d: np.where(np.abs(d) < 3, np.sinc(d) * np.sinc(d / 3), 0), radius=3
        ),
        1,
    ),  # new in torch 2.13
}
for _name, (_make, _aligned) in _INTERPOLATIONS.items():
    if hasattr(aten, _name):
        _register(_name, _make, _aligned)


# -- grid_sample ---------------------------------------------------------------------------------------------


_BY_NEAREST, _BY_CUBIC = 1, 2
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2


def _pixels(point: jax.Array, size: int, align: bool) -> jax.Array:
    """From [-1, 1] to positions: -1 and 1 are the centres of the border pixels with `align`, their outer
    edges without.
    """
    return (point + 1) / 2 * (size - 1) if align else ((point + 1) * size - 1) / 2


def _clipped(at: jax.Array, size: int) -> jax.Array:
    """Clipped to the pixels; the gradient is zero on the border itself, as aten's."""
    return jnp.where(at <= 0, 0, jnp.where(at >= size - 1, size - 1, at))


def _reflected(at: jax.Array, size: int, align: bool) -> jax.Array:
    """Mirrored about the border pixels' centres (`align`) or outer edges, as often as needed."""
    low, span = (0.0, size - 1) if align else (-0.5, size)
    if span == 0:
        return jnp.zeros_like(at)
    distance = jnp.where(at < low, low - at, at - low)
    flips = jnp.floor(distance / span)
    rest = distance - flips * span
    return jnp.where(flips % 2 == 0, rest + low, span - rest + low)


def _placed(at: jax.Array, size: int, padding: int, align: bool) -> jax.Array:
    """Positions that padding brings back inside (zeros: as they are)."""
    if padding == _REFLECTION:
        at = _reflected(at, size, align)
    return at if padding == _ZEROS else _clipped(at, size)


def _read(x: jax.Array, places: list[jax.Array]) -> jax.Array:
    """x[n, :, *places[n]] for places of (N, *out): (N, C, *out), zero outside."""
    sizes = x.shape[2:]
    inside: Any = True
    linear: Any = 0
    for place, size in zip(places, sizes):
        inside = inside & (place >= 0) & (place <= size - 1)
        linear = linear * size + jnp.clip(place, 0, size - 1).astype(jnp.int32)
    flat = x.reshape(*x.shape[:2], -1)
    values = jax.vmap(lambda image, at: image[:, at])(flat, linear)
    return jnp.where(inside[:, None], values, 0)


def _cubic_weights(t: jax.Array) -> list[jax.Array]:
    """The kernel for the four neighbours of a point t beyond the second."""
    return [_far(t + 1, _CUBIC), _near(t, _CUBIC), _near(1 - t, _CUBIC), _far(2 - t, _CUBIC)]


def _sample(x: jax.Array, grid: jax.Array, mode: int, padding: int, align: bool) -> jax.Array:
    sizes = x.shape[2:]
    points = [
        _pixels(grid[..., len(sizes) - 1 - i], size, align) for i, size in enumerate(sizes)
    ]  # the grid has x first
    if mode == _BY_CUBIC:
        lows = [jax.lax.stop_gradient(jnp.floor(p)) for p in points]
        taps = [
            [
                (_placed(low + k - 1, size, padding, align), weight)
                for k, weight in enumerate(_cubic_weights(p - low))
            ]
            for p, low, size in zip(points, lows, sizes)
        ]
    else:
        points = [_placed(p, size, padding, align) for p, size in zip(points, sizes)]
        if mode == _BY_NEAREST:
            return _read(x, [jax.lax.stop_gradient(jnp.round(p)) for p in points])
        lows = [jax.lax.stop_gradient(jnp.floor(p)) for p in points]
        taps = [[(low, low + 1 - p), (low + 1, p - low)] for p, low in zip(points, lows)]
    total: Any = 0
    for corner in itertools.product(*taps):
        weight: Any = 1
        for _, share in corner:
            weight = weight * share
        total = total + _read(x, [place for place, _ in corner]) * weight[:, None]
    return total


@op(aten.grid_sampler_2d, aten.grid_sampler_3d)
def _grid_sampler(x, grid, interpolation_mode, padding_mode, align_corners):
    return _sample(wide(x), wide(grid), interpolation_mode, padding_mode, align_corners)


@op(aten.grid_sampler_2d_backward, aten.grid_sampler_3d_backward)
def _grid_sampler_backward(grad, x, grid, interpolation_mode, padding_mode, align_corners, output_mask):
    _, vjp = jax.vjp(
        lambda x, grid: _sample(x, grid, interpolation_mode, padding_mode, align_corners), wide(x), wide(grid)
    )
    return vjp(wide(grad))
