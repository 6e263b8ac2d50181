"""Normalisation: layer, group, batch and RMS norm, forward and backward; statistics in float32 for low
precision.

aten returns what its backward wants: `(output, mean, 1 / sqrt(variance + eps))`.

>>> torch.ops.aten.native_layer_norm.default(x, [64], weight, bias, 1e-5)
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import torch

from .lowering import op
from .numerics import wide

aten = torch.ops.aten


def _moments(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Mean and biased variance, dimensions kept."""
    mean = jnp.mean(x, axis=axes, keepdims=True)
    return mean, jnp.mean(jnp.square(x - mean), axis=axes, keepdims=True)


def _normal_gradient(grad: jax.Array, normal: jax.Array, rstd: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Gradient of x for normal = (x - mean(x)) * rstd(x), given the gradient of `normal`."""
    mean = jnp.mean(grad, axis=axes, keepdims=True)
    slope = jnp.mean(grad * normal, axis=axes, keepdims=True)
    return (grad - mean - normal * slope) * rstd


def _affine(normal: jax.Array, weight: jax.Array | None, bias: jax.Array | None) -> jax.Array:
    if weight is not None:
        normal = normal * wide(weight)
    return normal if bias is None else normal + wide(bias)


# -- layer norm and RMS norm: over the last dimensions -------------------------------------------------------


def _last(x: jax.Array, count: int) -> tuple[int, ...]:
    return tuple(range(x.ndim - count, x.ndim))


@op(aten.native_layer_norm)
def _layer_norm(x, normalized_shape, weight, bias, eps):
    x = wide(x)
    mean, variance = _moments(x, _last(x, len(normalized_shape)))
    rstd = jax.lax.rsqrt(variance + eps)
    return _affine((x - mean) * rstd, weight, bias), mean, rstd


@op(aten.native_layer_norm_backward)
def _layer_norm_backward(grad, x, normalized_shape, mean, rstd, weight, bias, output_mask):
    grad, x, mean, rstd = wide(grad), wide(x), wide(mean), wide(rstd)
    outer, axes = tuple(range(x.ndim - len(normalized_shape))), _last(x, len(normalized_shape))
    normal = (x - mean) * rstd
    inner = grad if weight is None else grad * wide(weight)
    return (
        _normal_gradient(inner, normal, rstd, axes),
        jnp.sum(grad * normal, axis=outer),
        jnp.sum(grad, axis=outer),
    )


# -- group norm: x is seen as (N, groups, C / groups * HxW) --------------------------------------------------


@op(aten.native_group_norm)
def _group_norm(x, weight, bias, N, C, HxW, group, eps):
    grouped = wide(x).reshape(N, group, C // group * HxW)
    mean, variance = _moments(grouped, (2,))
    rstd = jax.lax.rsqrt(variance + eps)
    normal = ((grouped - mean) * rstd).reshape(N, C, HxW)
    columns = [None if v is None else v.reshape(C, 1) for v in (weight, bias)]
    return _affine(normal, *columns).reshape(x.shape), mean[..., 0], rstd[..., 0]


@op(aten.native_group_norm_backward)
def _group_norm_backward(grad, x, mean, rstd, weight, N, C, HxW, group, output_mask):
    shape, grouped = x.shape, (N, group, C // group * HxW)
    grad, mean, rstd = (
        wide(grad).reshape(N, C, HxW),
        wide(mean).reshape(N, group, 1),
        wide(rstd).reshape(N, group, 1),
    )
    normal = (wide(x).reshape(grouped) - mean) * rstd
    inner = grad if weight is None else grad * wide(weight).reshape(C, 1)
    dx = _normal_gradient(inner.reshape(grouped), normal, rstd, (2,))
    return (
        dx.reshape(shape),
        jnp.sum(grad * normal.reshape(N, C, HxW), axis=(0, 2)),
        jnp.sum(grad, axis=(0, 2)),
    )


# -- batch norm: over all dimensions but the second ----------------------------------------------------------


def _channel_axes(x: jax.Array) -> tuple[int, ...]:
    return tuple(i for i in range(x.ndim) if i != 1)


def _per_channel(v: jax.Array | None, x: jax.Array) -> jax.Array | None:
    """A vector of channels, shaped to broadcast over x."""
    return None if v is None else wide(v).reshape((1, -1) + (1,) * (x.ndim - 2))


def _batch_norm(
    x: jax.Array, weight, bias, running_mean, running_var, training: bool, eps: float
) -> tuple[jax.Array, ...]:
    """(output, mean, biased variance) with batch statistics in training, the running ones otherwise; vectors
    per channel.
    """
    x = wide(x)
    if training or running_mean is None:
        mean, variance = _moments(x, _channel_axes(x))
    else:
        mean, variance = _per_channel(running_mean, x), _per_channel(running_var, x)
    output = (x - mean) * _scale(jax.lax.rsqrt(variance + eps), _per_channel(weight, x))
    output = output if bias is None else output + wide(_per_channel(bias, x))
    return output, mean.reshape(-1), variance.reshape(-1)


def _scale(rstd: jax.Array, weight: jax.Array | None) -> jax.Array:
    """What a channel is multiplied with. One factor, not two in a row: XLA merges those where nobody else
    reads the first product, so that a forward pass alone would be rounded differently from one that shares a
    program with its backward."""
    return rstd if weight is None else rstd * wide(weight)


def _updated(x: jax.Array, running: jax.Array | None, value: jax.Array, momentum: float) -> jax.Array | None:
    return None if running is None else (1 - momentum) * wide(running) + momentum * value


def _running(
    x: jax.Array, mean, variance, running_mean, running_var, training: bool, momentum: float
) -> tuple:
    """The running statistics afterwards; the variance that they follow is the unbiased one."""
    if not training:
        return running_mean, running_var
    count = math.prod(x.shape[i] for i in _channel_axes(x))
    unbiased = variance * count / (count - 1) if count > 1 else variance * jnp.nan
    return _updated(x, running_mean, mean, momentum), _updated(x, running_var, unbiased, momentum)


def _saved(mean: jax.Array, variance: jax.Array, training: bool, eps: float) -> tuple[jax.Array, jax.Array]:
    """What aten keeps for the backward: nothing (size 0) in inference."""
    return (mean, jax.lax.rsqrt(variance + eps)) if training else (jnp.zeros(0), jnp.zeros(0))


@op(aten._native_batch_norm_legit_functional)
def _batch_norm_functional(x, weight, bias, running_mean, running_var, training, momentum, eps):
    output, mean, variance = _batch_norm(x, weight, bias, running_mean, running_var, training, eps)
    moved = _running(x, mean, variance, running_mean, running_var, training, momentum)
    return output, *_saved(mean, variance, training, eps), *moved


@op(aten._native_batch_norm_legit.no_stats)
def _batch_norm_no_stats(x, weight, bias, training, momentum, eps):
    output, mean, variance = _batch_norm(x, weight, bias, None, None, training, eps)
    return output, *_saved(mean, variance, True, eps)


@op(aten._native_batch_norm_legit_no_training, out=True)
def _batch_norm_no_training(x, weight, bias, running_mean, running_var, momentum, eps, *, out):
    output, _, _ = _batch_norm(x, weight, bias, running_mean, running_var, False, eps)
    return (
        output,
        jnp.zeros(out[1].shape),
        jnp.zeros(out[2].shape),
    )  # never read; aten's kernels differ in their size


@op(aten.native_batch_norm_backward)
def _batch_norm_backward(
    grad, x, weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask
):
    grad, x = wide(grad), wide(x)
    if train:
        mean, rstd = _per_channel(save_mean, x), _per_channel(save_invstd, x)
    else:
        mean, rstd = _per_channel(running_mean, x), jax.lax.rsqrt(_per_channel(running_var, x) + eps)
    axes, centred = _channel_axes(x), x - mean
    slope = jnp.sum(grad * centred, axis=axes, keepdims=True)
    if train:
        count = math.prod(x.shape[i] for i in axes)
        dx = grad - jnp.mean(grad, axis=axes, keepdims=True) - centred * (slope * jnp.square(rstd) / count)
    else:
        dx = grad
    return dx * _scale(rstd, _per_channel(weight, x)), (slope * rstd).reshape(-1), jnp.sum(grad, axis=axes)


@op(aten.batch_norm_update_stats)
def _batch_norm_update_stats(x, running_mean, running_var, momentum):
    mean, variance = _moments(wide(x), _channel_axes(x))
    return mean.reshape(-1), variance.reshape(-1)


# -- weight norm: w = v * g / norm(v), the norm over all dimensions but `dim` --------------------------------


def _all_but(x: jax.Array, dim: int) -> tuple[int, ...]:
    return tuple(i for i in range(x.ndim) if i != dim % x.ndim)


@op(aten._weight_norm_interface_backward)
def _weight_norm_backward(grad, v, g, norms, dim):
    grad, v, g, norms = wide(grad), wide(v), wide(g), wide(norms).reshape(g.shape)
    along = jnp.sum(grad * v, axis=_all_but(v, dim), keepdims=True)
    return (g / norms) * (grad - v * along / jnp.square(norms)), along / norms
