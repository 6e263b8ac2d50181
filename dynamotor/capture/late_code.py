"""Functions that run in a backward and that a graph has recorded: they stay what they were until it runs.

A hook, or the backward of an `autograd.Function`, that calls functions by global names or through closures is recorded
with the code that these have at the forward. Eager looks them up when the backward runs, so the backward of such a
graph asks first whether each name leads to the same function, with the same code and defaults (DM715).

>>> code = LateCode()
>>> code.note(backward)
>>> finish = code.watched(finish)
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..base.errors import CaptureError
from .op_state import called_by

Place = dict[str, Any] | types.CellType


class LateCode:
    """The functions that the recorded ones of a trace call, by where they are looked up."""

    def __init__(self) -> None:
        self.facts: dict[weakref.ref[types.FunctionType], Any] = {}
        self.names: dict[tuple[int, str], tuple[Place, weakref.ref[types.FunctionType]]] = {}

    def note(self, *fns: Any) -> None:
        """Functions whose code the graph has recorded."""
        for fn, place, name in called_by(*fns):
            self.facts[weakref.ref(fn)] = facts(fn)
            if place is not None:
                self.names[id(place), name] = place, weakref.ref(fn)

    def watched(self, finish: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """The same `finish` of an entry, whose graph's backward asks first."""
        if not self.facts:
            return finish

        def run(outs: Any, args: tuple[Any, ...]) -> Any:
            for node in {out.grad_fn for out in outs if isinstance(out, torch.Tensor) and out.grad_fn}:
                node.register_prehook(self._ask)
            return finish(outs, args)

        return run

    def _ask(self, gradients: Any) -> None:
        changed = [
            fn.__qualname__ for held, then in self.facts.items() if (fn := held()) and facts(fn) != then
        ]
        changed += [
            name for (_, name), (place, fn) in self.names.items() if _look_up(place, name) is not fn()
        ]
        CaptureError.when(
            changed,
            "DM715",
            f"{changed[0] if changed else ''}, which a backward calls, was replaced after the forward",
            why="eager PyTorch looks it up when the backward runs; the compiled backward has the code of the forward",
            cure="replace it before the forward, or use dynamotor.disable on the function that registers the hook",
        )


def facts(fn: types.FunctionType) -> tuple[Any, ...]:
    """The attributes of a function that a program can set."""
    return fn.__code__, fn.__defaults__, tuple((fn.__kwdefaults__ or {}).items())


def _look_up(place: Place, name: str) -> Any:
    if isinstance(place, dict):
        return place.get(name)
    try:
        return place.cell_contents
    except ValueError:  # emptied
        return None
