"""Compiled functions called under torch.compile and under compiled autograd: torch.compile sees none of our
frames.
"""

from __future__ import annotations

import ctypes
import math
import threading

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

import dynamotor
from dynamotor.base.events import counters
from dynamotor.graph.shape_tensor import ShapeTensor
from dynamotor.torch_compile_adapter import dynamotor_backend


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


x = torch.randn(2, 3)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_under_torch_compile(backend):
    inner = dynamotor.compile(lambda x: (x * 2 + 1).relu())
    module = dynamotor.compile(nn.Linear(3, 3))

    def outer(x):
        return module(inner(x).sin()).sum()

    mine, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    for _ in range(2):
        torch.compile(outer, backend=backend)(mine).backward()
        module._orig_mod((plain * 2 + 1).relu().sin()).sum().backward()
    torch.testing.assert_close(mine.grad, plain.grad)
    assert (
        not inner.entries
    )  # torch.compile traces a compiled function as it does its own; a module runs as compiled


def test_torch_compile_of_a_compiled_module():
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    torch.testing.assert_close(torch.compile(dynamotor.compile(module), backend="eager")(x), module(x))


def test_a_break_inside_goes_on_under_torch_compile():
    def breaks(x):
        x = x + 1
        print(end="")
        return helper(x)

    def helper(x):
        return x * 3

    compiled = dynamotor.compile(breaks)
    frames = []

    def counting(gm, inputs):
        frames.append(gm)
        return gm.forward

    torch.compile(lambda x: compiled(x.cos()).sin(), backend=counting)(x)
    outside = torch.compile(lambda x: x.tan(), backend=counting)
    before = len(frames)
    torch.testing.assert_close(outside(x), x.tan())
    assert len(frames) == before + 1  # torch.compile's own frame hook is still there


def test_a_function_of_torch_compile_is_captured_as_what_it_was():
    inner = torch.compile(lambda x: x.cos() * 2, backend="eager", fullgraph=True)
    compiled = dynamotor.compile(lambda x: inner(x + 1).sin(), fullgraph=True)
    torch.testing.assert_close(compiled(x), ((x + 1).cos() * 2).sin())


def test_a_break_while_another_thread_is_in_torch_compile():
    """torch.compile's frame hook is on then; used again inside of ours, it took ours for the one below it, each
    handed frames to the other, and the call did not end."""
    inside, leave = threading.Event(), threading.Event()

    def waits(x):
        torch._dynamo.graph_break()
        inside.set()
        leave.wait(60)
        return x

    inner = torch.compile(lambda x: x * 2, backend="eager")
    call = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(lambda x: inner(x))  # breaks the graph

    def outer(x):
        y = x + 1
        return call(y) + y.sin()

    thread = threading.Thread(target=torch.compile(waits, backend="eager"), args=(x,))
    thread.start()
    try:
        assert inside.wait(60)
        torch.testing.assert_close(dynamotor.compile(outer)(x), (x + 1) * 2 + (x + 1).sin())
    finally:
        leave.set()
        thread.join()


def test_under_compiled_autograd():
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    compiled = dynamotor.compile(module)
    for _ in range(2):
        module.zero_grad()
        with compiled_autograd._enable(lambda gm: torch.compile(gm, backend="eager")):
            compiled(x).sum().backward()
        grads = [p.grad for p in module.parameters()]
        module.zero_grad()
        module(x).sum().backward()
        torch.testing.assert_close(grads, [p.grad for p in module.parameters()])


@pytest.mark.slow
def test_several_nodes_under_compiled_autograd():
    def fn(x, memory, w):
        a, b = x @ w, memory @ w.T
        return (a * b).sin(), a.exp(), b.cos()

    compiled, found = dynamotor.compile(fn, backend="aot_eager"), []
    for run in (fn, compiled):
        leaves = [torch.linspace(-1, n, 9).double().view(3, 3).requires_grad_() for n in (1, 2, 3)]
        inputs = leaves[0] * 2, leaves[1].sin(), leaves[2]
        with compiled_autograd._enable(lambda gm: torch.compile(gm, backend="eager")):
            sum(out.sum() for out in run(*inputs)).backward()
        found.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(found[1], found[0])


def _of_sizes(x, w):
    y = x.view(x.shape[0] // 2, -1).sin()
    return (y.sum(1) * x.shape[0]).sum() + torch.cat([x @ w, x @ w + x.size(0)]).cos().sum()


def test_the_backend_compiles_torch_compiles_graphs_with_symbols():
    counters.clear()
    compiled = torch.compile(_of_sizes, backend=dynamotor_backend, dynamic=True)
    w = torch.randn(3, 4).double()
    for n in (6, 8, 10, 40):
        found = []
        for run in (_of_sizes, compiled):
            mine = torch.linspace(-1, 1, n * 3).double().view(n, 3).requires_grad_()
            result = run(mine, w)
            found.append((result.detach(), *torch.autograd.grad(result, mine)))
        torch.testing.assert_close(found[1], found[0])
    assert counters["frames"]["parts compiled"] == 1 and not counters["fallback"]


@pytest.mark.regression
@pytest.mark.parametrize("options", [{}, {"dynamic": True}], ids=["automatic", "dynamic"])
def test_sizes_that_torch_compile_finds_equal_are_one_symbol(options):
    """Both arrive as inputs, of one name."""

    def written(cache, x, at):
        cache.index_copy_(1, at, x)
        return cache.sum(1) * x.shape[1] + at.sum() * at.shape[0]

    counters.clear()
    compiled = torch.compile(written, backend=dynamotor_backend, **options)
    ours, eager = torch.zeros(2, 16, 3), torch.zeros(2, 16, 3)
    for n in (5, 7, 3, 9):
        x, at = torch.randn(2, n, 3), torch.arange(n) + 2
        torch.testing.assert_close(compiled(ours, x, at), written(eager, x, at))
        torch.testing.assert_close(ours, eager)
    assert not counters["fallback"]


@pytest.mark.regression
def test_floats_that_differ_between_calls_of_torch_compile_stay_compiled():
    """They arrive in tensors of which the graph asks for the number."""

    def scaled(x, temperature, k):
        y = (x / temperature).add(x.sum(-1, keepdim=True), alpha=temperature)
        return y.clamp(max=temperature + 1).softmax(-1) * k

    counters.clear()
    compiled = torch.compile(scaled, backend=dynamotor_backend)
    for i in range(6):
        mine = torch.randn(3 + i, 4, dtype=torch.float64, requires_grad=True)
        plain = mine.detach().clone().requires_grad_()
        found, expected = (run(t, 0.5 + i, i + 2) for run, t in ((compiled, mine), (scaled, plain)))
        found.square().sum().backward(), expected.square().sum().backward()
        torch.testing.assert_close((found, mine.grad), (expected, plain.grad))
    assert not counters["fallback"] and counters["frames"]["captured"] <= 3


@pytest.mark.regression
def test_floats_of_sizes_around_a_size_that_data_decides():
    """The graph is cut there: the trial that looks for the place calculates with the sizes."""

    def scored(x, power):
        n = x.shape[0]
        kept = x[x > 0].sum() / ((5 + n) / 6) ** power
        return kept * (round(n * 0.7) + n**0.5 + math.cos(n) + math.floor(n / 2) + 2 ** (n / 4))

    compiled = torch.compile(scored, backend=dynamotor_backend)
    for n in (3, 5, 6, 9):
        x = torch.randn(n, dtype=torch.float64)
        for power in (1.0, 0.6):
            torch.testing.assert_close(compiled(x, power), scored(x, power))


@pytest.mark.regression
def test_batches_of_jagged_tensors_that_differ_in_rows_and_lengths():
    """Inputs of torch.compile's second graph: PyTorch marks the sizes of their inner tensors as open."""
    w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)

    def layer(x, k):
        return torch.nn.functional.layer_norm(x @ w, (4,)).relu() * (k * x.shape[0])

    compiled = torch.compile(layer, backend=dynamotor_backend)
    for lengths in ((3, 5, 2), (4, 1, 6), (2, 2), (7, 1, 1, 1), (3, 5)):
        rows = [torch.randn(n, 4, dtype=torch.float64) for n in lengths]
        x = torch.nested.nested_tensor(rows, layout=torch.jagged)
        found = [run(x, len(lengths) + 0.5).values() for run in (compiled, layer)]
        torch.testing.assert_close(*found)
        torch.testing.assert_close(*(torch.autograd.grad(r.square().sum(), w)[0] for r in found))


def test_a_layer_with_a_float_of_its_own_is_compiled_with_dynamic_sizes():
    table = nn.Embedding(11, 4)
    counters.clear()
    compiled = torch.compile(lambda ids: table(ids).sin(), backend=dynamotor_backend, dynamic=True)
    for n in (3, 5, 7):
        ids = torch.randint(0, 11, (2, n))
        torch.testing.assert_close(compiled(ids), table(ids).sin())
    assert not counters["fallback"]


def _checkpointed(x, w):
    return checkpoint(lambda x: (x @ w).sin().exp(), x, use_reentrant=False) * 2


def _branched(x, w):
    return torch.cond(x.sum() > 0, lambda x: (x @ w).sin(), lambda x: x * w.sum() - 1, (x,))


def _looped(x, w):
    with torch.no_grad():
        _, y = while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, (x @ w).sin()), (torch.tensor(0), x))
    return y * x + w


@pytest.mark.regression
@pytest.mark.parametrize("program", [_checkpointed, _branched, _looped])
def test_functions_that_take_functions_stay_compiled(program):
    """Their bodies are modules in a graph of torch.compile's."""
    counters.clear()
    compiled = torch.compile(program, backend=dynamotor_backend)
    for n, sign in ((4, 1), (4, -1), (4, 1)):
        found = []
        for run in (program, compiled):
            torch.manual_seed(n + sign)
            x, w = torch.rand(n, 4, dtype=torch.float64) * sign, torch.randn(4, 4, dtype=torch.float64)
            x, w = x.requires_grad_(), w.requires_grad_()
            out = run(x, w)
            out.square().sum().backward()
            found.append([out, x.grad, w.grad])
        torch.testing.assert_close(found[1], found[0])
    assert not counters["fallback"] and not counters["breaks"]


def _cannot_be_traced(x):
    if isinstance(torch._C._functorch.get_unwrapped(x), ShapeTensor):
        raise RuntimeError("no data")
    return x.sin()


def _with_levels():
    """A graph as torch.compile writes it begins and ends the level of a `vmap` by itself."""
    graph, functorch = torch.fx.Graph(), torch._C._functorch
    x = graph.call_method("cos", (graph.placeholder("x"),))
    level = graph.call_function(functorch._vmap_increment_nesting, (2, "error"))
    one = graph.call_method("mul", (graph.call_function(functorch._add_batch_dim, (x, 0, level)), 2))
    y = graph.call_function(_cannot_be_traced, (one,))
    y = graph.call_function(functorch._remove_batch_dim, (y, level, 2, 0))
    graph.call_function(functorch._vmap_decrement_nesting)
    graph.output((graph.call_method("exp", (y,)),))
    return torch.fx.GraphModule({}, graph)


@pytest.mark.regression
def test_a_trace_that_ends_inside_a_transform_leaves_it():
    counters.clear()
    (found,) = dynamotor_backend(_with_levels(), [x])(x)
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0
    torch.testing.assert_close(found, (x.cos() * 2).sin().exp())
    assert type(found) is torch.Tensor and counters["fallback"]


@pytest.mark.regression
@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_a_number_that_the_graph_asks_for_leaves_the_rest_compiled():
    def program(x, n):
        return ((x @ x.T).sin() * n.item()).exp()

    counters.clear()
    compiled = torch.compile(program, backend=dynamotor_backend)
    for n in (2, 3, 4):
        torch.testing.assert_close(compiled(x, torch.tensor(n)), program(x, torch.tensor(n)))
    assert not counters["fallback"]
