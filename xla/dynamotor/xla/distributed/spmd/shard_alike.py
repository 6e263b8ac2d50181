"""`shard_alike(x, y)`: two arrays that XLA lays out alike, in the way that it chooses.

jax had this function until 0.11, which dropped it; a sharding group of Shardy, XLA's partitioner, says the
same.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxlib.mlir.dialects import sdy

_groups = itertools.count()
_alike = Primitive("shard_alike")
_alike.multiple_results = True


@jax.custom_vjp
def shard_alike(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two arrays, of one shape, which XLA gives one layout; their gradients have one layout, too."""
    if x.shape != y.shape:
        raise ValueError(f"arrays of shapes {x.shape} and {y.shape} cannot have one layout")
    first, second = _alike.bind(x, y)
    return first, second


def _forward(x: jax.Array, y: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
    return shard_alike(x, y), None


def _backward(_: None, gradients: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return shard_alike(*gradients)


def _lower(_context: Any, x: Any, y: Any) -> list[Any]:
    group = next(_groups)
    for value in (x, y):
        sdy.sharding_group(value, group)
    return [x, y]


shard_alike.defvjp(_forward, _backward)
_alike.def_impl(jax.jit(_alike.bind))
_alike.def_abstract_eval(lambda x, y: (x, y))
mlir.register_lowering(_alike, _lower)
