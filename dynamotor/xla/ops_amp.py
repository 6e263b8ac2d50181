"""The two ops of torch.amp.GradScaler: unscale gradients while looking for what is not finite, and move the
scale.

>>> scaler = torch.amp.GradScaler("xla")
"""

from __future__ import annotations

import jax.numpy as jnp
import torch

from .lowering import op
from .numerics import wide

aten = torch.ops.aten


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
