"""Moves all-gathers of sharded parameters up: while one part of a model computes, the parameters of the next
are on their way.

>>> prefetch(graph, BYTES_AHEAD)      # gather b; a = weights a; ... uses a ...; b = weights b
"""

from __future__ import annotations

from torch import fx

from ..base.narrowing import checked
from .shard_group import group_of
from .shard_ops import Gather, Unshard, shard_gather, shard_weights

# Parameters that may be on their way at once in a forward; one gather may always be.
BYTES_AHEAD = 32 << 20


def _is_start(node: fx.Node) -> bool:
    return isinstance(node.target, Gather) or node.target is shard_gather


def _is_wait(node: fx.Node) -> bool:
    return isinstance(node.target, Unshard) or node.target is shard_weights


def has_shards(graph: fx.Graph) -> bool:
    """Whether a graph gathers parameters."""
    return any(map(_is_start, graph.nodes))


def _nbytes(start: fx.Node) -> int:
    target = start.target
    of = group_of(target.number if isinstance(target, Gather) else checked(int, start.args[1]))
    return of.gathered.nbytes * of.world


def prefetch(graph: fx.Graph, bytes_ahead: int) -> None:
    """Start each gather behind the wait for the one before it, or earlier where few bytes are on their way.

    Gathers keep their order. In a backward with 0 bytes ahead they keep it among the reductions too, as under
    FSDP2's hooks.
    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    ahead = [node for node in calls if _is_start(node)]
    if not ahead:
        return
    last = graph.call_function(len, ())  # a place: behind it the next start is put
    next(node for node in graph.nodes if node.op != "placeholder").prepend(last)
    mark = last
    flying: list[fx.Node] = []
    for node in (mark, *calls):
        if _is_wait(node):
            flying.remove(node.args[0])
            last = node
        elif node is not mark:
            continue
        while ahead and (not flying or sum(map(_nbytes, (*flying, ahead[0]))) <= bytes_ahead):
            last.append(ahead[0])
            last = ahead[0]
            flying.append(ahead.pop(0))
    graph.erase_node(mark)
