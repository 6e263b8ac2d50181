"""Functions inside a graph: called by a node when a program hands a function of its own to PyTorch (`vmap`,
`cond`, ...). Its body is a graph of its own, without outside tensors.

>>> node = graph.call_function(Transformed("vmap", torch.vmap, body), (x, weight))  # the body reads weight
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .sizes import mapped


class Leaf:
    """The place of the i-th tensor in a template: nested tuples, lists and dicts of leaves and constants."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def fill(template: Any, leaves: Sequence[Any], leaf: Callable[[Any], Any] = lambda found: found) -> Any:
    """The template with tensors in it."""
    return mapped(lambda item: leaf(leaves[item.index]) if type(item) is Leaf else item, template)


def flatten(tree: Any, leaves: list[torch.Tensor]) -> Any:
    """The template of nested tuples, lists and dicts; their tensors are appended to `leaves`."""

    def leaf(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        leaves.append(item)
        return Leaf(len(leaves) - 1)

    return mapped(leaf, tree)


@dataclass(eq=False)
class Body:
    """A function as a graph of its own. `gm` takes the tensors of the arguments, then the `n_free` ones that
    it reads from outside, and gives a flat tuple; `result` is the template of the function's value."""

    gm: torch.fx.GraphModule
    n_free: int
    result: Any

    def function(self, free: Sequence[Any]) -> Callable[..., Any]:
        """What takes the original's arguments."""

        def call(*args: Any, **kwargs: Any) -> Any:
            leaves: list[torch.Tensor] = []
            flatten((args, kwargs), leaves)
            return fill(self.result, self.gm.forward(*leaves, *free))

        return call


class Transformed:
    """The target of a node that calls a function transform: `transform(function)` on the arguments of a
    template. Takes the arguments' tensors and then those that the body reads; gives the result's tensors."""

    def __init__(
        self, name: str, transform: Callable[..., Callable[..., Any]], body: Body, arguments: tuple[Any, Any]
    ) -> None:
        self.__name__ = self.__qualname__ = name
        self.transform, self.body, self.arguments = transform, body, arguments
        self.result: Any = None  # its template, after the first call

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        free = tensors[len(tensors) - self.body.n_free :]
        args, kwargs = fill(self.arguments, tensors)
        leaves: list[torch.Tensor] = []
        self.result = flatten(self.transform(self.body.function(free))(*args, **kwargs), leaves)
        return tuple(leaves)

    def __repr__(self) -> str:
        return f"{self.__name__}({self.body.gm.graph})"


GRADIENT = (Leaf(0),)


class Hook(Transformed):
    """The target of a node that hooks a function on to the gradient of its first tensor."""

    def __init__(self, body: Body) -> None:
        super().__init__("register_hook", _hooked, body, (GRADIENT, {}))


def _hooked(function: Callable[..., Any]) -> Callable[..., Any]:
    def register(tensor: torch.Tensor) -> torch.Tensor:
        tensor.register_hook(function)
        return tensor

    return register
