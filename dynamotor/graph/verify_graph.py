"""Verifiers, one per stage: they raise InternalError for a graph that must not be.

>>> verify_aten_graph(gm)      # functional aten ops, specs everywhere, copy_ only at the end
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from ..base.compat import OpOverload
from .nodes import wrong
from .op_facts import facts
from .size_nodes import is_size
from .sizes import Size
from .spec import TensorSpec, aten


def _is_value(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_value(v) for v in value)
    return value is None or isinstance(value, (TensorSpec, Size, int, float, bool, complex))


def verify_torch_graph(gm: torch.fx.GraphModule) -> None:
    """Contract 2: placeholders, functions and methods only, a flat output. Graphs of `torch.compile`
    may have bodies of operators as attributes.
    """
    for node in gm.graph.nodes:
        body = node.op == "get_attr" and isinstance(getattr(gm, node.target, None), torch.fx.GraphModule)
        if node.op in ("get_attr", "call_module") and not body:
            wrong(node, f"{node.op} nodes are not allowed, outside tensors are placeholders", "torch")
        if node.op == "call_function" and not callable(node.target):
            wrong(node, "the target cannot be called", "torch")
        if node.op == "output" and not isinstance(node.args[0], (tuple, list)):
            wrong(node, "the output is a flat tuple", "torch")
    gm.graph.lint()


def verify_aten_graph(gm: torch.fx.GraphModule) -> None:
    """Contract 3: functional OpOverloads with specs; `copy_` into placeholders, only right before the
    output.
    """
    mutations_began = False
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            if not isinstance(node.meta.get("val"), (TensorSpec, Size)):
                wrong(node, "a placeholder has no TensorSpec (or symbol) in meta['val']")
            continue
        if node.op == "output":
            if not isinstance(node.args[0], (tuple, list)):
                wrong(node, "the output is a flat tuple")
            continue
        if node.op != "call_function":
            wrong(node, f"{node.op} nodes are not allowed")
        if node.target is aten.copy_.default and node.args[0].op == "placeholder":
            mutations_began = True
            continue
        if mutations_began:
            wrong(node, "an op follows the trailing copy_")
        if node.target is operator.getitem:
            source = node.args[0].meta["val"]
            if not isinstance(source, tuple) or node.meta.get("val") != source[node.args[1]]:
                wrong(node, "getitem's spec is not the one that the op gives")
            continue
        if is_size(node):
            continue
        if not isinstance(node.target, OpOverload):
            wrong(node, "the target is not an OpOverload")
        if facts(node.target).writes and node.target is not aten.native_batch_norm.default:
            wrong(node, "the op writes its argument")
        if "val" not in node.meta or not _is_value(node.meta["val"]):
            wrong(node, f"meta['val'] is {node.meta.get('val')!r}")
    gm.graph.lint()
