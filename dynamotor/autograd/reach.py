"""Which inputs eager's backward would come to from which outputs.

Autograd's engine runs every node that it can reach, hands it None where no gradient flows, and calls its
hooks. So the nodes that stand for a compiled graph may lead from an output only to the inputs that eager's
graph leads to.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..base.compat import tree_leaves
from ..graph.nodes import in_order
from ..graph.shape_tensor import shape_mode
from ..graph.tensor_subclass import Through, is_wrapper


def reaching(
    roots: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], outputs: Sequence[Any]
) -> tuple[list[int], list[int]]:
    """For each input (a leaf), and for each output, the roots whose graph leads to it: bit k stands for
    roots[k].

    An output has a graph of its own, which does not count: 0 says that nothing else is computed from it.
    """
    masks, through = _masks(roots)
    inner = [
        through.get((tensor.grad_fn, tensor.output_nr), 0)
        if isinstance(tensor, torch.Tensor) and tensor.grad_fn
        else 0
        for tensor in outputs
    ]
    return [masks.get(_node_of(leaf), 0) for leaf in inputs], inner


def _masks(roots: Sequence[torch.Tensor]) -> tuple[dict[Any, int], dict[tuple[Any, int], int]]:
    """For each node, and each edge into one, the roots whose graph leads there."""
    masks: dict[Any, int] = {}
    through: dict[tuple[Any, int], int] = {}
    for k, root in enumerate(roots):
        masks[root.grad_fn] = masks.get(root.grad_fn, 0) | 1 << k
    masks.pop(None, None)
    for node in reversed(in_order(masks, leads_to)):
        for following, place in node.next_functions:
            masks[following] = masks.get(following, 0) | masks[node]
            through[following, place] = through.get((following, place), 0) | masks[node]
    return masks, through


def saving_parts(roots: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The roots (bits, as in `reaching`) in groups: two are in one group where their graphs share a node
    that saved a tensor, so that eager cannot run a backward of one after a backward of the other. A root
    that leads to no such node is in none: eager runs its backward as often as one likes.
    """
    masks, _ = _masks(roots)
    parts: list[int] = []
    for node, mask in masks.items():
        if any(mask & ~part == 0 for part in parts) or next(_saved(node), None) is None:
            continue
        joined = [part for part in parts if part & mask]
        parts = [part for part in parts if not part & mask] + [functools.reduce(int.__or__, joined, mask)]
    return tuple(sorted(parts))


def kept_tensors(roots: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that custom autograd functions have put on their contexts, where the backward finds them
    as they are then, and those that autograd's nodes have saved, which nothing may have written then.
    """
    nodes = in_order({root.grad_fn: None for root in roots if root.grad_fn is not None}, leads_to)
    contexts = [vars(node) for node in nodes if isinstance(node, torch.autograd.function.FunctionCtx)]
    on_contexts = [leaf for leaf in tree_leaves(contexts) if isinstance(leaf, torch.Tensor)]
    return on_contexts, [tensor for node in nodes for tensor in _saved(node)] if on_contexts else []


_SAVED: dict[type, tuple[str, ...]] = {}  # the attributes in which nodes of a class keep saved values


def _saved(node: Any) -> Iterator[torch.Tensor]:
    """The tensors that a node of autograd's graph saved."""
    cls = type(node)
    if cls not in _SAVED:
        _SAVED[cls] = tuple(name for name in dir(cls) if name.startswith("_raw_saved_"))
    # Not unpacked: that of a result of a tensor subclass imports torch.distributed.tensor, and sympy.
    saved = (leaf for name in _SAVED[cls] for leaf in tree_leaves(getattr(node, name)))
    yield from (one.data for one in saved if torch.is_tensor(one.data))


def leads_to(node: Any) -> list[Any]:
    """The next nodes of autograd's graph."""
    return [following for following, _ in node.next_functions if following is not None]


def _node_of(leaf: torch.Tensor) -> Any:
    """Where a tensor's gradient arrives, as `get_gradient_edge` says it, which imports
    torch.distributed.tensor at first.
    """
    if leaf.grad_fn is not None:
        return leaf.grad_fn
    with shape_mode(), torch.enable_grad():  # under a mode: without one PyTorch asks whether it is a DTensor
        made = Through.apply(leaf) if is_wrapper(leaf) else leaf.view_as(leaf)
        assert made.grad_fn is not None
        return made.grad_fn.next_functions[0][0]


def is_always_leaf(tensor: torch.Tensor, held: bool) -> bool:
    """Whether an input has only hooks behind it at each call: a held tensor, or a parameter (of a module
    that is an argument).
    """
    return (held or isinstance(tensor, torch.nn.Parameter)) and tensor.is_leaf


def gradient_groups(reach: Mapping[int, int], everything: int, fixed: frozenset[int]) -> dict[int, list[int]]:
    """Inputs by autograd node, each node under the outputs that lead to it (bits, as in `reach`).

    There is one node, unless nodes behind an input could tell that it is visited. `fixed`: leaves, which
    have only hooks behind them (`autograd_nodes.pass_over_hooks`). Another input that some outputs do not
    lead to gets a node apart, with all that the same outputs lead to (`shared_gradients.py`).
    """
    own_nodes = {mask for i, mask in reach.items() if i not in fixed and mask not in (0, everything)}
    groups: dict[int, list[int]] = {}
    for i, mask in reach.items():
        groups.setdefault(mask if mask in own_nodes else everything, []).append(i)
    return groups
