"""Cuts a captured graph into stages at DDP's bucket borders, each with a forward and backward of its own.

DDP's hooks fire when a stage's backward ends, so that a bucket is reduced while earlier stages still compute.

>>> # a callable like the graph's, or None: one stage is enough
>>> stages = cut(gm, inputs, parameters, caps, backend)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from ..autograd.stages import Backend, Compiled, StagedCall
from ..graph.spec import TensorSpec

_REGIONS_OPEN = (torch.amp.autocast_mode._enter_autocast,)
_REGIONS_CLOSE = (torch.amp.autocast_mode._exit_autocast,)
# Calls whose result shows their first argument's memory, by name: a write through them is a write to it.
_VIEWS = {
    "T",
    "contiguous",
    "detach",
    "diagonal",
    "expand",
    "flatten",
    "getitem",
    "mT",
    "movedim",
    "narrow",
    "permute",
    "reshape",
    "select",
    "squeeze",
    "swapaxes",
    "t",
    "transpose",
    "unflatten",
    "unsqueeze",
    "view",
    "view_as",
}
_WRITING_OPERATORS = {
    "iadd",
    "iand",
    "ifloordiv",
    "imod",
    "imul",
    "ior",
    "ipow",
    "isub",
    "itruediv",
    "ixor",
    "setitem",
}


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
    plain = [a and b for a, b in zip(_outside_of_regions(calls), _between_values(calls), strict=True)]
    first = min(uses)
    borders: list[int] = []
    nbytes = 0
    for at in range(len(calls) - 1, first, -1):
        nbytes += sum(p.nbytes for p in uses.get(at, ()))
        if plain[at] and nbytes >= caps[min(len(borders), len(caps) - 1)]:
            borders.append(at)
            nbytes = 0
    return borders[::-1]


def _outside_of_regions(calls: Sequence[fx.Node]) -> list[bool]:
    """Whether a stage may begin before each call: outside of autocast regions, with gradients on."""
    depth, graded, result = 0, True, []
    for node in calls:
        result.append(depth == 0 and graded)
        if node.target in _REGIONS_OPEN:
            depth += 1
        elif node.target in _REGIONS_CLOSE:
            depth -= 1
        elif node.target is torch._C._set_grad_enabled:
            graded = bool(node.args[0])
    return result


def _between_values(calls: Sequence[fx.Node]) -> list[bool]:
    """Whether a stage may begin before each call: only tensors pass, and none that is written later on."""
    position = {node: i for i, node in enumerate(calls)}
    free = [True] * len(calls)
    for i, node in enumerate(calls):
        if not isinstance(node.meta.get("val"), TensorSpec):
            begin, end = i, max((position.get(user, i) for user in node.users), default=i)
        elif (
            _writes(node)
            and node.args
            and isinstance(node.args[0], fx.Node)
            and _root(node.args[0]) in position
        ):
            begin, end = position[_root(node.args[0])], i
        else:
            continue
        free[begin + 1 : end + 1] = [False] * (end - begin)
    return free


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _writes(node: fx.Node) -> bool:
    """Whether the call changes its first argument."""
    name = _name(node)
    return (
        (name.endswith("_") and not name.endswith("__"))
        or name in _WRITING_OPERATORS
        or bool(node.kwargs.get("inplace"))
    )


def _root(node: fx.Node) -> fx.Node:
    """The call whose memory a chain of views shows."""
    while _name(node) in _VIEWS and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node
