"""Programs whose inputs and outputs are wrapper subclasses: inner tensors in the graphs, wrappers in autograd."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from wrapper_classes import Pair, Quantised, parts

from dynamotor.autograd.aot import aot_compile
from dynamotor.autograd.desugar import WrapperBoundary
from dynamotor.base.config import config
from dynamotor.graph.spec import TensorSpec
from dynamotor.graph.tensor_subclass import WrapperSpec, flatten

aten = torch.ops.aten


def pair(*shape, graded=False):
    return Pair(torch.randn(*shape), torch.randn(*shape)).requires_grad_(graded)


def compiled(fn, *inputs):
    """The program, and its graphs by kind."""
    gm, graphs = fx.symbolic_trace(fn), {}
    output = gm.graph.output_node()
    if not isinstance(output.args[0], tuple):
        output.args = ((output.args[0],),)
    gm.recompile()

    def compile_graph(graph, info):
        graphs[info.kind] = graph
        return graph.forward

    return aot_compile(gm, list(inputs), compile_graph), graphs


@pytest.fixture(autouse=True)
def _strict(monkeypatch):
    monkeypatch.setattr(config, "strict", True)


def test_inner_tensors_are_the_inputs_and_outputs():
    x, y = pair(2, 3), pair(2, 3)
    call, graphs = compiled(lambda x, y: (x * y, x), x, y)
    (result, same), graph = call(x, y), graphs["inference"].graph
    assert same is x
    assert type(result) is Pair
    assert len([n for n in graph.nodes if n.op == "placeholder"]) == 4
    assert len(graph.output_node().args[0]) == 2
    torch.testing.assert_close(result.b, x.b * y.b)


def test_one_wrapper_returned_twice_is_one_object():
    x = pair(2, 3)
    gm = fx.Graph()
    node = gm.call_function(torch.mul, (gm.placeholder("x"), 2))
    gm.output((node, node))
    first, second = aot_compile(fx.GraphModule({}, gm), [x], lambda graph, info: graph.forward)(x)
    assert first is second


def test_the_backward_runs_below_the_wrapper():
    """Rounding inside a wrapper has no gradient of its own: the op on the wrapper does."""
    x = torch.randn(2, 4, requires_grad=True)
    weight = Quantised.of(torch.randn(3, 4))
    call, graphs = compiled(lambda x, w: torch.nn.functional.linear(x, w), x, weight)
    (result,) = call(x, weight)
    result.sum().backward()
    torch.testing.assert_close(x.grad, weight.plain().sum(0).expand(2, 4))
    assert graphs.keys() == {"forward", "backward"}


def test_a_gradient_of_another_class_than_the_input():
    x, weight = torch.randn(2, 4), Quantised.of(torch.randn(3, 4))
    weight.requires_grad_()
    call, _ = compiled(lambda x, w: torch.nn.functional.linear(x, w), x, weight)
    call(x, weight)[0].sum().backward()
    assert type(weight.grad) is torch.Tensor
    torch.testing.assert_close(weight.grad, x.sum(0).expand(3, 4))


def test_a_tangent_that_does_not_arrive():
    x = pair(2, 3, graded=True)
    call, _ = compiled(lambda x: (x * 2, x * 3), x)
    first, second = call(x)
    second.sum().backward()
    torch.testing.assert_close(x.grad.a, torch.full((2, 3), 3.0))


def test_a_tangent_of_another_class_is_refused():
    x = pair(2, 3, graded=True)
    call, _ = compiled(lambda x: (x * 2,), x)
    with pytest.raises(Exception, match="DM263.*gradient of a Pair is a Tensor"):
        call(x)[0].backward(torch.ones(2, 3))


def test_a_write_reaches_the_inner_tensors():
    x, inner = pair(2, 3), None
    inner = x.a
    before = inner.clone()
    call, graphs = compiled(lambda x: (x.add_(1),), x)
    (result,) = call(x)
    assert result is x
    assert x.a is inner
    torch.testing.assert_close(inner, before + 1)
    assert [n.target for n in graphs["inference"].graph.nodes].count(aten.copy_.default) == 2


def test_a_lost_inner_tensor_is_noticed():
    """A boundary that mixes inner tensors up gives another result: the fuzzer's planted fault."""
    x = pair(2, 3)
    spec = WrapperSpec.of(x)
    assert spec.names == ("a", "b")
    assert spec.leaves() == [TensorSpec.of(x.a), TensorSpec.of(x.b)]
    assert flatten(spec.wrap(flatten(x))) == [x.a, x.b]
    boundary = WrapperBoundary((spec, None), {})
    assert [id(leaf) for leaf in boundary.flat((x, x.a))] == [id(x.a), id(x.b), id(x.a)]
    assert boundary.static(frozenset((0,))) == {0, 1}
    assert len(parts(x)) == 2
