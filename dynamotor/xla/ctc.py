"""Connectionist temporal classification: forward and backward as one `lax.scan` over time each.

The lengths are inputs of the graph, so that other lengths compile nothing. States are the labels with a blank
before, between and behind them; a path stays, goes one on, or skips the blank between two different labels.

>>> torch.nn.functional.ctc_loss(log_probs, targets, input_lengths, target_lengths)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from . import dispatch
from .dispatch import specials
from .lowering import aten, op
from .specials import bind


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
    """What the state `by` before has."""
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
    """What a class has at each time, less the share of the target's paths that are at it."""
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
def _with_rows(func: Any, args: tuple, kwargs: dict[str, Any] | None) -> Any:
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
