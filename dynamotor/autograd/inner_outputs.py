"""Outputs that other outputs of the same compiled graph are computed from (`return hidden, head(hidden)`).

The gradient from those others stays inside of the compiled backward. A hook on such an output would be told
too little, and is refused. The gradient of another output by it, which `torch.autograd.grad(loss, hidden)`
asks for, is there all the same: autograd's graph leads from the other output to it as well, and zeros go
there. Where the engine keeps these as a gradient that was asked for, the torch graph is run again, and what
it gives is added to them; only what else came goes on into the compiled backward.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..base import compat
from ..base.errors import BackendError
from .calls import unseen
from .double_backward import Again, Given, is_batched
from .node_hooks import is_users, noting_prehooks, refusing_hooks
from .recipe import Recipe

Link = Callable[
    [list[Any], Sequence[Any]], None
]  # gives values, in place, a node that leads to their sources
_will_run = compat.engine_will_run
_task = compat.current_task
_LEAF = torch.empty(0, requires_grad=True)  # what leads to it runs where a backward is given no inputs


@dataclass(frozen=True)
class _Owed:
    """The missing part of a value's gradient: that of other values, by their tangents. zeros stand for it."""

    zeros: torch.Tensor
    arrived: tuple[int, torch.Tensor]
    given: Given | None


def linker(recipe: Recipe, again: Again | None) -> Link:
    """What leads from each value to those that it is computed from and that are handed out as they are."""
    inside = _inner_values(recipe)
    sources = _sources(recipe, inside)
    order = sorted(sources, key=lambda k: len(sources[k][1]))

    def asking(
        context: Any, arrived: tuple[int, torch.Tensor], asked: dict[int, tuple[Any, ...]]
    ) -> dict[int, Any]:
        """What goes to the values whose gradients may be asked for. A node that runs sees whether the engine
        keeps its own; hooks cannot wait for that.
        """
        running = {
            k for k, (node, _) in asked.items() if any(_will_run(next) for next, _ in node.next_functions)
        }
        owed = running if running.isdisjoint(_looked_at(recipe, context)) else ()
        return {k: _owe(context, k, arrived, edge) for k, edge in asked.items() if k in owed} | {
            k: _between(again, context.given, k, [arrived]) for k in asked if k not in running
        }

    def through(ctx: Any, tangent: torch.Tensor | None) -> tuple[Any, ...]:
        context, (number, behind) = ctx.contexts[0], sources[ctx.value]
        (own, _), (leaf, _), *edges = ctx.next_functions
        owed = getattr(context, "owed", {}).pop((_task(), ctx.value), ())
        if owed and tangent is not None:
            tangent = _paid(again, ctx.value, owed, tangent)
        found: dict[int, Any] = {}
        if tangent is not None:
            if _will_run(own):
                refuse_hooks(context, 1 << number)
            if not _will_run(leaf):
                asked = {k: edge for k, edge in zip(behind, edges, strict=True) if _will_run(edge[0])}
                found = asking(context, (ctx.value, tangent), asked)
        return None, None, tangent, None, *map(found.get, behind)

    backward_of = unseen(through)

    @noting_prehooks
    @refusing_hooks
    class Dependent(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, contexts: Sequence[Any], value: int, tensor: torch.Tensor, *_: torch.Tensor
        ) -> Any:
            ctx.contexts, ctx.value, ctx.leads_inside = contexts, value, inside.get(value, 0)
            ctx.set_materialize_grads(False)
            return tensor.detach()

        @staticmethod
        def backward(ctx: Any, tangent: torch.Tensor | None) -> tuple[Any, ...]:
            return backward_of(ctx, tangent)

    def link(values: list[Any], contexts: Sequence[Any]) -> None:
        for k in order:
            values[k] = Dependent.apply(contexts, k, values[k], _LEAF, *[values[i] for i in sources[k][1]])

    return link


def _inner_values(recipe: Recipe) -> dict[int, int]:
    """Values that are handed out as they are and from which others are computed: these others' tangents
    (bits)."""
    masks: dict[int, int] = {}
    for output, mask in recipe.inner.items():
        plan = recipe.plans[output]
        if plan.kind == "value" and not plan.steps and not plan.detach and recipe.differentiable[plan.index]:
            masks[plan.index] = masks.get(plan.index, 0) | mask
    return masks


def _sources(recipe: Recipe, masks: dict[int, int]) -> dict[int, tuple[int, tuple[int, ...]]]:
    """Values that are computed from others which are handed out, and these: their tangents' numbers, what
    they are computed from.
    """
    differentiable = [k for k, wanted in enumerate(recipe.differentiable) if wanted]
    found = {
        k: (number, tuple(i for i, mask in masks.items() if mask >> number & 1 and i != k))
        for number, k in enumerate(differentiable)
    }
    behind = {i for _, others in found.values() for i in others}
    return {k: (number, others) for k, (number, others) in found.items() if others or k in behind}


def _owe(context: Any, value: int, arrived: tuple[int, torch.Tensor], edge: tuple[Any, int]) -> torch.Tensor:
    """Zeros for the gradient by a value, which is computed where the engine turns out to keep it."""
    function, place = edge
    wanted, tangent = function._input_metadata[place], arrived[1]
    if is_batched(tangent):
        zeros = torch.zeros_like(tangent).sum().to(wanted.dtype).expand(wanted.shape).clone()
    else:
        zeros = torch.zeros(wanted.shape, dtype=wanted.dtype, device=wanted.device)
    if not hasattr(context, "owed"):
        context.owed = {}
    context.owed.setdefault((_task(), value), []).append(_Owed(zeros, arrived, context.given))
    return zeros


def _paid(
    again: Again | None, value: int, owed: Sequence[_Owed], tangent: torch.Tensor
) -> torch.Tensor | None:
    """The gradient of a value besides zeros. To a tangent that the engine keeps, the missing part is
    added.
    """
    alone = any(tangent is one.zeros for one in owed)
    if tangent._use_count() == 1:  # type: ignore[attr-defined]  # PyTorch's references; ours are one
        return None if alone else tangent
    rest = None if alone else tangent.clone()
    total = _between(again, owed[0].given, value, [one.arrived for one in owed])
    if total is not None:
        tangent.add_(total)
    return rest


def _between(
    again: Again | None, given: Given | None, value: int, arrived: Sequence[tuple[int, torch.Tensor]]
) -> torch.Tensor | None:
    """The gradient by one value of others of its graph."""
    if again is None or given is None:
        raise BackendError(
            "DM403",
            "the gradient of one output of a compiled graph by another was asked for",
            why="the graph cannot run again, or its inputs have been released",
            cure="ask for it inside the compiled function, or use dynamotor.disable",
        )
    return again.between(given, value, arrived)


def _looked_at(recipe: Recipe, context: Any) -> set[int]:
    """The values whose gradients hooks or `retain_grad` look at."""
    return {
        recipe.plans[output].index
        for output, (reference, hooks, _) in zip(recipe.inner, getattr(context, "watched", ()), strict=False)
        if _is_looked_at(reference(), hooks)
    }


def _is_looked_at(output: torch.Tensor | None, hooks: dict[int, Any]) -> bool:
    return output is not None and output.retains_grad or any(map(is_users, hooks.values()))


def hooks_of(output: torch.Tensor) -> dict[int, Any]:
    """The hooks that an output has or will get, which outlive it: they hang on its node."""
    if output.grad_fn is None:
        return {}
    if output._backward_hooks is None:
        output._backward_hooks = OrderedDict()
        output.grad_fn._register_hook_dict(output)
    return output._backward_hooks


def refuse_hooks(ctx: Any, arrived: int) -> None:
    """An output that others are computed from sees only the gradient from outside: its hooks would be told
    too little.
    """
    watched = ((output(), hooks) for output, hooks, mask in getattr(ctx, "watched", ()) if mask & arrived)
    BackendError.when(
        getattr(ctx, "looked_at", 0) & arrived or any(_is_looked_at(*one) for one in watched),
        "DM403",
        "a hook or retain_grad on an output that other outputs are computed from",
        why="the gradient from those other outputs stays inside the compiled backward",
        cure="register it inside the compiled function (a graph break), or use dynamotor.disable",
    )
