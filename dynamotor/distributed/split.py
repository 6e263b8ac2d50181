"""Cuts a captured graph into stages at DDP's bucket borders, each with a forward and backward of its own.

DDP's hooks fire when a stage's backward ends, so that a bucket is reduced while earlier stages still compute.

>>> # a callable like the graph's, or None: one stage is enough
>>> stages = cut(gm, inputs, parameters, caps, backend)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from ..autograd.graph_split import Trial
from ..autograd.program_cache import specs_of
from ..autograd.stages import StagedCall
from ..base.events import counters, log
from ..graph.modes import preserved_modes
from ..graph.spec import Backend, Compiled


def cut(
    gm: fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    caps: Sequence[int],
    backend: Backend,
) -> Compiled | None:
    """The graph as stages; None when its parameters fill one bucket at most, or when no place to cut is
    found.
    """
    calls = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
    borders = stage_borders(gm, calls, inputs, parameters, caps)
    if not borders:
        return None
    return StagedCall(
        gm, [(calls[a:b], backend) for a, b in zip((0, *borders), (*borders, len(calls)), strict=True)]
    )


def first_uses(
    gm: fx.GraphModule,
    calls: Sequence[fx.Node],
    inputs: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
) -> dict[int, list[torch.Tensor]]:
    """Position in `calls` -> parameters first used there: their gradients are complete when that call's
    backward is.
    """
    wanted = {id(p): p for p in parameters}
    position = {node: i for i, node in enumerate(calls)}
    found: dict[int, list[torch.Tensor]] = {}
    for node, tensor in zip((n for n in gm.graph.nodes if n.op == "placeholder"), inputs, strict=True):
        used = [position[user] for user in node.users if user in position]
        if id(tensor) in wanted and used:
            found.setdefault(min(used), []).append(tensor)
    return found


def stage_borders(
    gm: fx.GraphModule,
    calls: Sequence[fx.Node],
    inputs: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    caps: Sequence[int],
) -> list[int]:
    """Where stages begin (positions in `calls`, without 0): walking back from the loss, a stage holds one
    bucket's parameters.
    """
    uses = first_uses(gm, calls, inputs, parameters)
    if not uses:
        return []
    try:
        with preserved_modes():
            free = Trial(gm, inputs, specs_of(gm, inputs)).free()
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:  # of tensors without data
        counters["fallback"]["ddp.uncut"] += 1
        log("fallbacks", f"not cut at DDP's buckets, since a call does not run without data: {error}")
        return []
    first = min(uses)
    borders: list[int] = []
    nbytes = 0
    for at in range(len(calls) - 1, first, -1):
        nbytes += sum(p.nbytes for p in uses.get(at, ()))
        if free[at] and nbytes >= caps[min(len(borders), len(caps) - 1)]:
            borders.append(at)
            nbytes = 0
    return borders[::-1]
