"""Rematerialisation in whole steps: values that the backward computes again, as the partition of two
graphs would not save (`autograd/partition.py`), here within one.

>>> compute_again(gm)      # in place; nodes of the backward have the stage "backward"
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from ..autograd.extract import is_view
from ..autograd.late_products import is_kept, move_behind_their_gradients
from ..autograd.partition import JointNodes, choose_saved, dependents, is_laid_out_anew, lay_out_early
from ..graph.nodes import take_place
from ..graph.size_nodes import is_size
from ..lower.realize import IN_MEMORY

aten = torch.ops.aten


def compute_again(gm: fx.GraphModule) -> None:
    """Give the backward copies of the cheap values that it reads of the forward, each before its first use
    there; unread originals go.
    """
    _split_batch_norms(gm.graph)
    nodes = list(gm.graph.nodes)
    backward = dependents(
        nodes, [node for node in nodes if _is_backward(node) and not is_laid_out_anew(node)]
    )
    laid_out = lay_out_early(gm.graph, backward)
    for node in laid_out:
        node.meta |= {"stage": "forward", IN_MEMORY: True}
    nodes = [node for node in gm.graph.nodes if node.op != "output"]
    backward = dependents(nodes, [node for node in nodes if _is_backward(node)])
    (results,) = next(iter(reversed(gm.graph.nodes))).args
    values = [node for node in results if isinstance(node, fx.Node) and node not in backward]
    writes = [
        node for node in nodes if not node.users and node.op == "call_function" and node not in backward
    ]
    both = JointNodes(nodes, backward, values, writes, None, frugal=True, laid_out=laid_out)
    saved, _ = choose_saved(both)
    move_behind_their_gradients(nodes, backward, lambda arg: not is_kept(arg, saved))
    copies: dict[fx.Node, fx.Node] = {}
    nodes = [node for node in gm.graph.nodes if node.op != "output"]
    for node in nodes:
        if node in backward:
            node.meta["phase"] = "backward"
            for arg in node.all_input_nodes:
                if arg not in backward:
                    node.replace_input_with(arg, _again(gm.graph, arg, saved, copies, node))
    for node in reversed(nodes):
        if node in copies and not node.users:
            gm.graph.erase_node(node)


def _split_batch_norms(graph: fx.Graph) -> None:
    """Batch norms of training in two ops: the statistics, and the normalised input, which is a
    map and may be made twice.
    """
    for norm in graph.find_nodes(op="call_function", target=aten._native_batch_norm_legit_functional.default):
        x, weight, bias, _, _, training, _, eps = norm.args
        parts = {user.args[1]: user for user in norm.users if user.target is operator.getitem}
        if not training or not parts.keys() >= {0, 1, 2}:
            continue
        out, mean, rstd = (parts[i] for i in range(3))
        norm.append(rstd), norm.append(mean)
        with graph.inserting_before(out):
            made = graph.call_function(aten.batch_norm_elemt.default, (x, weight, bias, mean, rstd, eps))
        made.meta = dict(out.meta)
        take_place(made, out)


def _is_backward(node: fx.Node) -> bool:
    """Whether the node computes in the backward; parts and views of values are where those are."""
    computes = node.op == "call_function" and node.target is not operator.getitem and not is_view(node)
    return computes and node.meta.get("stage") == "backward"


def _again(
    graph: fx.Graph, wanted: fx.Node, saved: set[fx.Node], copies: dict[fx.Node, fx.Node], user: fx.Node
) -> fx.Node:
    """What stands for a value of the forward in the backward: itself where it is kept, else a copy before
    `user`.
    """
    stack = [wanted]
    while stack:
        node = stack[-1]
        if node in copies:
            stack.pop()
            continue
        if node in saved or node.op != "call_function" or is_size(node):
            copies[node] = node
            continue
        missing = [arg for arg in node.all_input_nodes if arg not in copies]
        if missing:
            stack += missing
            continue
        if is_view(node) and all(copies[arg] is arg for arg in node.all_input_nodes):
            copies[node] = node
            continue
        with graph.inserting_before(user):
            copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta["phase"] = "backward"
    return copies[wanted]
