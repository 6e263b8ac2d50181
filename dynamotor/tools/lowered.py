"""`dynamotor.lower(fn, *args)`: every stage of the compiler's work on one call, as text that reads as a
program.

>>> lowered = dynamotor.lower(model, x)
>>> print(lowered.graph)       # the captured torch calls
>>> print(lowered.schedule)    # kernels and aten calls in order, and which fusions were refused why
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..api import compile as compile_, plain
from ..autograd.reach import leads_to
from ..base.compat import tree_leaves
from ..graph.nodes import reached
from .record import Record


@dataclass(frozen=True)
class Lowered:
    """The stages of one call. Each property is the text of all graphs of that stage, with a heading where
    there are several.
    """

    record: Record
    result: Any

    @property
    def graph(self) -> str:
        """The captured torch calls, one graph between two breaks."""
        return _joined([(c.name, c.graph.text) for c in self.record.captures if c.graph])

    @property
    def joint(self) -> str:
        """Forward and backward as one functional aten graph."""
        return self._stage("joint")

    @property
    def forward(self) -> str:
        """The aten graph of the forward; without gradients, of the whole."""
        return self._stage("forward", "inference")

    @property
    def backward(self) -> str:
        """The aten graph of the backward; empty without gradients."""
        return self._stage("backward")

    @property
    def loops(self) -> str:
        """The fused kernels as loops over elements."""
        return _joined(
            [(f"{p.name}: {k.nodes}", k.loops) for p in self.record.programs for k in p.kernels], always=True
        )

    @property
    def schedule(self) -> str:
        """Kernels and aten calls in the order in which they run, and the fusions that were refused with the
        reason.
        """
        return _joined(
            [
                (
                    p.name,
                    p.text
                    + "".join(
                        f"# {node} does not join {group}: {reason}"
                        + (f" ({n} times)" if n > 1 else "")
                        + "\n"
                        for (node, group, reason), n in p.refusals.items()
                    ),
                )
                for p in self.record.programs
            ]
        )

    @property
    def code(self) -> str:
        """The generated C++ or Triton."""
        return _joined([(p.name, p.code) for p in self.record.programs])

    @property
    def call_program(self) -> str:
        """The Python function that takes memory, runs kernels and calls aten."""
        return _joined([(p.name, p.python) for p in self.record.programs])

    def _stage(self, *stages: str) -> str:
        return _joined([(g.name, g.text) for g in self.record.graphs if g.stage in stages])

    def __str__(self) -> str:
        stages = ("graph", "joint", "forward", "backward", "schedule", "loops", "call_program")
        return "\n".join(f"# ---- {name} ----\n{getattr(self, name)}" for name in stages)


def _joined(parts: list[tuple[str, str]], always: bool = False) -> str:
    if len(parts) == 1 and not always:
        return parts[0][1]
    return "\n".join(f"# {name}\n{text}" for name, text in parts)


def lower(
    fn: Callable[..., Any], *args: Any, compile_options: dict[str, Any] | None = None, **kwargs: Any
) -> Lowered:
    """Compile `fn` anew, call it with these arguments, and the backward of its result; give every
    stage's text.

    The call runs for real: its side effects happen. Gradients of parameters and inputs are as before
    afterwards. compile_options: those of `compile`.
    """
    record = Record()
    compiled = compile_(plain(fn), **(compile_options or {}))
    with record.listening():
        result = call_both_ways(compiled, args, kwargs)
    return Lowered(record, result)


def call_both_ways(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a call; its backward has run too where it has one, and left no gradients behind."""
    result = fn(*args, **kwargs)
    graded = [
        t for t in tree_leaves(_tensors(result)) if isinstance(t, torch.Tensor) and t.grad_fn is not None
    ]
    leaves = _leaves(graded)
    kept = [leaf.grad for leaf in leaves]
    try:
        for leaf in leaves:
            leaf.grad = None
        if graded:
            torch.autograd.backward(graded, [torch.ones_like(t) for t in graded])
    finally:
        for leaf, grad in zip(leaves, kept, strict=True):
            leaf.grad = grad
    return result


def _tensors(result: Any) -> Any:
    """A call's result, with transformers' outputs (dicts of their own) as plain ones."""
    return dict(result) if isinstance(result, dict) else result


def _leaves(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors in whose `.grad` a backward of these would add."""
    start = [t.grad_fn for t in tensors if t.grad_fn is not None]
    nodes = reached(start, leads_to)
    return [node.variable for node in nodes if hasattr(node, "variable")]
