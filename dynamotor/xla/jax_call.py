"""jax functions as differentiable operations on xla tensors: recorded like any op, with the gradients that
jax gives.

>>> call_jax(lambda x, y: jnp.hypot(x, y), (a, b))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from .dtypes import jax_dtype, torch_dtype
from .lowering import op
from .recent import Recent

torch.library.define("dynamotor_xla::jax", "(Tensor[] inputs, int function) -> Tensor[]")

functions: list[Callable[..., Any]] = []  # each takes arrays and returns a list of arrays
_numbers: dict[Any, int] = {}
_trees = Recent(256)


def number_of(key: Any, make: Callable[[], Callable[..., Any]]) -> int:
    """The number of a function; `key` says which functions are the same."""
    if key not in _numbers:
        _numbers[key] = len(functions)
        functions.append(make())
    return _numbers[key]


def apply(number: int, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Call a function on xla tensors; gradients flow to what requires them, as often as wished."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
        return list(_Differentiable.apply(number, *inputs))
    return torch.ops.dynamotor_xla.jax(list(inputs), number)


def call_jax(
    jax_func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    override_name: str | None = None,
) -> Any:
    """`jax_func(*args, **kwargs)` with jax arrays in the place of the tensors in nested containers; tensors
    in the result.

    jax_func: traced once for each set of shapes and other arguments, which must be hashable; differentiable
    by jax. Functions are known by identity: pass the same one each time. override_name: accepted.
    """
    leaves, tree = tree_flatten((args, kwargs or {}))
    is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
    tensors = [leaf for leaf, is_one in zip(leaves, is_tensor) if is_one]
    others = tuple([(type(leaf), leaf) for leaf, is_one in zip(leaves, is_tensor) if not is_one])
    key = (jax_func, tree, others, tuple(is_tensor))

    def flat(*arrays: Any) -> list[Any]:
        given, rest = iter(arrays), iter(others)
        filled = [next(given) if is_one else next(rest)[1] for is_one in is_tensor]
        positional, named = tree_unflatten(filled, tree)
        results, trees[key] = tree_flatten(jax_func(*positional, **named))
        return results

    trees = _trees
    results = apply(number_of(key, lambda: flat), tensors)
    if key not in trees:
        jax.eval_shape(flat, *[jax.ShapeDtypeStruct(t.shape, jax_dtype(t.dtype)) for t in tensors])
    return tree_unflatten(results, trees.get(key))


@torch.library.register_fake("dynamotor_xla::jax")
def _fake(inputs: list[torch.Tensor], function: int) -> list[torch.Tensor]:
    made = jax.eval_shape(
        functions[function], *[jax.ShapeDtypeStruct(tuple(t.shape), jax_dtype(t.dtype)) for t in inputs]
    )
    return [inputs[0].new_empty(a.shape, dtype=torch_dtype(a.dtype)) for a in made]


@op(torch.ops.dynamotor_xla.jax)
def _jax(inputs: list[jax.Array], function: int) -> list[Any]:
    return list(functions[function](*inputs))


def _smooth(dtype: Any) -> bool:
    return jax.numpy.issubdtype(dtype, jax.numpy.inexact)


def _backward_of(number: int, needed: tuple[bool, ...]) -> Callable[..., Any]:
    """(inputs, gradients of the results) -> gradients of the inputs that need one."""

    def backward(*values: Any) -> list[Any]:
        inputs, grads = values[: len(needed)], iter(values[len(needed) :])

        def function(*chosen: Any) -> Any:
            given = iter(chosen)
            return list(functions[number](*[next(given) if need else x for need, x in zip(needed, inputs)]))

        results, pull = jax.vjp(function, *[x for need, x in zip(needed, inputs) if need])
        tangents = [
            next(grads) if _smooth(r.dtype) else np.zeros(r.shape, jax.dtypes.float0) for r in results
        ]
        return list(pull(tangents))

    return backward


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, number: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = torch.ops.dynamotor_xla.jax(list(inputs), number)
        ctx.save_for_backward(*inputs)
        ctx.number, ctx.needed = number, tuple(ctx.needs_input_grad[1:])
        ctx.smooth = [r.is_floating_point() or r.is_complex() for r in results]
        ctx.mark_non_differentiable(*[r for r, smooth in zip(results, ctx.smooth) if not smooth])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        number, needed = ctx.number, ctx.needed
        given = [g for g, smooth in zip(grads, ctx.smooth) if smooth]
        backward = number_of(("backward", number, needed), lambda: _backward_of(number, needed))
        found = iter(apply(backward, [*ctx.saved_tensors, *given]))
        return None, *[next(found) if need else None for need in needed]
