"""Convolutions of one to three dimensions. One forward is written; the transposed form and all gradients are
its transposes.

XLA:CPU is slow at grouped, strided-gradient and very small convolutions (70 ms where aten takes 2): there
they are sums of one product for every offset of the kernel.

>>> torch.nn.functional.conv2d(x, weight, stride=2, padding=1)
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .dtypes import convolution_precision, is_float, on_cpu, per_dimension, wide
from .lowering import aten, op


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
