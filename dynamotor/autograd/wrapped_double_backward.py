"""Gradients of gradients of programs with tensors of wrapper subclasses: under `create_graph=True` the torch
graph runs again in eager PyTorch, which differentiates it as it does any calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..base import compat
from ..base.errors import BackendError
from ..graph.modes import autocast_state
from ..graph.tensor_subclass import Through
from .desugar import WrapperBoundary
from .double_backward import as_captured, version_of
from .recipe import Recipe


def versions_of(values: Sequence[Any]) -> list[int]:
    """How often each tensor was written. A write into a wrapper counts for the wrapper, not for its parts."""
    return [version_of(x) for x in values if isinstance(x, torch.Tensor)]


@dataclass(frozen=True)
class WrappedAgain:
    """A graph that can be differentiated again."""

    gm: torch.fx.GraphModule
    recipe: Recipe
    boundary: WrapperBoundary
    grad_mode: bool = field(default_factory=torch.is_grad_enabled)
    autocast: dict[str, tuple[bool, torch.dtype]] = field(default_factory=autocast_state)

    def gradients(
        self, inputs: Sequence[Any], versions: Sequence[int], tangents: Sequence[Any]
    ) -> tuple[Any, ...]:
        """The inputs' gradients, with a history, by tangents of the graded wrappers and of the values."""
        BackendError.when(
            bool(self.recipe.once or self.recipe.draws or self.recipe.mutated),
            "DM408",
            "the gradient of a gradient was asked for, of a graph with tensor subclasses that writes"
            " an input, draws random numbers or has effects",
            why="the graph runs again for it",
            cure="leave the function out with dynamotor.disable, or backward() without create_graph",
        )
        if list(versions) != versions_of([*inputs, *self.boundary.flat(inputs)]):
            raise RuntimeError(
                "one of the inputs of a compiled graph was modified by an inplace operation before the "
                "gradient of its gradient was asked for"
            )
        wanted = [k for k, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.requires_grad]
        with torch.enable_grad():
            given = [Through.apply(x) if k in wanted else x for k, x in enumerate(inputs)]
            with as_captured(self):
                results = self.gm.forward(*given)
            roots = [(root, tangents[k]) for k, root in self._roots(results) if tangents[k] is not None]
            found = compat.execution_engine.get().run_backward(
                tuple([root for root, _ in roots]),
                tuple([tangent for _, tangent in roots]),
                True,
                True,
                tuple([given[k] for k in wanted]),
                allow_unreachable=True,
                accumulate_grad=False,
            )
        grads = dict(zip(wanted, found, strict=True))
        return tuple([grads.get(k) for k in range(len(inputs))])

    def _roots(self, results: Sequence[Any]) -> list[tuple[int, torch.Tensor]]:
        """The places of tangents, with the tensors that they are of; each once."""
        found: dict[int, torch.Tensor] = {}
        for (kind, place), result in zip(self.boundary.outputs, results, strict=True):
            if kind == "wrapper" and place < self.boundary.n_graded:
                found.setdefault(place, result)
            elif kind == "leaf":
                plan = self.recipe.plans[place]
                if plan.kind == "value" and not plan.detach and self.recipe.differentiable[plan.index]:
                    base = result._base if plan.steps and result._base is not None else result
                    found.setdefault(self.boundary.n_graded + plan.index, base)
        return list(found.items())
