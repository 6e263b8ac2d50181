"""Attention that a program writes as plain products becomes a call, on a GPU: no matrix of scores is written.

>>> proposed = propose(gm)    # calls that nothing reads, beside the products
>>> use_blocks(gm, simplify_attention(gm, inputs))
>>> settle(gm, proposed)      # those whose masks are understood take the products' place
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..base.config import config
from ..base.events import counters
from ..graph.attention_masks import ATTENTION, Writes, attention_call
from ..graph.eager_attention import EagerAttention, eager_attention
from ..graph.mask_formula import name_of
from ..graph.sizes import known

Node = torch.fx.Node
Proposed = list[tuple[EagerAttention, Node]]
_OURS = ("transpose", "contiguous")  # what transformers does with the result


def propose(gm: torch.fx.GraphModule) -> Proposed:
    """Put a call of attention beside such products; gives the products, and a node that uses the call."""
    found: Proposed = []
    writes = Writes(gm)
    for node in list(gm.graph.nodes):
        eager = None if config.exact else eager_attention(node)
        # a kernel keeps its result for the backward, which products do not
        if eager is None or not _is_better(eager) or writes.may_change(node):
            continue
        operands = [eager.query, eager.key, eager.value, eager.mask, eager.sinks]
        if writes.none_before(node, {*eager.chain, *[n for n in operands if n is not None]}):
            found.append((eager, _call_of(eager)))
    return found


def settle(gm: torch.fx.GraphModule, proposed: Proposed) -> None:
    """Replace the products by calls that have become better ones, and remove the others."""
    for eager, user in proposed:
        made: Any = user.args[0]
        call = attention_call(made)
        made.meta.pop("sinks", None)
        if call is not None and (call.mask is not None or eager.sinks is not None):
            gm.graph.erase_node(user)
            gm.graph.erase_node(made)
            counters["eager attention"]["kept"] += 1
            continue
        counters["eager attention"]["without sinks" if eager.sinks is None else "with sinks"] += 1
        _take_place(eager, made if call is None or _is_copied_anyway(eager.chain[0]) else user)
        if not user.users:
            gm.graph.erase_node(user)
    if proposed:
        gm.recompile()


def _is_better(eager: EagerAttention) -> bool:
    """Whether there are kernels that need no scores, and scores to save."""
    spec = eager.query.meta["val"]
    on_gpu = spec.device.type == "cuda" or config.target == "triton"
    return on_gpu and known(">=", spec.shape[2] - 2)


def _call_of(eager: EagerAttention) -> Node:
    node = eager.chain[0]
    given: dict[str, Any] = {"attn_mask": eager.mask, "scale": eager.scale}
    with node.graph.inserting_before(node):
        call = node.graph.call_function(ATTENTION, (eager.query, eager.key, eager.value), given)
        user = node.graph.call_method("contiguous", (call,))
    call.meta, user.meta = dict(node.meta, sinks=eager.sinks), dict(node.meta)
    if _is_copied_anyway(node):
        batch, heads, rows, width = node.meta["val"].shape
        stride = (rows * heads * width, width, heads * width, 1)
        call.meta["val"] = replace(node.meta["val"], stride=stride)
    return user


def _is_copied_anyway(node: Node) -> bool:
    """Whether the result's one reader is a row-major copy of it with heads beside their rows' numbers."""
    for name, args in zip(_OURS, ((1, 2), ()), strict=True):
        if len(node.users) != 1:
            return False
        (node,) = node.users
        if name_of(node) != name or node.args[1:] != args or node.kwargs:
            return False
    return True


def _take_place(eager: EagerAttention, result: Node) -> None:
    """Put a node in the place of the products, and remove these."""
    node = eager.chain[0]
    if _is_copied_anyway(node):
        (turned,) = node.users
        turned.meta["val"] = next(iter(turned.users)).meta["val"]
    node.replace_all_uses_with(result)
    for part in eager.chain:
        for unread in [user for user in part.users if not user.users]:
            node.graph.erase_node(unread)
        node.graph.erase_node(part)
