"""Losses and their gradients, CTC among them as loops over time, and the scale of losses that torch.amp
keeps. `reduction` is 0 (none), 1 (mean) or 2 (sum), as aten numbers them.

>>> torch.nn.functional.cross_entropy(logits, target)  # _log_softmax and nll_loss_forward
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from . import dispatch
from .compat import OpOverload
from .dispatch import specials
from .dtypes import wide
from .lowering import aten, op, rows
from .specials import bind

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


# -- torch.amp.GradScaler: unscale gradients, look for infinities and NaN, move the scale ---------------


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


# -- connectionist temporal classification -------------------------------------------------------------------


def _states(
    log_probs: jax.Array, targets: jax.Array, lengths: jax.Array, blank: int
) -> tuple[jax.Array, ...]:
    """(labels [N, S], their log probabilities [T, N, S], whether a state can be reached from that two before)
    of the S = 2 W + 1 states; those behind a target's end cannot be met."""
    labels = jnp.full((targets.shape[0], 2 * targets.shape[1] + 1), blank, targets.dtype)
    labels = labels.at[:, 1::2].set(targets)
    inside = jnp.arange(labels.shape[1]) <= 2 * lengths[:, None]
    met = jnp.take_along_axis(log_probs, jnp.where(inside, labels, 0)[None], axis=2)
    skips = jnp.pad(labels[:, 2:] != labels[:, :-2], [(0, 0), (min(2, labels.shape[1]), 0)])
    return labels, jnp.where(inside, met, -jnp.inf), skips[:, : labels.shape[1]]


def _moved(x: jax.Array, by: int) -> jax.Array:
    """The value of the state `by` before."""
    return jnp.pad(x, [(0, 0), (by, 0)], constant_values=-jnp.inf)[:, : x.shape[1]]


def _arrive(before: jax.Array, skips: jax.Array) -> jax.Array:
    """log of the sum over the states that a state is reached from."""
    skipped = jnp.where(skips, _moved(before, 2), -jnp.inf)
    return jnp.logaddexp(jnp.logaddexp(before, _moved(before, 1)), skipped)


@op(aten._ctc_loss.Tensor)
def _loss(log_probs, targets, input_lengths, target_lengths, blank=0, zero_infinity=False):
    """(-log of the probability of each target [N], log alpha [N, T, S])."""
    _, met, skips = _states(log_probs, targets, target_lengths, blank)
    states = jnp.arange(met.shape[2])

    def step(alpha, now):
        alpha = _arrive(alpha, skips) + now
        return alpha, alpha

    first = jnp.where(states < 2, met[0], -jnp.inf)
    alphas = jnp.concatenate([first[None], jax.lax.scan(step, first, met[1:])[1]])
    last = jnp.take_along_axis(alphas, (input_lengths - 1)[None, :, None], axis=0, mode="clip")[0]
    ends = (states == 2 * target_lengths[:, None]) | (states == 2 * target_lengths[:, None] - 1)
    total = -jax.scipy.special.logsumexp(jnp.where(ends, last, -jnp.inf), axis=1)
    nothing = jnp.where(target_lengths == 0, 0, jnp.inf)
    return jnp.where(input_lengths == 0, nothing, total), jnp.swapaxes(alphas, 0, 1)


@op(aten._ctc_loss_backward.Tensor)
def _gradient(
    grad, log_probs, targets, input_lengths, target_lengths, loss, log_alpha, blank, zero_infinity=False
):
    """A class's probability at each time, less the share of the target's paths that are at it."""
    labels, met, skips = _states(log_probs, targets, target_lengths, blank)
    steps, batch, states = met.shape
    ends = jnp.arange(states) >= 2 * target_lengths[:, None] - 1
    skips = jnp.flip(jnp.roll(skips, -2, axis=1), 1)  # those that can be left by a skip, from the end

    def step(beta, now):
        time, met_now = now
        led = jnp.flip(_arrive(jnp.flip(beta, 1), skips), 1)
        at_end = (time == input_lengths - 1)[:, None]
        beta = jnp.where(at_end, jnp.where(ends, 0, -jnp.inf), led) + met_now
        beta = jnp.where((time < input_lengths)[:, None], beta, -jnp.inf)
        return beta, beta

    nowhere = jnp.full((batch, states), -jnp.inf, met.dtype)
    betas = jax.lax.scan(step, nowhere, (jnp.arange(steps), met), reverse=True)[1]
    share = jnp.exp(jnp.swapaxes(log_alpha, 0, 1) + betas - met + loss[:, None])
    share = jnp.where(jnp.isfinite(met), share, 0)
    rows = jnp.arange(batch)[:, None]
    share = jnp.zeros_like(log_probs).at[:, rows, labels].add(share, mode="drop")
    result = (jnp.exp(log_probs) - share) * grad[:, None]
    result = jnp.where((loss == jnp.inf)[:, None], 0 if zero_infinity else jnp.nan, result)
    return jnp.where((jnp.arange(steps)[:, None] < input_lengths)[:, :, None], result, 0)


@specials.register(
    aten._ctc_loss.default,
    aten._ctc_loss.Tensor,
    aten._ctc_loss_backward.default,
    aten._ctc_loss_backward.Tensor,
)
def _with_rows(func: OpOverload, args: tuple, kwargs: dict[str, Any] | None) -> Any:
    """Targets as rows of one width, lengths on the device."""
    bound = bind(func, args, kwargs)
    log_probs, targets, lengths = bound["log_probs"], bound["targets"], bound["target_lengths"]
    device = log_probs.device
    for name in ("input_lengths", "target_lengths"):
        bound[name] = torch.as_tensor(bound[name], dtype=torch.int64).to(device).reshape(-1)
    if "log_alpha" in bound:
        width = bound["log_alpha"].shape[-1] // 2
    elif isinstance(lengths, torch.Tensor):
        width = targets.shape[1] if targets.dim() == 2 else int(lengths.max())
    else:
        width = max(lengths)  # aten's, and that of a captured graph
    targets = targets.to(device)
    if targets.dim() == 1:
        starts = bound["target_lengths"].cumsum(0) - bound["target_lengths"]
        places = starts[:, None] + torch.arange(width, device=device)
        targets = torch.cat([targets, targets.new_zeros(1)])[places.clamp(max=targets.numel())]
    bound["targets"] = targets[:, :width]
    return dispatch.plain(func.overloadpacket.Tensor, tuple(bound.values()), None)
