"""Attention with a mask that the graph computes becomes `dynamotor::masked_attention`, on a GPU: no mask is
written, and blocks that it hides whole are not computed.

>>> use_blocks(gm, {node: visible_keys})        # sliding windows, chunks, prefixes, documents, padding

PyTorch's kernels take such a mask as a matrix, read it for each head and compute all of the scores.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..base.config import config
from ..base.events import counters, log
from ..base.narrowing import checked
from ..graph.attention_masks import ATTENTION, Attention, attention_call
from ..graph.index_formulas import Condition, NoFormula, Position, Read, atoms
from ..graph.mask_blocks import BLOCK, mask_blocks
from ..graph.mask_text import names_in, text_of
from ..graph.sizes import Dim
from ..graph.spec import HALVES, TensorSpec
from ..lower.lowering import Decline, decline_if
from .masked_attention import lines_of_mask

Node = torch.fx.Node
FEWEST = 2 * BLOCK  # queries, and keys: below, there are no blocks to leave out
WIDEST = 128  # of a head


def use_blocks(gm: torch.fx.GraphModule, visible: Mapping[Node, Condition]) -> None:
    """Replace calls of attention. visible: which keys each one's mask shows."""
    made: dict[Any, Node] = {}
    for node, condition in visible.items():
        call = attention_call(node)
        if call is None or not _has_kernels(call):
            continue
        reads = sorted({atom.node for atom in atoms(condition) if type(atom) is Read}, key=str)
        try:
            text = _text(call, condition, reads)
        except (NoFormula, Decline) as error:
            log("passes", lambda why=str(error): f"an attention mask stays a matrix: {why}")
            continue
        log("passes", lambda text=text: f"an attention mask in blocks: {text}")
        counters["attention masks"].update(kept=-1, blocks=1)
        _replace(call, text, reads, made)
    gm.recompile()


def _text(call: Attention, condition: Condition, reads: Sequence[Node]) -> str:
    """The formula's text, for which kernels can be written. Raises NoFormula, Decline."""
    for atom in atoms(condition):
        if type(atom) is Read:
            places = {p.name for i in atom.at for p in atoms(i) if type(p) is Position}
            decline_if({"q", "k"} <= places, "it is in memory anyway")
    text = "q>=0" if condition is True else text_of(condition, reads)
    sizes = (*call.query.hinted().shape[:3], *call.key.hinted().shape[2:3])
    lines_of_mask(text, [read.meta["val"].hinted() for read in reads], sizes)
    return text


def _has_kernels(call: Attention) -> bool:
    query, key, value, given = call.query.hinted(), call.key.hinted(), call.value.hinted(), call.given
    sizes = (*query.shape, *key.shape, *value.shape)
    fixed = [n for spec in (call.query, call.key, call.value) for n in spec.shape[1::2]]  # heads and widths
    return (
        call.node.target is ATTENTION
        and (query.device.type == "cuda" or config.target == "triton")
        and call.node.meta["val"].dtype in HALVES
        and not given.get("dropout_p")
        and not given.get("is_causal")
        and all(type(n) is int for n in fixed)
        and min(sizes) > 0
        and query.shape[0] == key.shape[0] == value.shape[0]
        and query.shape[1] % key.shape[1] == 0
        and min(query.shape[2], key.shape[2]) >= FEWEST
        and all(16 <= n <= WIDEST and n % 8 == 0 for n in (query.shape[3], value.shape[3]))
        and isinstance(given.get("scale"), (int, float, type(None)))
    )


def _replace(call: Attention, text: str, reads: list[Node], made: dict[Any, Node]) -> None:
    """made: the nodes of blocks by formula."""
    node, spec = call.node, call.node.meta["val"]
    graph, where = node.graph, {k: v for k, v in node.meta.items() if k != "val"}
    used = names_in(text)
    numbers = (*call.query.shape[:3], call.key.shape[2])
    numbers = tuple(
        [n if name in used or name in "qk" else 1 for name, n in zip("bhqk", numbers, strict=True)]
    )
    with graph.inserting_before(node):
        key = (text, *reads, *map(str, numbers), call.query.device)
        if key not in made:
            places = [(call.given["query"], n) for n in range(3)] + [(call.given["key"], 2)]
            sizes = [_size(graph, *place, n) for place, n in zip(places, numbers, strict=True)]
            given: tuple[Any, ...] = (text, sizes, call.query.device, *reads)
            made[key] = graph.call_function(mask_blocks, given)
            # Blocks are small and for all layers: a checkpoint around one of these does not make them again.
            made[key].meta = {k: v for k, v in where.items() if k != "recompute"}
        blocks = [graph.call_function(operator.getitem, (made[key], i)) for i in range(10 if reads else 8)]
        operands = [
            _as(node, checked(Node, call.given[name]), spec.dtype) for name in ("query", "key", "value")
        ]
        scale = call.given.get("scale")
        scale = float(call.query.shape[3]) ** -0.5 if scale is None else float(scale)
        op = torch.ops.dynamotor.masked_attention.default
        own = () if call.sinks is None else (call.sinks,)
        stride = _stride(graph, spec, operands)
        both = graph.call_function(op, (*operands, reads, blocks, text, scale, stride, *own))
        out = graph.call_function(operator.getitem, (both, 0))
    both.meta = dict(where)
    out.meta = dict(node.meta)
    node.replace_all_uses_with(out)
    graph.erase_node(node)


def _size(graph: torch.fx.Graph, node: Node, dim: int, size: Dim) -> Any:
    """A dimension's size as an argument of a call: a node where it differs between calls."""
    if type(size) is int:
        return size
    made = graph.call_method("size", (node, dim))
    made.meta = {"val": size}
    return made


def _stride(graph: torch.fx.Graph, spec: TensorSpec, operands: Sequence[Node]) -> list[Any]:
    """The result's strides as an argument of a call: those of its dimensions in their order in memory."""
    if not spec.is_symbolic:
        return list(spec.stride)
    of = [(operands[0], 0), (operands[0], 1), (operands[0], 2), (operands[2], 3)]
    found: list[Any] = [0] * 4
    step: Any = 1
    for dim in sorted(range(4), key=lambda d: (spec.hinted().stride[d], -d)):
        found[dim] = step
        size = _size(graph, *of[dim], spec.shape[dim])
        step = (
            step * size
            if isinstance(step, int) and isinstance(size, int)
            else graph.call_function(operator.mul, (step, size))
        )
    return found


def _as(user: Node, operand: Node, dtype: torch.dtype) -> Node:
    """The operand in the type of the result: autocast converts it."""
    spec: TensorSpec = operand.meta["val"]
    return operand if spec.dtype == dtype else user.graph.call_method("to", (operand, dtype))
