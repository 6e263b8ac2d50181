"""Tensors of wrapper subclasses among the inputs of a graph (frozen quantised weights, jagged batches): the
graph takes the tensors inside of them, and wraps them itself.

>>> gm, flat = with_plain_inputs(gm, [x, quantised])
>>> flat([x, quantised])           # [x, values, scale]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..graph.module import copied, graph_module
from ..graph.shape_tensor import ShapeTensor, recording
from ..graph.spec import TensorSpec
from ..graph.tensor_subclass import WrapperSpec, flatten, flatten_all, is_wrapper
from .aten_recorder import GraphRecorder
from .desugar import same_leaves
from .joint import run_torch_graph

Flatten = Callable[[Sequence[Any]], list[Any]]


class Wrap:
    """A node's target: a wrapper around its inner tensors."""

    def __init__(self, spec: WrapperSpec) -> None:
        self.spec = spec
        self.__name__ = self.__qualname__ = f"wrap_{spec.cls.__name__}"

    def __call__(self, *leaves: torch.Tensor) -> Any:
        with torch.no_grad():
            return self.spec.wrap(leaves)


def with_plain_inputs(gm: fx.GraphModule, examples: Sequence[Any]) -> tuple[fx.GraphModule, Flatten | None]:
    """The graph over plain inputs, and how to take a call's inputs apart; the same graph and None where no
    input is a wrapper, or one of them wants a gradient itself.
    """
    wrappers = [x for x in examples if is_wrapper(x)]
    if not wrappers or any(x.requires_grad for x in wrappers):
        return gm, None
    graph, given = fx.Graph(), [node for node in gm.graph.nodes if node.op == "placeholder"]
    old = gm.meta.get("static_inputs", frozenset())
    leaves: list[fx.Node] = []
    parts: list[list[fx.Node]] = []
    static: set[int] = set()
    for i, (node, example) in enumerate(zip(given, examples, strict=True)):
        count = len(flatten(example))
        static.update(range(len(leaves), len(leaves) + count) if i in old else ())
        names = [f"{node.name}_{k}" for k in range(count)] if is_wrapper(example) else [node.name]
        parts.append([graph.placeholder(name) for name in names])
        leaves += parts[-1]
    same = same_leaves(examples)
    first = {leaf: leaves[same.get(k, k)] for k, leaf in enumerate(leaves)}
    known = {}
    for node, example, own in zip(given, examples, parts, strict=True):
        known[node] = own[0]
        own[0].meta = dict(node.meta)
        if is_wrapper(example):
            inside = tuple([first[leaf] for leaf in own])
            known[node] = graph.call_function(Wrap(WrapperSpec.of(example)), inside)
    copied(graph, (), [node for node in gm.graph.nodes if node.op != "placeholder"], known)
    plain = graph_module(graph, type(gm).__name__, gm)
    plain.meta = {**gm.meta, "static_inputs": frozenset(static)}
    return plain, flatten_all


def as_aten_graph(gm: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> fx.GraphModule | None:
    """A graph over plain inputs as one of the ops that it consists of, in which no wrapper is made; None for
    one that writes an input, holds tensors as constants, or gives something else than plain tensors.
    """
    recorder = GraphRecorder()
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    given = [recorder.input(name, TensorSpec.of(x)) for name, x in zip(names, inputs, strict=True)]
    with recording(recorder), torch.no_grad():
        results = run_torch_graph(gm, recorder, given)
        if recorder.constants or any(x._version for x in given):
            return None
        if not all(type(result) is ShapeTensor for result in results):
            return None
        recorder.graph.output(tuple([recorder.node_of(result) for result in results]))
    found = graph_module(recorder.graph, type(gm).__name__)
    found.meta = dict(gm.meta)
    return found
