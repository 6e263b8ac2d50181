"""Hooks that a program registers on the nodes which stand for a compiled graph (`output.grad_fn`).

A hook before a node sees the gradients of the outputs, as in eager. A hook behind it (`register_hook`) would
see the gradients of the graph's inputs, where eager shows those of the last operation's operands: it is
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..base.errors import BackendError

Prehook = Callable[[Any], Any]


def refusing_hooks(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """A class decorator: the function's nodes refuse hooks behind them."""
    _class_of_nodes(function).register_hook = _refuse
    return function


def noting_prehooks(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """A class decorator for nodes of outputs from which others of their graph are computed: a hook before one
    is noted on the graph's nodes (`looked_at`), which would have to tell it the rest of the gradient.
    """
    cls = _class_of_nodes(function)
    before = cls.register_prehook

    def register_prehook(node: Any, hook: Prehook) -> Any:
        if is_users(hook) and not _module_of(hook).startswith("dynamotor."):
            for context in node.contexts:
                context.looked_at = getattr(context, "looked_at", 0) | node.leads_inside
        return before(node, hook)

    cls.register_prehook = register_prehook
    return function


def is_users(hook: Any) -> bool:
    """Whether the hook is not PyTorch's own, which may count calls and expect None."""
    return not _module_of(hook).startswith("torch.")


def _module_of(hook: Any) -> str:
    return getattr(getattr(hook, "func", hook), "__module__", None) or ""


def _class_of_nodes(function: Any) -> Any:
    return function._backward_cls


def _refuse(node: Any, hook: Callable[..., Any]) -> Any:
    raise BackendError(
        "DM283",
        "grad_fn.register_hook on an output of a compiled graph",
        why="the node stands for the whole graph: its gradients are those of the graph's inputs",
        cure="hook a tensor, call register_hook inside the compiled function, or use dynamotor.disable",
    )
