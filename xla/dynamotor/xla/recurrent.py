"""Recurrent nets as loops: `lstm`, `gru` and `rnn` are one `lax.scan` a layer and direction, whatever their
length.

>>> torch.nn.LSTM(3, 4).to("xla")(x)        # compiles as fast for 500 steps as for 12
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.nn import GRU  # noqa: F401  (what torch_xla.experimental.gru is)

from . import jax_call
from .dtypes import wide
from .lowering import aten, composite
from .ops_linalg import product


def _lstm_cell(
    x: jax.Array, states: tuple, w_hh: jax.Array, b_hh: jax.Array | None, w_hr: jax.Array | None
) -> tuple:
    """`x`: the input's part, [batch, 4 hidden]. Returns the new (h, c)."""
    h, c = states
    into, forget, new, out = jnp.split(x + _linear(h, w_hh, b_hh), 4, axis=-1)
    c = jax.nn.sigmoid(forget) * wide(c) + jax.nn.sigmoid(into) * jnp.tanh(new)
    h = jax.nn.sigmoid(out) * jnp.tanh(c)
    return (h if w_hr is None else _linear(h, w_hr, None), c)


def _gru_cell(
    x: jax.Array, states: tuple, w_hh: jax.Array, b_hh: jax.Array | None, w_hr: jax.Array | None
) -> tuple:
    (h,) = states
    reset_x, update_x, new_x = jnp.split(x, 3, axis=-1)
    reset_h, update_h, new_h = jnp.split(_linear(h, w_hh, b_hh), 3, axis=-1)
    new = jnp.tanh(new_x + jax.nn.sigmoid(reset_x + reset_h) * new_h)
    return ((wide(h) - new) * jax.nn.sigmoid(update_x + update_h) + new,)


def _rnn_cell(activation: Callable[[Any], Any]) -> Callable[..., tuple]:
    return lambda x, states, w_hh, b_hh, w_hr: (activation(x + _linear(states[0], w_hh, b_hh)),)


_CELLS = {
    "lstm": _lstm_cell,
    "gru": _gru_cell,
    "rnn_tanh": _rnn_cell(jnp.tanh),
    "rnn_relu": _rnn_cell(jax.nn.relu),
}


def _linear(x: jax.Array, weight: Any, bias: Any) -> Any:
    made = product(x.astype(weight.dtype), weight.T)
    return made if bias is None else made + wide(bias)


def _layer(
    kind: str, reverse: bool, n_states: int, masked: bool, biases: bool, projected: bool
) -> Callable[..., list[Any]]:
    """(x [time, batch, features], states [batch, hidden]..., weights..., mask?) -> [outputs, last
    states...].
    """
    cell = _CELLS[kind]

    def layer(x: Any, *rest: Any) -> list[Any]:
        states, weights = rest[:n_states], list(rest[n_states:])
        mask = weights.pop() if masked else None
        w_hr = weights.pop() if projected else None
        w_ih, w_hh, b_ih, b_hh = weights if biases else (*weights, None, None)

        def step(states: tuple, inputs: Any) -> tuple[tuple, Any]:
            now, valid = inputs
            made = [new.astype(old.dtype) for new, old in zip(cell(now, states, w_hh, b_hh, w_hr), states)]
            if valid is not None:
                made = [jnp.where(valid[:, None], new, old) for new, old in zip(made, states)]
            return tuple(made), made[0]

        last, outputs = jax.lax.scan(step, tuple(states), (_linear(x, w_ih, b_ih), mask), reverse=reverse)
        return [outputs, *last]

    return layer


def _run(
    kind: str,
    x: torch.Tensor,
    states: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    mask: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """[outputs [time, batch, features], last states...] of all layers; `mask` bool [time, batch]: which steps
    are there.
    """
    if torch.is_autocast_enabled("xla"):
        lower = torch.get_autocast_dtype("xla")
        x, *states = [t.to(lower) for t in (x, *states)]
        weights = [w.to(lower) for w in weights]
    directions, projected = 1 + bidirectional, len(states) == 2 and states[0].shape[2] != states[1].shape[2]
    count = (4 if has_biases else 2) + projected
    lasts: list[list[torch.Tensor]] = [[] for _ in states]
    for index in range(num_layers):
        made = []
        for direction in range(directions):
            at = index * directions + direction
            key = (kind, direction == 1, len(states), mask is not None, has_biases, projected)
            number = jax_call.number_of(key, partial(_layer, *key))
            masks = [] if mask is None else [mask]
            own = weights[at * count : (at + 1) * count]
            outputs, *last = jax_call.apply(number, [x, *[s[at] for s in states], *own, *masks])
            made.append(outputs)
            for all_of, one in zip(lasts, last):
                all_of.append(one)
        x = made[0] if directions == 1 else torch.cat(made, 2)
        if dropout and train and index < num_layers - 1:
            x = torch.dropout(x, dropout, True)
    return [x, *[torch.stack(all_of) for all_of in lasts]]


def _on_sequences(
    kind: str, input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
):
    x = input.transpose(0, 1) if batch_first else input
    torch._check(x.shape[0] > 0, lambda: "Expected sequence length to be larger than 0 in RNN")
    states = hx if isinstance(hx, (list, tuple)) else [hx]
    outputs, *last = _run(kind, x, states, params, has_biases, num_layers, dropout, train, bidirectional)
    return outputs.transpose(0, 1) if batch_first else outputs, *last


def _on_packed(
    kind: str, data, batch_sizes, hx, params, has_biases, num_layers, dropout, train, bidirectional
):
    """Packed sequences are padded, run with a mask, and packed again."""
    sizes = batch_sizes.tolist()
    there = torch.arange(sizes[0]) < batch_sizes[:, None]
    place = (there.reshape(-1).cumsum(0) - 1).clamp(min=0).to(data.device)
    x = data[place].view(len(sizes), sizes[0], *data.shape[1:])
    states = hx if isinstance(hx, (list, tuple)) else [hx]
    mask = there.to(data.device)
    outputs, *last = _run(
        kind, x, states, params, has_biases, num_layers, dropout, train, bidirectional, mask
    )
    kept = there.reshape(-1).nonzero()[:, 0].to(data.device)
    return outputs.flatten(0, 1)[kept], *last


for _kind in _CELLS:
    for _overload, _make in (("input", _on_sequences), ("data", _on_packed)):
        composite(getattr(getattr(aten, _kind), _overload))(partial(_make, _kind))
