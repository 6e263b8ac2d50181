"""jax functions as differentiable operations on xla tensors: recorded like any op, with the gradients that
jax gives. The loop op behind `scan`: its body is a traced function, compiled once however many iterations
there are.

>>> call_jax(lambda x, y: jnp.hypot(x, y), (a, b))
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from . import rng
from .compat import tree_flatten, tree_unflatten
from .dtypes import jax_dtype, torch_dtype
from .lowering import op
from .recent import Recent
from .subgraph import Subgraph

torch.library.define("dynamotor_xla::jax", "(Tensor[] inputs, int function) -> Tensor[]")

functions: list[Callable[..., Any]] = []  # each takes arrays and returns a list of arrays
numbers: dict[Any, int] = {}  # by what tells functions apart
_trees = Recent(256)


def number_of(key: Any, make: Callable[[], Callable[..., Any]]) -> int:
    """The number of a function; `key` says which functions are the same."""
    if key not in numbers:
        numbers[key] = len(functions)
        functions.append(make())
    return numbers[key]


def same_function(function: Callable[..., Any]) -> Any:
    """A key that is equal for functions that do the same: those made anew by one `def`, `lambda` or `partial`
    of equal values. Any other callable is known by identity."""
    if isinstance(function, functools.partial):
        named = tuple(sorted(function.keywords.items()))
        key: Any = ("partial", same_function(function.func), function.args, named)
    elif type(function) is types.FunctionType:
        cells = [_contents(cell) for cell in function.__closure__ or ()]
        named = tuple(sorted((function.__kwdefaults__ or {}).items()))
        inner = tuple([same_function(c) if callable(c) else (type(c), c) for c in cells])
        key = (function.__code__, id(function.__globals__), function.__defaults__, named, inner)
    else:
        return function
    try:
        hash(key)
    except TypeError:
        return function
    return key


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty: a function that names itself while it is made
        return cell


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
    by jax. Globals are read then. override_name: accepted, for programs that pass it.
    """
    leaves, tree = tree_flatten((args, kwargs or {}))
    is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
    tensors = [leaf for leaf, is_one in zip(leaves, is_tensor) if is_one]
    others = tuple([(type(leaf), leaf) for leaf, is_one in zip(leaves, is_tensor) if not is_one])
    key = (same_function(jax_func), tree, others, tuple(is_tensor))

    def flat(*arrays: Any) -> list[Any]:
        given, rest = iter(arrays), iter(others)
        filled = [next(given) if is_one else next(rest)[1] for is_one in is_tensor]
        positional, named = tree_unflatten(filled, tree)
        results, _trees[key] = tree_flatten(jax_func(*positional, **named))
        return results

    results = apply(number_of(key, lambda: flat), tensors)
    if key not in _trees:
        jax.eval_shape(flat, *[jax.ShapeDtypeStruct(t.shape, jax_dtype(t.dtype)) for t in tensors])
    return tree_unflatten(results, _trees.get(key))


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


# -- loops ---------------------------------------------------------------------------------------------------


torch.library.define(
    "dynamotor_xla::scan",
    "(Tensor[] init, Tensor[] xs, Tensor[] captured, Tensor? scalars, Tensor? seeds, int length, int body, "
    "bool reverse, bool keep_carries) -> Tensor[]",
)

bodies: list[Subgraph] = []
_bodies: dict[tuple, int] = {}


def intern(body: Subgraph) -> int:
    """The number of a body; equal bodies get one number, so that the program around them is compiled once."""
    number = _bodies.get(body.key)
    if number is None:
        number = _bodies[body.key] = len(bodies)
        bodies.append(body.without_captured())
    return number


def draw_seeds(body: Subgraph, length: int, device: torch.device) -> torch.Tensor | None:
    """The random state of each iteration, int64 [length, 2]; None where the body draws nothing."""
    return (
        torch.randint(0, 2**32, (length, 2), dtype=torch.int64, device=device) if body.graph.draws else None
    )


def run(
    body: Subgraph,
    init: list[torch.Tensor],
    xs: list[torch.Tensor],
    captured: list[torch.Tensor],
    length: int,
    seeds: torch.Tensor | None = None,
    reverse: bool = False,
    keep_carries: bool = False,
) -> list[torch.Tensor]:
    """The loop: (carry..., slices of xs..., captured...) -> (carry..., y...) `length` times; [*last carry,
    *stacked ys].

    With `keep_carries` followed by the carries with which each iteration began, stacked. `reverse`: from the
    last slice to the first.
    """
    device = (init + xs)[0].device
    scalars = torch.tensor(body.scalars, dtype=torch.float64).to(device) if body.scalars else None
    return torch.ops.dynamotor_xla.scan(
        init, xs, captured, scalars, seeds, length, intern(body), reverse, keep_carries
    )


@torch.library.register_fake("dynamotor_xla::scan")
def _fake_scan(
    init: list[torch.Tensor],
    xs: list[torch.Tensor],
    captured: list[torch.Tensor],
    scalars: torch.Tensor | None,
    seeds: torch.Tensor | None,
    length: int,
    body: int,
    reverse: bool,
    keep_carries: bool,
) -> list[torch.Tensor]:
    like = (init + xs + captured)[0]
    metas = bodies[body].outputs
    carry = [like.new_empty(meta.shape, dtype=meta.dtype) for meta in metas[: len(init)]]
    stacked = metas[len(init) :] + (metas[: len(init)] if keep_carries else [])
    return carry + [like.new_empty((length, *meta.shape), dtype=meta.dtype) for meta in stacked]


@op(torch.ops.dynamotor_xla.scan)
def _scan(
    init: list[jax.Array],
    xs: list[jax.Array],
    captured: list[jax.Array],
    scalars: jax.Array | None,
    seeds: jax.Array | None,
    length: int,
    body: int,
    reverse: bool,
    keep_carries: bool,
) -> list[Any]:
    program, draws = bodies[body].program, bodies[body].graph.draws
    numbers = [] if scalars is None else [scalars]

    def step(carry: list[jax.Array], inputs: Any) -> Any:
        slices, seed = inputs
        seed = [] if seed is None else [rng.keys_from(seed, draws)]
        results = program(*carry, *slices, *captured, *numbers, *seed)
        return results[: len(carry)], (results[len(carry) :], carry if keep_carries else [])

    seeds = None if seeds is None else seeds.astype(jnp.uint32)
    carry, (ys, carries) = jax.lax.scan(step, list(init), (list(xs), seeds), length=length, reverse=reverse)
    return [*carry, *ys, *carries]
