"""Embedding tables: rows by index, their gradient, and bags of rows.

>>> _embedding(jnp.eye(3), jnp.asarray([2, 0]))
Array([[0., 0., 1.],
       [1., 0., 0.]], dtype=float64)

An index out of range raises in aten; here it reads the nearest row and its gradient is dropped.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .dtypes import wide
from .lowering import Spec, aten, op, require
from .ops_index import WITHIN

SUM, MEAN, MAX = 0, 1, 2


@op(aten.embedding)
def _embedding(weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
    return weight.at[indices].get(**WITHIN)


@op(aten.embedding_renorm)
def _embedding_renorm(weight, indices, max_norm, norm_type):
    """Rows that are looked up are scaled down to a norm of at most `max_norm`."""
    rows = wide(weight.at[indices.reshape(-1)].get(**WITHIN))
    norm = jnp.linalg.norm(rows, norm_type, 1, keepdims=True)
    scaled = jnp.where(norm > max_norm, rows * (max_norm / (norm + 1e-7)), rows)
    return weight.at[indices.reshape(-1)].set(scaled.astype(weight.dtype), **WITHIN)


def add_rows(
    grad: jax.Array, indices: jax.Array, count: int, padding_idx: int, scale_grad_by_freq: bool
) -> jax.Array:
    """(count, columns): row i is the sum of the rows of `grad` (n, columns) whose index is i; the padding row
    stays zero.
    """
    rows = wide(grad)
    if scale_grad_by_freq:
        frequency = jnp.zeros(count, jnp.int32).at[indices].add(1, **WITHIN)
        rows = rows / frequency.at[indices].get(**WITHIN).astype(rows.dtype)[:, None]
    target = jnp.where(indices == padding_idx, count, indices) if padding_idx >= 0 else indices
    total = (
        jnp.zeros((count, rows.shape[1]), rows.dtype)
        .at[target]
        .add(rows, mode="drop", wrap_negative_indices=False)
    )
    return total.astype(grad.dtype)


@op(aten.embedding_dense_backward)
def _embedding_dense_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq):
    return add_rows(
        grad.reshape(indices.size, grad.shape[-1]),
        indices.reshape(-1),
        num_weights,
        padding_idx,
        scale_grad_by_freq,
    )


@op(aten._embedding_bag, aten._embedding_bag_forward_only, out=True)
def _embedding_bag(
    weight, indices, offsets, scale_grad_by_freq=False, mode=SUM, sparse=False, per_sample_weights=None,
    include_last_offset=False, padding_idx=-1, *, out: tuple[Spec, ...],
):  # fmt: skip
    """(bags, bag of each index, size of each bag, index of the largest); the last three are cut to aten's
    shapes.
    """
    bags = out[0].shape[0]
    bag = _bag_of(offsets[:bags], indices.size)
    counted = indices != padding_idx
    rows = wide(weight.at[indices].get(**WITHIN))
    size = jnp.zeros(bags, jnp.int64).at[bag].add(counted, **WITHIN)
    largest = jnp.zeros((bags, weight.shape[1]), jnp.int64)
    if mode == MAX:
        value, largest = _largest(rows, indices, bag, counted, bags)
    else:
        rows = rows if per_sample_weights is None else rows * wide(per_sample_weights)[:, None]
        value = (
            jnp.zeros((bags, rows.shape[1]), rows.dtype)
            .at[bag]
            .add(jnp.where(counted[:, None], rows, 0), **WITHIN)
        )
        value = value / size.clip(1).astype(rows.dtype)[:, None] if mode == MEAN else value
    return value, *_extras(bag, size, largest, mode, out[1:])


def _largest(
    rows: jax.Array, indices: jax.Array, bag: jax.Array, counted: jax.Array, bags: int
) -> tuple[jax.Array, jax.Array]:
    """(largest value of each column of each bag, the table's row where it is): zeros for an empty bag."""
    shape = (bags, rows.shape[1])
    floor = jnp.where(counted[:, None], rows, -jnp.inf)
    value = jnp.full(shape, -jnp.inf, rows.dtype).at[bag].max(floor, **WITHIN)
    hit = (floor == value.at[bag].get(**WITHIN)) & counted[:, None]
    place = jnp.where(hit, jnp.arange(indices.size)[:, None], indices.size)
    first = jnp.full(shape, indices.size).at[bag].min(place, **WITHIN)
    found = first < indices.size
    padded = jnp.concatenate([indices.astype(jnp.int64), jnp.zeros(1, jnp.int64)])
    return jnp.where(found, value, 0), jnp.where(found, padded.at[first].get(**WITHIN), 0)


def _extras(
    bag: jax.Array, size: jax.Array, largest: jax.Array, mode: int, out: tuple[Spec, ...]
) -> tuple[jax.Array, ...]:
    """What the backward reads, in aten's shapes: sums need no sizes and get zeros."""

    def fit(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jnp.pad(x, [(0, max(0, n - have)) for n, have in zip(shape, x.shape)])[
            tuple(slice(n) for n in shape)
        ]

    counts = jnp.zeros_like(size) if mode == SUM else size
    return (
        fit(bag, out[0].shape),
        fit(counts, out[1].shape),
        fit(largest if mode == MAX else counts, out[2].shape),
    )


@op(aten._embedding_bag_dense_backward)
def _embedding_bag_dense_backward(
    grad,
    indices,
    offset2bag,
    bag_size,
    largest,
    num_weights,
    scale_grad_by_freq,
    mode,
    per_sample_weights,
    padding_idx=-1,
):
    grad = wide(grad)
    if mode == MAX:
        used = (bag_size[: grad.shape[0]] > 0)[:, None]
        rows = jnp.where(used, largest[: grad.shape[0]], num_weights)
        columns = jnp.arange(grad.shape[1])[None]
        return jnp.zeros((num_weights, grad.shape[1]), grad.dtype).at[rows, columns].add(grad, mode="drop")
    if mode == MEAN:
        grad = grad / bag_size[: grad.shape[0]].clip(1).astype(grad.dtype)[:, None]
    rows = grad.at[offset2bag].get(**WITHIN)
    rows = rows if per_sample_weights is None else rows * wide(per_sample_weights)[:, None]
    return add_rows(rows, indices, num_weights, padding_idx, scale_grad_by_freq)


@op(aten._embedding_bag_backward)
def _embedding_bag_backward(
    grad, indices, offsets, offset2bag, bag_size, largest, num_weights, scale_grad_by_freq, mode, sparse,
    per_sample_weights, padding_idx=-1,
):  # fmt: skip
    require(not sparse, "XLA has no sparse gradients")
    bag = _bag_of(offsets[: grad.shape[0]], indices.size)
    return _embedding_bag_dense_backward(
        grad,
        indices,
        bag,
        bag_size,
        largest,
        num_weights,
        scale_grad_by_freq,
        mode,
        per_sample_weights,
        padding_idx,
    )


def _bag_of(offsets: jax.Array, count: int) -> jax.Array:
    """Which bag each of `count` indices is in: the last one that starts at or before it."""
    return jnp.searchsorted(offsets, jnp.arange(count), side="right") - 1


@op(aten._embedding_bag_per_sample_weights_backward)
def _embedding_bag_per_sample_weights_backward(
    grad, weight, indices, offsets, offset2bag, mode, padding_idx=-1
):
    rows = wide(weight.at[indices].get(**WITHIN)) * wide(grad.at[offset2bag].get(**WITHIN))
    return jnp.where(indices != padding_idx, rows.sum(1), 0)
