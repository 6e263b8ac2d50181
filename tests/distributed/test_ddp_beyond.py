"""Beyond DDP: ZeroRedundancyOptimizer, FSDP2, and functional collectives inside compiled functions."""

from __future__ import annotations

import operator

import ddp_beyond
import pytest
import torch
from ranks import Pair
from torch import fx

from dynamotor.distributed.collectives import hoist_starts, sink_waits

ops = torch.ops._c10d_functional


@pytest.mark.slow
def test_a_sharded_optimizer_over_compiled_ddp(pair: Pair) -> None:
    for result in pair.run(ddp_beyond.zero):
        assert result["difference"] <= 1e-9 and result["modes"] == {"ingraph": 1}, result


@pytest.mark.slow
def test_fsdp_trains_compiled(pair: Pair) -> None:
    for result in pair.run(ddp_beyond.fsdp):
        assert result["difference"] <= 1e-6 and result["graphs"] > 0 and not result["failed"], result


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "native"])
def test_functional_collectives_stay_in_the_graph(pair: Pair, backend: str) -> None:
    for result in pair.run(ddp_beyond.collectives, "every", backend):
        assert max(result["value"], result["quiet"], result["gradient"]) <= 1e-9 and not result["breaks"], (
            result
        )
        if backend == "native":
            forward = result["graphs"]["forward"]
            kinds = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
            starts = [n for n in forward if n in kinds]
            assert starts == [
                "all_reduce",
                "all_gather_into_tensor",
                "all_gather_into_tensor",
                "reduce_scatter_tensor",
                "all_to_all_single",
            ]
            between = forward[forward.index("all_reduce") : forward.index("wait_tensor")]
            assert "mm" in between  # the product beside runs while the sum is on its way


def test_a_collective_whose_result_nobody_uses_is_kept(pair: Pair) -> None:
    for result in pair.run(ddp_beyond.collectives, "unused", "native"):
        assert result["value"] <= 1e-9 and "all_reduce" in result["graphs"]["forward"], result


def test_messages_stay_as_they_were_sent_while_more_is_computed(pair: Pair) -> None:
    for result in pair.run(ddp_beyond.collectives, "long", "native"):
        assert max(result["value"], result["quiet"], result["gradient"]) <= 1e-9, result
        starts = [
            n for n in result["graphs"]["forward"] if n in ("all_gather_into_tensor", "reduce_scatter_tensor")
        ]
        assert len(starts) == 2, result


def graph_of_starts() -> tuple[fx.Graph, dict[str, fx.Node]]:
    graph = fx.Graph()
    x = graph.placeholder("x")
    nodes = {"a": graph.call_function(torch.ops.aten.relu.default, (x,))}
    nodes["b"] = graph.call_function(torch.ops.aten.exp.default, (x,))
    nodes["first"] = graph.call_function(ops.all_reduce.default, (nodes["b"], "sum", "0"))
    nodes["first wait"] = graph.call_function(ops.wait_tensor.default, (nodes["first"],))
    nodes["c"] = graph.call_function(torch.ops.aten.cos.default, (nodes["a"],))
    nodes["second"] = graph.call_function(ops.all_reduce.default, (nodes["a"], "sum", "0"))
    nodes["second wait"] = graph.call_function(ops.wait_tensor.default, (nodes["second"],))
    nodes["d"] = graph.call_function(operator.add, (nodes["first wait"], nodes["c"]))
    graph.output((nodes["d"], nodes["second wait"]))
    return graph, nodes


def test_starts_move_up_in_their_order_and_waits_down() -> None:
    graph, nodes = graph_of_starts()
    hoist_starts(graph)
    sink_waits(graph)
    graph.lint()
    names = {node: name for name, node in nodes.items()}
    assert [names[n] for n in graph.nodes if n in names] == [
        "a",
        "b",
        "first",
        "second",
        "c",
        "first wait",
        "d",
        "second wait",
    ]


def test_a_wait_stays_on_its_side_of_no_grad() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    wait = graph.call_function(
        ops.wait_tensor.default, (graph.call_function(ops.all_reduce.default, (x, "sum", "0")),)
    )
    off = graph.call_function(torch._C._set_grad_enabled, (False,))
    graph.output((graph.call_function(torch.relu, (wait,)),))
    sink_waits(graph)
    order = list(graph.nodes)
    assert order.index(wait) < order.index(off)
