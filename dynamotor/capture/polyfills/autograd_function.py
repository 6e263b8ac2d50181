"""The context of a custom autograd function and the calls that the engine makes, in Python; what `vjp` gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Context:
    """What `forward` and `backward` get as `ctx`."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()
        self.as_none = False
        self.dirty: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def mark_dirty(self, *tensors: Any) -> None:
        self.dirty = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        pass

    mark_non_differentiable = save_for_forward

    def set_materialize_grads(self, value: bool) -> None:
        self.as_none = not value


def context(needs_input_grad: tuple[bool, ...]) -> Context:
    return Context(needs_input_grad)


def forward(cls: Any, ctx: Context, *args: Any) -> Any:
    return cls.forward(ctx, *args)


def forward_and_setup(cls: Any, ctx: Context, *args: Any) -> Any:
    output = cls.forward(*args)
    cls.setup_context(ctx, args, output)
    return output


def backward(cls: Any, ctx: Context, *grads: Any) -> Any:
    return cls.backward(ctx, *grads)


def plain_forward(run: Any, cls: Any, ctx: Any, *args: Any) -> Any:
    """A forward that nothing is recorded of."""
    with torch.no_grad():
        return run(cls, ctx, *args)


def pullback(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What `vjp` gives besides the outputs."""

    def wrapper(cotangents: Any) -> Any:
        return run(cotangents)

    return wrapper
