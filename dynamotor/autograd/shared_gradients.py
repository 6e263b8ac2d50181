"""Gradients that several nodes of one compiled graph compute from the same values, computed once.

The leader is the node that all outputs lead to. It is made last, so that the engine runs it first, and it
gets every gradient that its siblings get. Where the engine will run them in the same backward, it computes
their gradients with its own, in one program, and they take them. A sibling for which nothing is there
computes its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..base import compat
from ..base.errors import BackendError
from ..graph.tensor_subclass import is_wrapper
from .double_backward import is_batched, version_of

Gradients = Callable[[Any, Sequence[Any]], Sequence[Any]]  # (a node's context, its tangents) → its gradients
_will_run, _task = compat.engine_will_run, compat.current_task


@dataclass
class SharedGradients:
    """Of the nodes of one call, by sibling: the backward, tangents (with versions) and gradients that the
    leader left for it, and the backward in which it last ran.
    """

    left: dict[int, tuple[int, Sequence[Any], Sequence[Any], Sequence[Any]]] = field(default_factory=dict)
    ran: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class SiblingNode:
    """A node other than the leader: which of the leader's tangents lead to it, and where its gradients are
    among all. open: notes that it runs, and raises where its backward may not run.
    """

    number: int
    tangents: tuple[int, ...]
    places: tuple[int, ...]
    own: Gradients
    open: Callable[[Any, Sequence[Any]], object]

    def __call__(self, ctx: Any, tangents: Sequence[Any]) -> Sequence[Any]:
        task, shared = _task(), ctx.shared
        shared.ran[self.number] = task
        of, given, versions, gradients = shared.left.pop(self.number, (None, (), (), ()))
        if of != task or not all(map(_is, given, tangents)):
            return self.own(ctx, tangents)
        BackendError.when(
            versions != [*map(version_of, given)],
            "DM284",
            "a gradient that a compiled graph's backward takes was written in place while the backward ran",
            why="a part of the backward had read it: eager PyTorch may read all of it before, or after",
            cure="give a new tensor from the hook instead of writing into one",
        )
        self.open(ctx, tangents)
        return gradients

    def will_run(self, ctx: Any, task: int) -> bool:
        """Whether it runs after the leader in this backward."""
        return ctx.shared.ran.get(self.number) != task and _will_run(ctx.siblings[self.number])


@dataclass(frozen=True)
class LeaderNode:
    """The node that computes for its siblings. `whole` gives the gradients of all, its own at `places`."""

    own: Gradients
    whole: Gradients
    places: tuple[int, ...]
    siblings: tuple[SiblingNode, ...]

    def __call__(self, ctx: Any, tangents: Sequence[Any]) -> Sequence[Any]:
        task = _task()
        asked = [one for one in self.siblings if any(tangents[k] is not None for k in one.tangents)]
        if (
            not asked
            or torch.is_grad_enabled()
            or not all(one.will_run(ctx, task) for one in asked)
            or any(map(_is_special, tangents))
        ):
            return self.own(ctx, tangents)
        found = self.whole(ctx, tangents)
        for one in asked:
            given, gradients = [tangents[k] for k in one.tangents], [found[k] for k in one.places]
            ctx.shared.left[one.number] = task, given, [*map(version_of, given)], gradients
        return [found[k] for k in self.places]


def _is(one: object, other: object) -> bool:
    return one is other


def _is_special(tangent: torch.Tensor | None) -> bool:
    """Whether a backward does more with it than run its program."""
    return tangent is not None and (tangent._is_zerotensor() or is_wrapper(tangent) or is_batched(tangent))
