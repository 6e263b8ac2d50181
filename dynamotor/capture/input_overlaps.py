"""Guards that inputs which a graph writes share no memory with its other inputs."""

from __future__ import annotations

from .guards import Apart, NoOverlap, are_apart
from .values.base import Trace


def guard_overlaps(trace: Trace) -> None:
    """Guards that no written input shares memory with another one, as far as that can change from call to
    call.

    To be called when the trace is done. Inputs that overlap now get no guard: who compiles the graph sees
    them overlap.
    """
    inputs = [v for v in trace.tensors.outside if v.in_graph]
    written = [v for v in inputs if v.written]
    for value in written:
        if value.example.requires_grad and not value.obj.is_inference():  # eager refuses writes into a leaf
            trace.reader.attribute(value.source, value.obj, "is_leaf")
    if not written:
        return
    rest = [v for v in inputs if not v.written]
    if are_apart([v.obj for v in (*written, *rest)], len(written)):
        first, *others = [v.source for v in (*written, *rest)]
        trace.reader.guard(Apart(first, tuple(others), len(written)))
        return
    for at, value in enumerate(written):
        others = [*written[at + 1 :], *rest]
        if others and are_apart([value.obj, *[o.obj for o in others]], 1):
            trace.reader.guard(NoOverlap(value.source, tuple([o.source for o in others])))
