"""Outputs that other outputs of the same compiled graph are computed from (`return hidden, head(hidden)`).

The gradient from those others stays inside of the compiled backward. A hook on such an output would be told
too little, and is refused. The gradient of another output by it alone, which `torch.autograd.grad(loss,
hidden)` asks for, is there all the same: autograd's graph leads from the other output to it as well, and
where nothing behind the compiled graph is wanted, the torch graph is run again for that gradient.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..base.errors import BackendError
from .again import Again
from .calls import unseen
from .recipe import Recipe

Link = Callable[[list, Sequence], None]  # gives values, in place, a node that leads to what they come from
_will_run = torch._C._will_engine_execute_node


def linker(recipe: Recipe, again: Again | None) -> Link:
    """What leads from each value to those that it is computed from and that are handed out as they are."""
    sources = _sources(recipe)
    order = sorted(sources, key=lambda k: len(sources[k][1]))

    def through(ctx: Any, tangent: torch.Tensor | None) -> tuple:
        number, behind = sources[ctx.value]
        (own, _), *others = ctx.next_functions
        found: dict[int, torch.Tensor] = {}
        if tangent is not None and _will_run(own):
            refuse_hooks(ctx.contexts[0], 1 << number)
        elif tangent is not None:
            asked = {k for k, (node, _) in zip(behind, others, strict=True) if _will_run(node)}
            ends = [k for k in asked if asked.isdisjoint(sources.get(k, (0, ()))[1])]
            given = ctx.contexts[0].given
            BackendError.when(
                again is None or given is None,
                "DM403",
                "the gradient of one output of a compiled graph by another was asked for",
                why="the graph cannot run again, or what it was given has been let go",
                cure="ask for it inside the compiled function, or use dynamotor.disable",
            )
            grads = again.between(given, ctx.value, ends, tangent)  # type: ignore[union-attr]
            found = dict(zip(ends, grads, strict=True))
        return None, None, tangent, *map(found.get, behind)

    backward_of = unseen(through)

    class Dependent(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, contexts: Sequence, value: int, tensor: torch.Tensor, *_: torch.Tensor
        ) -> torch.Tensor:
            ctx.contexts, ctx.value = contexts, value
            ctx.set_materialize_grads(False)
            return tensor.detach()

        @staticmethod
        def backward(ctx: Any, tangent: torch.Tensor | None) -> tuple:
            return backward_of(ctx, tangent)

    def link(values: list, contexts: Sequence) -> None:
        for k in order:
            values[k] = Dependent.apply(contexts, k, values[k], *[values[i] for i in sources[k][1]])

    return link


def _sources(recipe: Recipe) -> dict[int, tuple[int, tuple[int, ...]]]:
    """Values that are computed from others which are handed out: their tangents' numbers, those others."""
    differentiable = [k for k, wanted in enumerate(recipe.differentiable) if wanted]
    masks: dict[int, int] = {}
    for output, mask in recipe.inner.items():
        plan = recipe.plans[output]
        if plan.kind == "value" and not plan.steps and not plan.detach and plan.index in differentiable:
            masks[plan.index] = masks.get(plan.index, 0) | mask
    found = {
        k: (number, tuple(i for i, mask in masks.items() if mask >> number & 1 and i != k))
        for number, k in enumerate(differentiable)
    }
    return {k: (number, others) for k, (number, others) in found.items() if others}


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
    for reference, hooks, mask in getattr(ctx, "watched", ()):
        output = reference()
        if not mask & arrived:
            continue
        if output is not None and output.retains_grad or any(map(is_users, hooks.values())):
            raise BackendError(
                "DM403",
                "a hook or retain_grad on an output that other outputs are computed from",
                why="the gradient from those other outputs stays inside the compiled backward",
                cure="register it inside the compiled function (a graph break), or use dynamotor.disable",
            )


def is_users(hook: Any) -> bool:
    """Whether the hook is not PyTorch's own, which may count calls and expect None."""
    return not (getattr(getattr(hook, "func", hook), "__module__", None) or "").startswith("torch.")
