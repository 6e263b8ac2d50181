"""Run time of programs with tensors of wrapper subclasses: compiled graphs take and give inner tensors,
autograd's node has the wrappers (`desugar.WrapperBoundary`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..base.compat import keeps_graph
from ..graph.spec import Compiled
from .autograd_nodes import AutogradNode, Backward, pass_over_hooks, saver
from .calls import unseen
from .desugar import WrapperBoundary, at
from .node_hooks import refusing_hooks
from .recipe import Recipe
from .runtime import prepared, rebuilder
from .wrapped_double_backward import WrappedAgain, versions_of


class _Finish:
    """Makes the user's outputs from the inputs, the flat inputs and values, and the graded wrappers."""

    def __init__(self, boundary: WrapperBoundary, recipe: Recipe) -> None:
        self.boundary, made = boundary, boundary.wrappers[boundary.n_graded :]
        places = [k for kind, k in boundary.outputs if kind == "leaf"]
        self.n_leaves = len(places)
        self.leaves = _leaf_maker(recipe, [*places, *(k for _, inner in made for k in inner)])
        self.made = [spec for spec, _ in made]

    def __call__(
        self, inputs: Sequence[Any], flat: Sequence[Any], values: Sequence[Any], graded: Sequence[Any]
    ) -> tuple[Any, ...]:
        leaves = self.leaves(flat, values)
        inner, of = iter(leaves[self.n_leaves :]), self.boundary.values(inputs)
        wrappers = [*graded, *[at(spec, of).wrap(inner) for spec in self.made]]
        plain = iter(leaves)
        return tuple(
            [
                next(plain) if kind == "leaf" else inputs[k] if kind == "input" else wrappers[k]
                for kind, k in self.boundary.outputs
            ]
        )


def _leaf_maker(
    recipe: Recipe, places: Sequence[int]
) -> Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]:
    """(flat inputs, values) -> the flat outputs at these places."""
    rebuild = rebuilder(replace(recipe, plans=tuple([recipe.plans[k] for k in places])))
    return (lambda inputs, values: values) if rebuild is None else rebuild


def inference_callable(compiled: Compiled, recipe: Recipe, boundary: WrapperBoundary) -> Compiled:
    """Wrap a compiled graph of inner tensors that takes no part in autograd."""
    compiled, finish = prepared(compiled, recipe), _Finish(boundary, recipe)

    def run(*inputs: Any) -> tuple[Any, ...]:
        flat = boundary.flat(inputs)
        with torch.no_grad():
            values = compiled(*flat)
        return finish(inputs, flat, values, ())

    return run


def training_callable(
    forward: Compiled, node: AutogradNode, recipe: Recipe, boundary: WrapperBoundary, again: WrappedAgain
) -> Compiled:
    """Wrap a compiled forward of inner tensors and its backward: one autograd function of the wrappers."""
    forward, finish = prepared(forward, recipe), _Finish(boundary, recipe)
    apply = _function(forward, node, recipe, boundary, again).apply

    def run(*inputs: Any) -> tuple[Any, ...]:
        found = apply(*inputs)
        return finish(inputs, boundary.flat(inputs), found[boundary.n_graded :], found[: boundary.n_graded])

    if torch.is_grad_enabled():
        return run

    def graded(*inputs: Any) -> tuple[Any, ...]:
        with torch.enable_grad():
            return run(*inputs)

    return graded


def _function(
    forward: Compiled, node: AutogradNode, recipe: Recipe, boundary: WrapperBoundary, again: WrappedAgain
) -> type[torch.autograd.Function]:
    """The function from the inputs to the graded wrappers and the program's values."""
    n, n_graded = recipe.n_values, boundary.n_graded
    graded = boundary.wrappers[:n_graded]
    inner = _leaf_maker(recipe, [k for _, places in graded for k in places])
    fixed = [k for k, differentiable in enumerate(recipe.differentiable) if not differentiable]
    wanted = [k for k, differentiable in enumerate(recipe.differentiable) if differentiable]
    edges = [0, *itertools.accumulate(i not in boundary.symbols for i in range(len(boundary.inputs)))]
    save, places = saver(node, recipe), range(len(recipe.tangents))
    backward = unseen(Backward(node, recipe, places, places, [0] * len(node.gradients), None))

    @refusing_hooks
    class CompiledFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> tuple[Any, ...]:
            flat = boundary.flat(inputs)
            outs = forward(*flat)
            save(ctx, flat, outs, None)
            ctx.of = of = boundary.values(inputs)
            ctx.offsets, ctx.given = boundary.offsets(inputs), (inputs, versions_of([*inputs, *flat]))
            values = tuple(outs[:n])
            leaves = iter(inner(flat, values) if graded else ())
            wrappers = [at(spec, of).wrap(leaves) for spec, _ in graded]
            ctx.mark_non_differentiable(*[values[k] for k in fixed])
            return (*wrappers, *values)

        @staticmethod
        def backward(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
            if torch.is_grad_enabled():
                return again.gradients(ctx.given[0], ctx.given[1], tangents)
            ctx.given = ctx.given if keeps_graph() else None
            arrived = [*[tangents[n_graded + k] for k in wanted], *tangents[:n_graded]]
            found = backward(ctx, boundary.flat_tangents(arrived, ctx.of))
            grads = boundary.wrap_gradients(found, ctx.of, ctx.offsets)
            pass_over_hooks(ctx, [edges[i] for i, *_ in boundary.gradients if grads[i] is None])
            return tuple(grads)

    return CompiledFunction
