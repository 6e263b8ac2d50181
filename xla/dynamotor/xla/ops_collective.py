"""Collectives as torch ops (`torch.ops.dynamotor_xla.*`) and their lowerings to jax.lax over the axis of the
replicas.

`groups` is the flattened list of replica groups (empty: one group of all), `share` the size of a group. In a
world of one the axis does not exist and every collective is the identity, up to its scale.

>>> torch.ops.dynamotor_xla.all_reduce([x], "sum", 0.5, [], 2)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from . import replication
from .dtypes import LOW_PRECISION, is_complex, on_cpu
from .lowering import op
from .promotion import cast
from .replicated import exchange
from .replication import AXIS

_library = torch.library.Library("dynamotor_xla", "FRAGMENT")
_collectives = torch.ops.dynamotor_xla


def _resized(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:dim], size, *x.shape[dim + 1 :]))


# Schema -> the shapes of the results.
for _schema, _meta in {
    "all_reduce(Tensor[] inputs, str reduce, float scale, int[] groups, int share) -> Tensor[]": (
        lambda xs, *_: [torch.empty_like(x) for x in xs]
    ),
    "all_gather(Tensor input, int dim, int[] groups, int share) -> Tensor": lambda x, dim, _, share: _resized(
        x, dim, x.shape[dim] * share
    ),
    "reduce_scatter(Tensor input, str reduce, float scale, int dim, int[] groups, int share) -> Tensor": (
        lambda x, reduce, scale, dim, _, share: _resized(x, dim, x.shape[dim] // share)
    ),
    "all_to_all(Tensor input, int split_dim, int concat_dim, int[] groups, int share) -> Tensor": (
        lambda x, split, concat, _, share: _resized(
            y := _resized(x, split, x.shape[split] // share), concat, y.shape[concat] * share
        )
    ),
    "collective_permute(Tensor input, int[] pairs) -> Tensor": lambda x, pairs: torch.empty_like(x),
    "collective_broadcast(Tensor[] inputs, int root) -> Tensor[]": lambda xs, root: [
        torch.empty_like(x) for x in xs
    ],
}.items():
    _library.define(_schema)
    _library.impl(_schema.partition("(")[0], _meta, "Meta")


def _collective(
    target: Any, alone: Callable[..., Any], lift: tuple[type, ...] = ()
) -> Callable[[Callable], Any]:
    """Register a lowering; `alone`: the collective's form in a world of one, where there is no axis."""
    # Not integers, which are dimensions and counts.
    return lambda rule: op(target, lift=lift, collective=True)(
        lambda *args: alone(*args) if replication.size() == 1 else rule(*args)
    )


def _groups(flat: Sequence[int], share: int) -> list[list[int]] | None:
    return [list(flat[i : i + share]) for i in range(0, len(flat), share)] or None


def _scaled(x: jax.Array, scale: Any) -> jax.Array:
    if isinstance(scale, float) and scale == 1.0:
        return x
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return x * cast(scale, x.dtype)
    return x.astype(jnp.float64) * cast(
        scale, jnp.dtype(jnp.float64)
    )  # cast back to the integer type afterwards


_GATHERED: dict[str, Callable[[jax.Array], jax.Array]] = {
    "mul": lambda xs: jnp.prod(xs, 0, dtype=xs.dtype),
    "and": lambda xs: jnp.bitwise_and.reduce(xs, axis=0),
    "or": lambda xs: jnp.bitwise_or.reduce(xs, axis=0),
}


def _reduced(x: jax.Array, reduce: str, groups: list[list[int]] | None) -> jax.Array:
    """One reduction over the replicas."""
    dtype = x.dtype
    if dtype in LOW_PRECISION and on_cpu():  # gloo has no narrow floats
        return _reduced(x.astype(jnp.float32), reduce, groups).astype(dtype)
    if dtype == jnp.bool_:  # sums and products of truth values are "any" and "all"
        extreme = lax.pmax if reduce in ("sum", "max", "or") else lax.pmin
        return exchange(
            partial(extreme, axis_name=AXIS, axis_index_groups=groups), x.astype(jnp.int32)
        ).astype(jnp.bool_)
    if reduce == "sum":
        return exchange(partial(lax.psum, axis_name=AXIS, axis_index_groups=groups), x)
    if reduce in ("min", "max"):
        return _extreme(x, reduce, groups)
    return _GATHERED[reduce](exchange(partial(lax.all_gather, axis_name=AXIS, axis_index_groups=groups), x))


def _extreme(x: jax.Array, reduce: str, groups: list[list[int]] | None) -> jax.Array:
    """Smallest or largest; NaN wins, which transports do not promise."""
    best = exchange(
        partial(lax.pmin if reduce == "min" else lax.pmax, axis_name=AXIS, axis_index_groups=groups), x
    )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return best
    nans = exchange(
        partial(lax.pmax, axis_name=AXIS, axis_index_groups=groups), jnp.isnan(x).astype(jnp.int32)
    )
    return jnp.where(nans > 0, jnp.nan, best)


_MESSAGE_BYTES = 64 << 20


def _messages(inputs: Sequence[jax.Array]) -> Iterator[list[int]]:
    """Which inputs travel together: those of one dtype, up to 64 MB at a time, in order."""
    waiting: dict[Any, tuple[list[int], int]] = {}
    for index, x in enumerate(inputs):
        members, filled = waiting.get(x.dtype, ([], 0))
        if members and filled + x.nbytes > _MESSAGE_BYTES:
            yield members
            members, filled = [], 0
        waiting[x.dtype] = ([*members, index], filled + x.nbytes)
    yield from (members for members, _ in waiting.values())


@_collective(
    _collectives.all_reduce,
    lambda inputs, reduce, scale, *_: [_scaled(x, scale) for x in inputs],
    lift=(float,),
)
def _all_reduce(inputs, reduce, scale, groups, share):
    results: list[Any] = [None] * len(inputs)
    for members in _messages(inputs):
        parts = [inputs[i].reshape(-1) for i in members]
        whole = _reduced(
            parts[0] if len(parts) == 1 else jnp.concatenate(parts), reduce, _groups(groups, share)
        )
        for i, part in zip(members, jnp.split(whole, np.cumsum([p.size for p in parts])[:-1])):
            results[i] = _scaled(part.reshape(inputs[i].shape), scale)
    return results


@_collective(_collectives.all_gather, lambda x, *_: x)
def _all_gather(input, dim, groups, share):
    return exchange(
        lambda x: lax.all_gather(x, AXIS, axis=dim, tiled=True, axis_index_groups=_groups(groups, share)),
        input,
    )


@_collective(_collectives.reduce_scatter, lambda x, reduce, scale, *_: _scaled(x, scale), lift=(float,))
def _reduce_scatter(input, reduce, scale, dim, groups, share):
    split, dtype = _groups(groups, share), input.dtype
    if reduce == "sum" and dtype != jnp.bool_:
        wide = input.astype(jnp.float32) if dtype in LOW_PRECISION and on_cpu() else input
        scatter = partial(
            lax.psum_scatter, axis_name=AXIS, scatter_dimension=dim, axis_index_groups=split, tiled=True
        )
        return _scaled(exchange(scatter, wide).astype(dtype), scale)
    whole = _reduced(input, reduce, split)
    length = input.shape[dim] // share
    return _scaled(lax.dynamic_slice_in_dim(whole, _place_in_group(split) * length, length, dim), scale)


def _place_in_group(groups: list[list[int]] | None) -> jax.Array:
    """This replica's position in its group."""
    me = lax.axis_index(AXIS)
    if groups is None:
        return me
    places = np.zeros(sum(map(len, groups)), np.int32)
    for group in groups:
        places[group] = np.arange(len(group))
    return jnp.asarray(places)[me]


@_collective(_collectives.all_to_all, lambda x, *_: x)
def _all_to_all(input, split_dim, concat_dim, groups, share):
    split = _groups(groups, share)
    return exchange(
        lambda x: lax.all_to_all(x, AXIS, split_dim, concat_dim, axis_index_groups=split, tiled=True), input
    )


@_collective(
    _collectives.collective_permute,
    lambda x, pairs: x if (0, 0) in zip(pairs[::2], pairs[1::2]) else jnp.zeros_like(x),
)
def _collective_permute(input, pairs):
    """Replicas that are no target get zeros, as XLA's CollectivePermute gives."""
    return exchange(lambda x: lax.ppermute(x, AXIS, list(zip(pairs[::2], pairs[1::2]))), input)


@_collective(_collectives.collective_broadcast, lambda inputs, root: list(inputs))
def _collective_broadcast(inputs, root):
    """The root's bits plus everybody else's zeros: exact for every value, also NaN and -0.0."""
    mine = lax.axis_index(AXIS) == root
    return [_sum_of_bits(jnp.where(mine, x, jnp.zeros_like(x))) for x in inputs]


def _sum_of_bits(x: jax.Array) -> jax.Array:
    if is_complex(x.dtype):
        return lax.complex(_sum_of_bits(x.real), _sum_of_bits(x.imag))
    if x.dtype == jnp.bool_:
        return _sum_of_bits(x.astype(jnp.uint32)) > 0
    width = x.dtype.itemsize * 8
    carrier = jnp.dtype(f"uint{width}")
    bits = lax.bitcast_convert_type(x, carrier)
    total = exchange(lambda b: lax.psum(b, AXIS), bits.astype(jnp.uint32) if width < 32 else bits)
    return lax.bitcast_convert_type(total.astype(carrier), x.dtype)
