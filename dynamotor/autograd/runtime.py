"""Run time: compiled halves joined to PyTorch's autograd, and the user's outputs rebuilt from compiled
values.

Everything that can be known is worked out when the callable is made; a call only gathers, runs and rebuilds.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..base import compat
from ..graph.shapes import has_symbols
from ..graph.sizes import Symbol, evaluate
from ..graph.spec import Compiled
from .autograd_nodes import AutogradNode, Finish, through_nodes, through_one_node
from .calls import call_without_grad, with_versions, without_autocast
from .double_backward import Again
from .inner_outputs import hooks_of
from .recipe import OutputPlan, Recipe

_set_grad_enabled = compat.set_grad_enabled
_is_grad_enabled = torch.is_grad_enabled


def inference_callable(compiled: Compiled, recipe: Recipe) -> Compiled:
    """Wrap a compiled graph that takes no part in autograd."""
    begin = None if recipe.constants else getattr(compiled, "begin", None)
    compiled = prepared(compiled, recipe)
    rebuild = rebuilder(recipe)
    quiet = torch.is_grad_enabled()
    if not recipe.mutated and not quiet and rebuild is None:
        return compiled

    def run(*inputs: torch.Tensor) -> tuple[Any, ...]:
        values = call_without_grad(compiled, inputs) if quiet else compiled(*inputs)
        return values if rebuild is None else rebuild(inputs, values)

    views = [step for plan in recipe.plans for step in plan.steps]
    if not quiet and any(grad_mode for *_, grad_mode in views):
        return _graded(run)
    if begin is not None:
        vars(run)["begin"] = lambda *inputs: call_without_grad(begin, inputs)
    return run


def training_callable(
    forward: Compiled, nodes: Sequence[AutogradNode], recipe: Recipe, again: Again | None
) -> Compiled:
    """Wrap the compiled forward and its backwards: one autograd function, or as many as there are nodes. What
    comes `again` where a gradient is differentiated, None: that is an error.
    """
    forward = prepared(forward, recipe)
    finish = _finisher(rebuilder(recipe), recipe)
    through = (
        through_nodes(forward, nodes, recipe, finish, again)
        if len(nodes) > 1
        else through_one_node(forward, nodes[0], recipe, finish, again)
    )
    return through if torch.is_grad_enabled() else _graded(through)


def _graded(compiled: Compiled) -> Compiled:
    """For a graph that begins without gradients and leaves `no_grad` on its way (the rest of a function after
    a break).
    """

    def run(*inputs: torch.Tensor) -> tuple[Any, ...]:
        with torch.enable_grad():
            return compiled(*inputs)

    return run


def _finisher(
    rebuild: Callable[[Sequence[Any], Sequence[Any]], tuple[Any, ...]] | None, recipe: Recipe
) -> Finish | None:
    """Makes the user's outputs, and notes for `between.refuse_hooks` those that others are computed from."""
    inner = tuple(recipe.inner.items())
    if rebuild is None and not inner:
        return None

    def finish(inputs: Sequence[Any], values: Sequence[Any], contexts: Sequence[Any]) -> tuple[Any, ...]:
        outputs = tuple(values) if rebuild is None else rebuild(inputs, values)
        if inner:
            watched = [(weakref.ref(outputs[k]), hooks_of(outputs[k]), mask) for k, mask in inner]
            for context in contexts:
                context.watched = watched
        return outputs

    return finish


def prepared(compiled: Compiled, recipe: Recipe) -> Compiled:
    """The compiled graph as the program calls it."""
    called = without_autocast(_with_constants(compiled, recipe.constants))
    return with_versions(called, {**recipe.reshaped, **recipe.mutated}, recipe.versions)


def _with_constants(compiled: Compiled, constants: Sequence[torch.Tensor]) -> Compiled:
    if not constants:
        return compiled
    bound = tuple(constants)
    return lambda *inputs: compiled(*inputs, *bound)


def rebuilder(recipe: Recipe) -> Callable[[Sequence[Any], Sequence[Any]], tuple[Any, ...]] | None:
    """(inputs, values) → the user's outputs; None when they are the values as they stand."""
    plans, symbols = recipe.plans, recipe.symbols
    if (
        all(p.kind == "value" and not p.steps and not p.detach and p.index == k for k, p in enumerate(plans))
        and len(plans) == recipe.n_values
    ):
        return None
    makers = [
        functools.partial(_maker_at, plan, symbols)
        if has_symbols((plan.constant, [step[1:3] for step in plan.steps]))
        else _maker(plan)
        for plan in plans
    ]

    def rebuild(inputs: Sequence[Any], values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple([make(inputs, values) for make in makers])

    return rebuild


def _maker_at(
    plan: OutputPlan, symbols: dict[int, Symbol], inputs: Sequence[Any], values: Sequence[Any]
) -> Any:
    """A maker whose views have sizes that differ between calls."""
    of = {symbol: inputs[i] for i, symbol in symbols.items()}
    steps = tuple(
        [
            (func, evaluate(args, of), evaluate(kwargs, of), graded)
            for func, args, kwargs, graded in plan.steps
        ]
    )
    return _maker(replace(plan, steps=steps, constant=evaluate(plan.constant, of)))(inputs, values)


def _maker(plan: OutputPlan) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
    index, steps, detach = plan.index, plan.steps, plan.detach
    if plan.kind == "constant":
        return lambda inputs, values: plan.constant
    if not steps and not detach:
        return (
            (lambda inputs, values: inputs[index])
            if plan.kind == "input"
            else (lambda inputs, values: values[index])
        )

    graded = all(step[3] for step in steps)

    def make(inputs: Sequence[Any], values: Sequence[Any]) -> Any:
        tensor = inputs[index] if plan.kind == "input" else values[index]
        if detach == "first":
            tensor = tensor.detach()
        if graded or not _is_grad_enabled():
            for func, args, kwargs, _ in steps:
                tensor = func(tensor, *args, **kwargs)
        else:
            before = _is_grad_enabled()
            for func, args, kwargs, grad_mode in steps:
                _set_grad_enabled(before and grad_mode)
                tensor = func(tensor, *args, **kwargs)
            _set_grad_enabled(before)
        return tensor.detach() if detach == "last" else tensor

    return _before_the_write(index, make) if plan.early else make


def _before_the_write(
    index: int, make: Callable[[Sequence[Any], Sequence[Any]], Any]
) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
    """A view that is made as if its base, which the graph has written, had yet to be: where gradients begin
    on the base later, PyTorch then knows that the view is older than the write.
    """
    set_versions = compat.set_version_counter

    def run(inputs: Sequence[Any], values: Sequence[Any]) -> Any:
        base = inputs[index]
        if base.is_inference():
            return make(inputs, values)
        now = base._version
        set_versions((base,), (now - 1,))
        try:
            return make(inputs, values)
        finally:
            set_versions((base,), (now,))

    return run
