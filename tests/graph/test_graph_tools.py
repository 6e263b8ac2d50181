"""Verifiers, the pass runner, op facts and lazily written graph modules."""

from __future__ import annotations

import operator

import pytest
import torch

from dynamotor.base.config import config
from dynamotor.base.errors import InternalError
from dynamotor.base.events import collect
from dynamotor.graph.module import graph_module
from dynamotor.graph.op_facts import facts
from dynamotor.graph.pass_manager import program_text, run_passes
from dynamotor.graph.result_strides import is_dense, iterated_stride, preserved_stride, suggests_channels_last
from dynamotor.graph.spec import TensorSpec
from dynamotor.graph.verify_graph import verify_aten_graph, verify_torch_graph

aten = torch.ops.aten
SPEC = TensorSpec.dense((2, 3), torch.float32)


def aten_graph(*steps, output=None):
    """A graph over one placeholder `x`; each step is (target, args) where an int arg in a tuple ("n", i)
    names a node.
    """
    graph = torch.fx.Graph()
    nodes = [graph.placeholder("x")]
    nodes[0].meta["val"] = SPEC
    for target, args, val in steps:
        node = graph.call_function(target, tuple(nodes[a[1]] if isinstance(a, tuple) else a for a in args))
        if val is not None:
            node.meta["val"] = val
        nodes.append(node)
    graph.output((nodes[-1],) if output is None else output)
    return graph_module(graph)


def test_a_good_aten_graph_passes():
    gm = aten_graph(
        (aten.sin.default, [("n", 0)], SPEC),
        (aten.var_mean.correction, [("n", 1), [0]], (SPEC, SPEC)),
        (operator.getitem, [("n", 2), 1], SPEC),
        (aten.copy_.default, [("n", 0), ("n", 3)], SPEC),
    )
    verify_aten_graph(gm)


@pytest.mark.parametrize(
    "steps, match",
    [
        ([(aten.sin.default, [("n", 0)], None)], "meta"),
        ([(aten.sin_.default, [("n", 0)], SPEC)], "writes"),
        ([(torch.sin, [("n", 0)], SPEC)], "OpOverload"),
        ([(aten.copy_.default, [("n", 0), ("n", 0)], SPEC), (aten.sin.default, [("n", 0)], SPEC)], "copy_"),
        (
            [
                (aten.var_mean.correction, [("n", 0), [0]], (SPEC, None)),
                (operator.getitem, [("n", 1), 1], SPEC),
            ],
            "getitem",
        ),
    ],
)
def test_bad_aten_graphs_are_named(steps, match):
    with pytest.raises(InternalError, match=match) as caught:
        verify_aten_graph(aten_graph(*steps))
    assert caught.value.code == "DM902"


def test_torch_graphs_hold_no_modules_or_attributes():
    graph = torch.fx.Graph()
    graph.output((graph.get_attr("weight"),))
    with pytest.raises(InternalError, match="get_attr"):
        verify_torch_graph(graph_module(graph, root=torch.nn.Linear(2, 2)))


def test_passes_run_in_order_emit_and_verify():
    gm = aten_graph((aten.sin.default, [("n", 0)], SPEC))

    def to_cos(gm):
        next(n for n in gm.graph.nodes if n.op == "call_function").target = aten.cos.default

    def breaks(gm):
        next(n for n in gm.graph.nodes if n.op == "call_function").target = aten.cos_.default

    with collect("pass") as events:
        run_passes(gm, [("to cos", to_cos)], stage="test")
    assert [e.data["name"] for e in events] == ["to cos"]
    assert "sin" in events[0].data["before"] and "cos" in events[0].data["after"]
    assert torch.equal(gm(torch.ones(2, 3))[0], torch.ones(2, 3).cos())
    with config.patch(verify=True), pytest.raises(InternalError):
        run_passes(gm, [("breaks", breaks)], stage="test", verify=verify_aten_graph)


def test_graph_modules_write_their_code_when_run():
    gm = aten_graph((aten.sin.default, [("n", 0)], SPEC))
    assert "aten.sin" in program_text(gm)
    assert torch.equal(gm(torch.ones(2, 3))[0], torch.ones(2, 3).sin())


def test_facts_know_every_argument_that_a_schema_says_is_written():
    names = [name[6:] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    for packet, _, overload in (name.partition(".") for name in names):
        if func := getattr(getattr(aten, packet, None), overload or "default", None):
            arguments = enumerate(func._schema.arguments)
            written = [(i, a) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]
            assert set(facts(func).writes) >= {a.name if a.kwarg_only else i for i, a in written}, func
    assert facts(aten._foreach_add_.List).writes == (0,)


def test_facts():
    assert facts(aten.add_.Tensor).writes == (0,) and facts(aten.add_.Tensor).returns == (0,)
    assert facts(aten.add.out).writes == ("out",)
    assert (
        facts(aten.view.default).is_view
        and facts(aten.split.Tensor).is_view
        and not facts(aten.clone.default).is_view
    )
    assert facts(aten.bernoulli.default).random and not facts(aten.sin.default).random
    assert (
        facts(aten.sin.default).pointwise
        and facts(aten.hardswish.default).pointwise
        and not facts(aten.mm.default).pointwise
    )
    assert facts(aten.unsqueeze_.default).changes_metadata and facts(aten.nonzero.default).data_dependent


def test_layouts():
    dense = TensorSpec((2, 3), (1, 2), torch.float32)
    holes = TensorSpec((2, 3), (12, 2), torch.float32)
    assert is_dense(dense) and not is_dense(holes)
    assert preserved_stride(holes) == (3, 1) and preserved_stride(dense) == (1, 2)
    assert iterated_stride([dense, dense], (2, 3)) == (1, 2)
    x = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert suggests_channels_last(TensorSpec.of(x)) and not suggests_channels_last(
        TensorSpec.of(x.contiguous())
    )


def test_a_forward_taken_before_the_code_is_written_writes_it_once(monkeypatch):
    gm = aten_graph((aten.sin.default, [("n", 0)], SPEC))
    early, x = gm.forward, torch.ones(2, 3)
    assert torch.equal(early(x)[0], x.sin())
    next(n for n in gm.graph.nodes if n.op == "call_function").target = aten.cos.default
    with monkeypatch.context() as patched:
        patched.setattr(torch.fx.Graph, "find_nodes", None)  # the graph is not looked at again
        assert torch.equal(early(x)[0], x.sin())
    gm.recompile()
    assert torch.equal(early(x)[0], x.cos())
