"""Wrapper tensor subclasses in captured programs: one graph, eager's classes, numbers and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from wrapper_classes import Pair, Quantised, Unwrapped, parts

import dynamotor
from dynamotor.base.config import config
from dynamotor.base.events import counters

F = nn.functional


@pytest.fixture(autouse=True)
def _strict(monkeypatch):
    """A graph that is left to eager PyTorch is an error."""
    monkeypatch.setattr(config, "strict", True)
    dynamotor.reset()


def plain(*shape):
    return torch.randn(*shape or (3, 4), dtype=torch.float64)


def pair(*shape, graded=False):
    return Pair(plain(*shape), plain(*shape)).requires_grad_(graded)


def nested(graded=False):
    return Pair(pair(), pair()).requires_grad_(graded)


def assert_same(want, got):
    """Equal values, of equal classes, with equal inner tensors."""
    assert type(got) is type(want)
    if isinstance(want, list | tuple):
        for one, other in zip(want, got, strict=True):
            assert_same(one, other)
    elif isinstance(want, torch.Tensor):
        assert got.requires_grad == want.requires_grad
        assert got.shape == want.shape
        for one, other in zip(parts(want), parts(got), strict=True):
            assert one.stride() == other.stride()
            torch.testing.assert_close(one, other)
    else:
        assert want == got


def assert_one_graph(fn, make, graphs=1):
    """Two calls of the compiled function are eager's, in one graph; gradients and written arguments too."""
    compiled = dynamotor.compile(fn, fullgraph=True)
    before = counters["capture"]["graphs"]
    for seed in range(2):
        torch.manual_seed(seed)
        given = make()
        torch.manual_seed(seed)
        twins = make()
        want, got = fn(*given), compiled(*twins)
        assert_same(want, got)
        for result in (want, got):
            results = result if isinstance(result, tuple) else (result,)
            graded = [t.sum() for t in results if isinstance(t, torch.Tensor) and t.requires_grad]
            if graded:
                torch.autograd.backward(graded)
        for one, twin in zip(given, twins):
            assert_same(one, twin)
            assert_same(getattr(one, "grad", None), getattr(twin, "grad", None))
    assert counters["capture"]["graphs"] - before == graphs


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x * 2 + 1,
        lambda x: (x + plain().mean() * 0, x.t(), x),
        lambda x: x.a + x.b,
        lambda x: ((x * 2).a, x * 3, (x * 3).b + 1),
        lambda x: x.view(-1),
        lambda x: x.chunk(2, 1)[1] + 1,
        lambda x: torch.cat([x, x * 2]),
        lambda x: x * x.shape[0] + x.dim(),
        lambda x: x * 2 if isinstance(x, Pair) and type(x) is Pair else x * 3,
        lambda x: Pair(x.b, x.a + 1),
        lambda x: Pair(x.b, x.a + 1) * x,
        lambda x: (lambda y: (y, y, y.a))(Pair(x.a + 1, x.b)),
        lambda x: (torch.zeros_like(x) + x.detach()).sum(),
        lambda x: x.add_(1),
        lambda x: x.mul_(2).sin(),
        lambda x: x.a.add_(1),
        lambda x: plain(3, 4) * 0 + 1 if x.requires_grad else 2 * x,
    ],
)
@pytest.mark.parametrize("make", [pair, nested], ids=["pair", "nested"])
def test_a_wrapper_is_one_graph(fn, make):
    assert_one_graph(fn, lambda: (make(),))


@pytest.mark.parametrize("made", [pair, nested], ids=["pair", "nested"])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: (x * y).sin(),
        lambda x, y: ((x * y).sin(), y + 1, x.detach()),
        lambda x, y: (x @ y.t()).relu(),
        lambda x, y: (x * y).sum(),
    ],
)
def test_gradients_have_eagers_class(fn, made):
    assert_one_graph(fn, lambda: (made(graded=True), made()))
    assert_one_graph(fn, lambda: (made(graded=True), plain().requires_grad_()))


def test_a_view_of_a_parameter_stays_a_view(monkeypatch):
    monkeypatch.setattr(config, "strict", False)
    compiled = dynamotor.compile(lambda x: (x.t(), x.sin() * 2))
    x = pair(graded=True)
    view, result = compiled(x)
    assert view.a.data_ptr() == x.a.data_ptr()
    assert_same((x.t(), x.sin() * 2), (view, result))
    with pytest.raises(RuntimeError, match="view of a leaf"):
        view.add_(1)
    result.sum().backward()
    assert type(x.grad) is Pair
    assert list(counters["fallback"]) == ["aot.DM264"]


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain inputs", "wrapper input"])
def test_a_wrapper_arrives_as_the_gradient_of_a_plain_result(wrapped):
    """A graph of plain tensors runs again, another one refuses: never a wrong gradient."""
    y = plain().requires_grad_()
    want = torch.autograd.grad(
        (y.sin() * pair()).sum(), y, Pair(torch.tensor(1.0), torch.tensor(2.0)).double()
    )[0]
    other = pair() if wrapped else plain()
    result = dynamotor.compile(lambda x, y: (x * 2, y.sin())[1:])(other, y)[0]
    assert type(want) is Pair
    loss = (result * pair()).sum()
    if wrapped:
        loss = (dynamotor.compile(lambda x, y: (x * y, y.sin()))(other, y)[1] * pair()).sum()
        with pytest.raises(dynamotor.DynamotorError, match="DM263"):
            loss.backward(Pair(torch.tensor(1.0), torch.tensor(2.0)).double())
    else:
        loss.backward(Pair(torch.tensor(1.0), torch.tensor(2.0)).double())
        assert type(y.grad) is Pair


class Linear(nn.Module):
    """A layer with a wrapper as its weight."""

    def __init__(self, weight, graded):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=graded)
        self.bias = nn.Parameter(plain(5))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias).tanh()


@pytest.mark.parametrize(
    "make", [pair, lambda *shape: Quantised.of(plain(*shape))], ids=["pair", "quantised"]
)
@pytest.mark.parametrize("graded", [False, True])
def test_a_wrapper_is_a_modules_weight(make, graded):
    torch.manual_seed(0)
    weight = make(5, 4)
    model, twin = Linear(weight.detach(), graded), Linear(weight.detach(), graded)
    twin.load_state_dict(model.state_dict())
    compiled = dynamotor.compile(twin, fullgraph=True)
    for _ in range(3):
        x = plain(2, 4)
        assert_same(model(x), compiled(x))
        model(x).sum().backward()
        compiled(x).sum().backward()
        assert_same(model.weight.grad, twin.weight.grad)
        assert_same(model.bias.grad, twin.bias.grad)
    assert_same(list(model.state_dict().values()), list(twin.state_dict().values()))
    assert counters["capture"]["graphs"] == 1


def test_each_context_has_a_program():
    fn = dynamotor.compile(lambda x, w: F.linear(x, w), fullgraph=True)
    x, w = plain(2, 4), plain(5, 4)
    for note in ("", "twice", "", "twice"):
        quantised = Quantised.of(w, note)
        torch.testing.assert_close(fn(x, quantised), F.linear(x, quantised))
    assert counters["capture"]["graphs"] == 2


def test_an_inner_tensor_may_be_another_one():
    fn = dynamotor.compile(lambda x: x * 2, fullgraph=True)
    x = pair()
    fn(x)
    x.a = plain()
    assert_same(x * 2, fn(x))
    x.a = x.a.float()
    x.b = x.b.float()
    assert_same(x * 2, fn(x))


def test_sizes_of_wrappers_become_symbols():
    fn = dynamotor.compile(lambda x, y: (x @ y.t()).sin() * x.shape[0], fullgraph=True)
    for n in (3, 5, 7, 9):
        x, y = pair(n, 4), pair(n, 4)
        assert_same((x @ y.t()).sin() * n, fn(x, y))
    assert counters["capture"]["graphs"] == 2


class Swaps(Pair):
    """Its in-place ops give it another inner tensor."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.add_.Tensor:
            args[0].a = args[0].a + args[1]
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_another_inner_tensor_runs_in_eager(monkeypatch):
    monkeypatch.setattr(config, "strict", False)
    x, twin = (Swaps(torch.ones(2), torch.ones(2)) for _ in range(2))
    dynamotor.compile(lambda x: x.add_(1))(x)
    twin.add_(1)
    torch.testing.assert_close(x.a, twin.a)
    assert counters["fallback"]


class Opaque(torch.Tensor):
    """Takes ops over, and does not name its inner tensors."""

    @staticmethod
    def __new__(cls, a):
        return torch.Tensor._make_wrapper_subclass(cls, a.shape)

    def __init__(self, a):
        self.inner = a

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*[a.inner if isinstance(a, cls) else a for a in args], **(kwargs or {}))


def test_a_rejection_names_the_class():
    with pytest.raises(dynamotor.CaptureError, match="Opaque is a tensor subclass.*__tensor_flatten__"):
        dynamotor.compile(lambda x: x + 1, fullgraph=True)(Opaque(plain()))


def test_torch_compile_takes_wrappers():
    weight = Quantised.of(plain(5, 4))
    fn = torch.compile(lambda x, w: F.linear(x, w).relu(), backend="dynamotor")
    x, before = plain(2, 4), counters["fallback"].copy()
    torch.testing.assert_close(fn(x, weight), F.linear(x, weight).relu())
    assert counters["fallback"] == before


def test_a_plain_view_of_a_wrapper_that_is_a_leaf_is_not_written(monkeypatch):
    monkeypatch.setattr(config, "strict", False)

    def program(x):
        y = x.t()
        y.add_(1)
        return y

    for function in (program, dynamotor.compile(program, backend="aot_eager")):
        with pytest.raises(RuntimeError, match="view of a leaf"):
            function(Unwrapped(plain()).requires_grad_())


def test_a_graph_is_cut_around_what_data_decides(monkeypatch):
    """Parts of a graph take and give wrappers, whose sizes may differ between calls."""
    monkeypatch.setattr(config, "strict", False)

    def fn(x, rows):
        y = x.sin() * x
        places = rows.nonzero()
        return (y * 2).cos() * x, places + 1

    compiled = dynamotor.compile(fn)
    before = counters["frames"]["parts compiled"]
    for size in (3, 3, 5, 6):
        x = pair(size, 4).requires_grad_()
        twin = Pair(*[part.clone() for part in parts(x)]).requires_grad_()
        rows = torch.tensor([1, 0, 2])
        want, got = fn(x, rows), compiled(twin, rows)
        assert_same(want, got)
        for result in (want, got):
            result[0].sum().backward()
        assert_same(x.grad, twin.grad)
    assert counters["frames"]["parts compiled"] > before


def test_dimensions_that_are_marked_are_symbols_where_sizes_are_numbers():
    """`mark_dynamic` of a wrapper is of the inner tensors that are as large, too."""
    compiled = dynamotor.compile(lambda x: x.sin(), fullgraph=True, dynamic=False)
    before = counters["capture"]["graphs"]
    for size, marked in ((3, True), (5, True), (6, False)):
        x = pair(size, 4)
        if marked:
            dynamotor.mark_dynamic(x, 0)
        assert_same(x.sin(), compiled(x))
    assert counters["capture"]["graphs"] - before == 1
    compiled(pair(3, 7))
    assert counters["capture"]["graphs"] - before == 2


def test_a_part_to_which_no_gradient_comes_gives_none(monkeypatch):
    monkeypatch.setattr(config, "strict", False)

    def fn(x):
        view = x.view(-1).reshape(4, 4)  # cut around: a view of an input leaves the graph
        return torch.cat([x[:2], x[2:] * 2]) @ view, view

    x = pair(4, 4).requires_grad_()
    twin = Pair(*[part.clone() for part in parts(x)]).requires_grad_()
    for one, run in ((x, fn), (twin, dynamotor.compile(fn))):
        product, view = run(one)
        torch.autograd.backward([product.sum(), view.sum()])
    assert_same(x.grad, twin.grad)


def test_an_input_that_no_result_needs_has_no_gradient():
    """One autograd function stands for all inputs; it leads from a result to those that eager's leads to."""

    def fn(x, y):
        return x * 1.5, (y * 2).detach(), x.sin()

    given = [pair(graded=True), pair(graded=True)]
    results = dynamotor.compile(fn, fullgraph=True)(*given)
    torch.autograd.backward([results[0].sum()])
    assert given[0].grad is not None and given[1].grad is None
    first, second = dynamotor.compile(lambda x, y: (x * 2, y * 3), fullgraph=True)(*given)
    given[0].grad = None
    second.sum().backward()
    assert given[0].grad is None and given[1].grad is not None


@pytest.mark.filterwarnings("ignore::dynamotor.EagerWarning")
def test_a_graph_that_writes_is_not_cut(monkeypatch):
    """Eager refuses a backward over values that were written; parts would have saved the old ones."""
    monkeypatch.setattr(config, "strict", False)

    def fn(x, y, z):
        product = z * x
        view = y.t()  # a view of an input leaves the graph
        x.add_(1)
        return view, product

    for run in (fn, dynamotor.compile(fn)):
        results = run(pair(4, 4), pair(4, 4, graded=True), pair(4, 4, graded=True))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.backward([result.sum() for result in results])
