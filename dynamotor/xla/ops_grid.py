"""`grid_sample`: values of an image at points of a grid, in two and three dimensions; gradients are its vjp.

>>> torch.nn.functional.grid_sample(x, torch.nn.functional.affine_grid(theta, x.shape))
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp

from .lowering import aten, op
from .numerics import wide

_LINEAR, _NEAREST, _CUBIC = 0, 1, 2
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
    inside, linear = True, 0
    for place, size in zip(places, sizes):
        inside = inside & (place >= 0) & (place <= size - 1)
        linear = linear * size + jnp.clip(place, 0, size - 1).astype(jnp.int32)
    flat = x.reshape(*x.shape[:2], -1)
    values = jax.vmap(lambda image, at: image[:, at])(flat, linear)
    return jnp.where(inside[:, None], values, 0)


def _cubic_weights(t: jax.Array) -> list[jax.Array]:
    """Keys' kernel with a = -0.75 for the four neighbours of a point t beyond the second."""
    a = -0.75

    def far(x):
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    def near(x):
        return ((a + 2) * x - (a + 3)) * x * x + 1

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def _sample(x: jax.Array, grid: jax.Array, mode: int, padding: int, align: bool) -> jax.Array:
    sizes = x.shape[2:]
    points = [
        _pixels(grid[..., len(sizes) - 1 - i], size, align) for i, size in enumerate(sizes)
    ]  # the grid has x first
    if mode == _CUBIC:
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
        if mode == _NEAREST:
            return _read(x, [jax.lax.stop_gradient(jnp.round(p)) for p in points])
        lows = [jax.lax.stop_gradient(jnp.floor(p)) for p in points]
        taps = [[(low, low + 1 - p), (low + 1, p - low)] for p, low in zip(points, lows)]
    total = 0
    for corner in itertools.product(*taps):
        weight = 1
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
