"""Attention of a few queries becomes `dynamotor::attend`, which reads a cache once, where it is filled.

    _scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask)[0]     # q: one row a head
    attend(q, k, v, mask, scale, stride)

A library's kernel gives each block of queries to one thread and goes through all keys, also those that the
mask excludes: most of a static cache. Here a block of keys that the mask excludes for every row is not read,
and several threads (or programs of a GPU) share a head's keys.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from ..base.config import config
from ..graph.nodes import arguments_of, find_spec, overload, spec_of, take_place
from ..graph.shapes import call
from ..graph.spec import GraphInfo, TensorSpec, aten

MOST_ROWS = {"cpu": 8, "cuda": 16}  # of queries that share a head's keys; more are work for a matrix product
MOST_WIDTH = 256
_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_FLASH = aten._scaled_dot_product_flash_attention.default
_MASKS = {  # the name of the mask's argument, by aten's op
    _FLASH: None,
    aten._scaled_dot_product_flash_attention_for_cpu.default: "attn_mask",
    aten._scaled_dot_product_efficient_attention.default: "attn_bias",
    aten._scaled_dot_product_cudnn_attention.default: "attn_bias",
}


def attend_few_queries(gm: fx.GraphModule, info: GraphInfo) -> None:
    """aten's attention of a few rows, whose sums no backward reads → attend."""
    if config.exact:
        return
    for node in [node for node in gm.graph.nodes if node.target in _MASKS]:
        result = _result_alone(node)
        if result is None:
            continue
        given = arguments_of(node)
        q, k, v = (given[name] for name in ("query", "key", "value"))
        name = _MASKS[overload(node)]
        mask = given[name] if name else None
        if given["dropout_p"] or given["is_causal"] or not _fits(q, k, v, mask):
            continue
        if node.target is _FLASH and spec_of(q).shape[1:3] == (spec_of(k).shape[1], 1):
            continue  # for one row it shares a head's keys itself
        scale = given["scale"] if given["scale"] is not None else spec_of(q).shape[-1] ** -0.5
        with gm.graph.inserting_before(node):
            found = _attend(gm.graph, q, k, v, mask, float(scale), spec_of(result))
        take_place(found, result)
        gm.graph.erase_node(node)


def _attend(
    graph: fx.Graph, q: fx.Node, k: fx.Node, v: fx.Node, mask: fx.Node | None, scale: float, spec: TensorSpec
) -> fx.Node:
    """The call; heads of queries that share a head of keys are its rows."""
    op, (batch, heads, _, width) = torch.ops.dynamotor.attend.default, spec.shape
    kept, stride = spec_of(k).shape[1], spec.stride
    if heads == kept:
        return call(graph, op, q, k, v, mask, scale, list(stride))
    groups = heads // kept
    rows = call(graph, aten.view.default, q, [batch, kept, groups, spec_of(q).shape[3]])
    grouped = [stride[0], groups * stride[1], stride[1], stride[3]]
    return call(
        graph, aten.view.default, call(graph, op, rows, k, v, mask, scale, grouped), [batch, heads, 1, width]
    )


def _result_alone(node: fx.Node) -> fx.Node | None:
    """The first result, if nothing reads another one."""
    users = list(node.users)
    if len(users) != 1 or users[0].target is not operator.getitem or users[0].args[1] != 0:
        return None
    return users[0]


def _fits(q: fx.Node, k: fx.Node, v: fx.Node, mask: fx.Node | None) -> bool:
    query, key, value = specs = [spec_of(node) for node in (q, k, v)]
    rows, widths = query.shape[2], (query.shape[3], value.shape[3])
    if any(type(n) is not int or n % 8 or not 0 < n <= MOST_WIDTH for n in widths) or type(rows) is not int:
        return False
    heads, kept = query.shape[1], key.shape[1]
    if heads != kept:  # grouped: of one row each, under a mask of all heads
        if type(heads) is not int or type(kept) is not int or kept < 1 or heads % kept or rows != 1:
            return False
        if mask is not None and spec_of(mask).shape[1:2] != (1,):
            return False
        rows = heads // kept
    return (
        0 < rows <= MOST_ROWS.get(query.device.type, 0)
        and query.dtype in _TYPES
        and {spec.dtype for spec in specs} == {query.dtype}
        and all(spec.stride[3] == 1 and spec.shape[:2] == (query.shape[0], kept) for spec in (key, value))
        and (mask is None or _is_mask(find_spec(mask), query))
    )


def _is_mask(mask: TensorSpec | None, query: TensorSpec) -> bool:
    return mask is not None and mask.dtype in (query.dtype, torch.float32) and len(mask.shape) == 4
