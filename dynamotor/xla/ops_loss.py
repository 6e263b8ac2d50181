"""Losses and their gradients, and the scale of losses that torch.amp keeps. `reduction` is 0
(none), 1 (mean) or 2 (sum), as aten numbers them.

>>> torch.nn.functional.cross_entropy(logits, target)  # _log_softmax and nll_loss_forward
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .lowering import aten, op, rows
from .numerics import wide

_NONE, _MEAN, _SUM = 0, 1, 2


def _reduce(loss: jax.Array, reduction: int) -> jax.Array:
    if reduction == _MEAN:
        return jnp.mean(loss)
    return jnp.sum(loss) if reduction == _SUM else loss


def _spread(grad: jax.Array, like: jax.Array, reduction: int) -> jax.Array:
    """The gradient of every element's loss, given that of the reduced loss."""
    return wide(grad) / like.size if reduction == _MEAN else wide(grad)


rows(
    op,
    {
        aten.mse_loss: lambda x, target, reduction=_MEAN: _reduce(
            jnp.square(wide(x) - wide(target)), reduction
        ),
        aten.mse_loss_backward: lambda grad, x, target, reduction: (
            _spread(grad, each := wide(x) - wide(target), reduction) * 2 * each
        ),
    },
)


# -- negative log likelihood: classes along dimension 1 (0 for a single sample) ------------------------------


# -- margin losses: x is (N, C) or (C) -----------------------------------------------------------------------


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(1, -1) if x.ndim < 2 else x


@op(aten.multi_margin_loss_backward)
def _multi_margin_backward(grad, x, target, p, margin, weight=None, reduction=_MEAN):
    rows, target = _rows(wide(x)), target.reshape(-1, 1)
    gap = margin - jnp.take_along_axis(rows, target, axis=1) + rows
    others = jnp.arange(rows.shape[1])[None, :] != target
    slope = jnp.where(others & (gap > 0), 1.0 if int(p) == 1 else 2 * gap, 0) / rows.shape[1]
    if weight is not None:
        slope = slope * wide(weight)[target]
    slope = jnp.where(others, slope, -jnp.sum(slope, axis=1, keepdims=True))
    each = _spread(grad, slope[:, 0], reduction)
    return (slope * (each.reshape(-1, 1) if each.ndim else each)).reshape(x.shape)


def _targets(target: jax.Array, classes: int) -> tuple[jax.Array, jax.Array]:
    """Lists of classes ended by -1: which entries count, and for each class whether it is listed."""
    counts = jnp.cumsum(target < 0, axis=1) == 0
    listed = jnp.any((target[:, :, None] == jnp.arange(classes)) & counts[:, :, None], axis=1)
    return counts, listed


def _multilabel_gaps(x: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """1 - x[listed] + x[other] for every listed class (dimension 1) and every class (dimension 2), 0 where it
    does not count.
    """
    counts, listed = _targets(target, x.shape[1])
    chosen = jnp.take_along_axis(x, jnp.where(counts, target, 0), axis=1)
    gaps = 1 - chosen[:, :, None] + x[:, None, :]
    return jnp.where(counts[:, :, None] & ~listed[:, None, :], gaps, 0), counts, listed


@op(aten.multilabel_margin_loss_forward)
def _multilabel_margin(x, target, reduction):
    rows = _rows(wide(x))
    gaps, _, listed = _multilabel_gaps(rows, _rows(target))
    loss = jnp.sum(jnp.maximum(gaps, 0), axis=(1, 2)) / rows.shape[1]
    return _reduce(loss if x.ndim > 1 else loss[0], reduction), listed.reshape(target.shape)


@op(aten.multilabel_margin_loss_backward)
def _multilabel_margin_backward(grad, x, target, reduction, is_target):
    rows, lists = _rows(wide(x)), _rows(target)
    gaps, counts, _ = _multilabel_gaps(rows, lists)
    active = (gaps > 0).astype(rows.dtype) / rows.shape[1]
    own = (
        jax.nn.one_hot(jnp.where(counts, lists, -1), rows.shape[1], dtype=rows.dtype)
        * jnp.sum(active, axis=2)[:, :, None]
    )
    slope = jnp.sum(active, axis=1) - jnp.sum(own, axis=1)
    each = _spread(grad, slope[:, 0], reduction)
    return (slope * (each.reshape(-1, 1) if each.ndim else each)).reshape(x.shape)


# -- torch.amp.GradScaler: unscale gradients, look for what is not finite, move the scale ----------------------


@op(aten._amp_foreach_non_finite_check_and_unscale)
def _unscale(gradients, found_inf, inv_scale):
    """(*unscaled, found): found is 1 as soon as one element is infinite or NaN."""
    bad = found_inf != 0
    for gradient in gradients:
        bad = bad | ~jnp.isfinite(gradient).all()
    return *(wide(gradient) * inv_scale for gradient in gradients), jnp.where(bad, 1.0, found_inf)


@op(aten._amp_update_scale)
def _update_scale(
    scale, growth_tracker, found_inf, scale_growth_factor, scale_backoff_factor, growth_interval
):
    """Shrink after a bad step; grow after `growth_interval` good ones, unless the scale would overflow."""
    bad, good_steps = found_inf != 0, growth_tracker + 1
    due = good_steps == growth_interval
    grown = scale * jnp.asarray(scale_growth_factor, scale.dtype)
    kept = jnp.where(due & jnp.isfinite(grown), grown, scale)
    return (
        jnp.where(bad, scale * jnp.asarray(scale_backoff_factor, scale.dtype), kept),
        jnp.where(bad | due, 0, good_steps),
    )
