"""Why a graph was compiled: the first, another structure, other shapes, or another constant.

>>> reasons.explain(graph, key, "mark_step")
'new shapes: float32[8, 4] -> float32[6, 4]'
"""

from __future__ import annotations

from ..base.events import emit, listening
from . import metrics
from .execute import Graph
from .recent import Recent


class Reasons:
    """Compares each graph that is compiled with those before."""

    def __init__(self) -> None:
        self._by_ops = Recent(256)
        self._count = 0

    def explain(self, graph: Graph, key: tuple, cause: str) -> str:
        """The reason, also emitted as an event "xla.compile" {reason, cause, nodes, line}."""
        ops = tuple((str(step.instruction.func), step.inputs, step.item) for step in graph.steps.values())
        before = self._by_ops.get(ops)
        self._by_ops[ops] = graph
        self._count += 1
        if before is None:
            reason = (
                "first graph"
                if self._count == 1
                else "new structure: no graph with these operations was compiled before"
            )
        else:
            reason = _difference(before, graph)
        if listening("xla.compile"):
            emit("xla.compile", reason=reason, cause=cause, nodes=len(graph.steps), line=metrics.user_line())
        return reason


def _difference(before: Graph, after: Graph) -> str:
    shapes = [f"{a!r} -> {b!r}" for a, b in zip(before.leaves, after.leaves) if a is not b]
    if shapes:
        return "new shapes: " + ", ".join(shapes[:3])
    for old, new in zip(before.steps.values(), after.steps.values()):
        if old.instruction is not new.instruction:
            return f"constant changed: {old.instruction.show()} -> {new.instruction.show()}"
    if before.outputs != after.outputs:
        return "other results are kept: the same operations, but other tensors are alive at the barrier"
    return "other buffers may be reused (donated), or other shardings"
