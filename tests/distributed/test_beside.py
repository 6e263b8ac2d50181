"""Products that nothing waits for run while a collective is on its way, as many as its time takes."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from dynamotor.distributed.beside import run_beside
from dynamotor.graph.spec import TensorSpec

aten, ops = torch.ops.aten, torch.ops._c10d_functional


class Graph:
    """A graph with the specs of its nodes."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def input(self, name: str, *shape: int) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = TensorSpec.dense(shape, torch.bfloat16)
        return node

    def call(self, op: object, *args: object, shape: tuple[int, ...]) -> fx.Node:
        node = self.graph.call_function(op, args)  # type: ignore[arg-type]
        node.meta["val"] = TensorSpec.dense(shape, torch.bfloat16)
        return node


def scattered(rows: int, width: int) -> tuple[fx.Graph, dict[str, fx.Node]]:
    """A backward: gradients of three weights, and of the activations, which are scattered."""
    g = Graph()
    x, dy, w = g.input("x", rows, width), g.input("dy", rows, width), g.input("w", width, width)
    flat = g.call(aten.t.default, dy, shape=(width, rows))
    nodes = {name: g.call(aten.mm.default, flat, x, shape=(width, width)) for name in ("a", "b", "c")}
    nodes["a as it leaves"] = g.call(aten.t.default, nodes["a"], shape=(width, width))
    dx = g.call(aten.mm.default, dy, w, shape=(rows, width))
    start = g.call(ops.reduce_scatter_tensor.default, dx, "sum", 2, "0", shape=(rows // 2, width))
    nodes |= {"dx": dx, "start": start}
    nodes["wait"] = g.call(ops.wait_tensor.default, start, shape=(rows // 2, width))
    nodes["end"] = g.call(aten.mul.Tensor, nodes["wait"], nodes["c"], shape=(rows // 2, width))
    g.graph.output((nodes["a as it leaves"], nodes["b"], nodes["end"]))
    return g.graph, nodes


@pytest.mark.parametrize(
    "rows, width, order",
    [
        # All are quick: they go, the nearest first, and with each the views of it.
        (64, 32, ["dx", "start", "c", "b", "a", "a as it leaves", "wait", "end"]),
        # One takes as long as the collective.
        (4096, 8192, ["a", "b", "a as it leaves", "dx", "start", "c", "wait", "end"]),
    ],
)
def test_weights_gradients_run_while_activations_gradients_are_on_their_way(
    rows: int, width: int, order: list[str]
) -> None:
    graph, nodes = scattered(rows, width)
    run_beside(graph)
    graph.lint()
    names = {node: name for name, node in nodes.items()}
    assert [names[node] for node in graph.nodes if node in names] == order


def test_a_product_that_something_before_the_wait_reads_stays() -> None:
    g = Graph()
    x, w = g.input("x", 64, 32), g.input("w", 32, 32)
    product = g.call(aten.mm.default, x, w, shape=(64, 32))
    read = g.call(aten.relu.default, product, shape=(64, 32))
    start = g.call(ops.all_gather_into_tensor.default, x, 2, "0", shape=(128, 32))
    wait = g.call(ops.wait_tensor.default, start, shape=(128, 32))
    g.graph.output((product, read, wait))
    before = list(g.graph.nodes)
    run_beside(g.graph)
    assert list(g.graph.nodes) == before


def test_a_product_crosses_two_waits_at_most() -> None:
    g = Graph()
    x, w = g.input("x", 64, 32), g.input("w", 32, 32)
    first = g.call(aten.mm.default, x, w, shape=(64, 32))
    waits = []
    for _ in range(4):
        waits.append(g.call(ops.wait_tensor.default, x, shape=(64, 32)))  # of a message from elsewhere
    start = g.call(ops.all_gather_into_tensor.default, waits[-1], 2, "0", shape=(128, 32))
    last = g.call(ops.wait_tensor.default, start, shape=(128, 32))
    g.graph.output((first, last))
    run_beside(g.graph)
    assert list(g.graph.nodes).index(first) < list(g.graph.nodes).index(waits[0])
