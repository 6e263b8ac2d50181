"""Jagged tensors in captured programs: one graph, eager's numbers, offsets and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nested import nested_tensor_from_jagged as from_jagged

import dynamotor
from dynamotor.base.config import config
from dynamotor.base.events import counters

F = nn.functional
LENGTHS = (2, 4, 1), (3, 1, 5), (2, 2, 2, 3)


def offsets_of(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)])


def jagged(lengths=LENGTHS[0], graded=False, offsets=None):
    values = torch.randn(sum(lengths), 6, dtype=torch.float64)
    x = from_jagged(values, offsets_of(lengths) if offsets is None else offsets)
    return x.detach().requires_grad_() if graded else x


def assert_same(want, got):
    """Equal values of equal classes, as ragged."""
    assert type(got) is type(want)
    if isinstance(want, list | tuple) and not isinstance(want, torch.Size):
        for one, other in zip(want, got, strict=True):
            assert_same(one, other)
    elif isinstance(want, torch.Tensor) and want.is_nested:
        assert (want.requires_grad, want._ragged_idx) == (got.requires_grad, got._ragged_idx)
        assert torch.equal(want.offsets(), got.offsets())
        torch.testing.assert_close(want._values, got._values)
    elif isinstance(want, torch.Tensor):
        torch.testing.assert_close(want, got)
    elif not isinstance(want, torch.Size):
        assert want == got


def total(results):
    results = results if isinstance(results, list | tuple) else [results]
    graded = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
    return sum((r.values() if r.is_nested else r).square().sum() for r in graded)


def build(x):
    return from_jagged(x.values() * 2, x.offsets())


PROGRAMS = {
    "elementwise": lambda x: (x * 2 + 1).sin(),
    "norm": lambda x: F.layer_norm(x, (6,)) + x,
    "softmax": lambda x: x.softmax(-1),
    "values": lambda x: x.values() * 2,
    "lengths": lambda x: x.offsets().diff(),
    "built": build,
    "built_and_added": lambda x: build(x) + x,
    "built_of_lengths": lambda x: from_jagged(x.values() * 2, lengths=x.offsets().diff()).sin(),
    "padded": lambda x: x.to_padded_tensor(0.0),
    "broadcast": lambda x: x * torch.ones(x.shape[0], 1, 6, dtype=x.dtype),
    "heads": lambda x: (x * 2).view(x.size(0), x.size(1), 2, -1).transpose(1, 2) * 3,
    "unflattened": lambda x: (x * 2).unflatten(-1, [2, 3]).sin(),
    "concatenated": lambda x: torch.cat([x, x], -1),
    "product": lambda x: x @ torch.ones(6, 4, dtype=x.dtype),
    "written": lambda x: (x * 1).mul_(2),
    "converted": lambda x: x.to(torch.float32),
    "longest": lambda x: x * x._get_max_seqlen(),
    "made_like": lambda x: torch.ones_like(x) + x,
    "ragged_sum": lambda x: x.detach().sum(1),
    "several": lambda x: (x, x * 2, x.offsets(), x.size(0)),
    "compared": lambda x: x * 2 if x.shape == (x + 1).shape else x,
}


@pytest.fixture(autouse=True)
def _strict(monkeypatch):
    """A graph that is left to eager PyTorch is an error."""
    monkeypatch.setattr(config, "strict", True)
    dynamotor.reset()


@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("fn", PROGRAMS.values(), ids=PROGRAMS)
def test_programs_are_eagers_for_any_lengths(fn, graded):
    compiled = dynamotor.compile(fn, fullgraph=True)
    for lengths in LENGTHS:
        torch.manual_seed(0)
        x = jagged(lengths, graded)
        y = x.detach().requires_grad_(graded)
        want, got = fn(x), compiled(y)
        assert_same(want, got)
        if graded and isinstance(loss := total(want), torch.Tensor):
            loss.backward()
            total(got).backward()
            assert_same(x.grad, y.grad)
            assert y.grad.shape == y.shape


def test_other_lengths_and_widths_do_not_compile_again():
    compiled = dynamotor.compile(lambda x: x.sin(), fullgraph=True, dynamic=True)
    before = counters["capture"]["graphs"]
    for lengths, width in ((2, 3, 4), 5), ((3, 4, 5), 4), ((5, 6, 7), 3):
        x = torch.nested.nested_tensor([torch.randn(n, width) for n in lengths], layout=torch.jagged)
        assert_same(x.sin(), compiled(x))
    assert counters["capture"]["graphs"] - before == 1


def test_a_result_has_the_size_of_its_input():
    x = jagged()
    assert dynamotor.compile(lambda x: x * 2, fullgraph=True)(x).shape == x.shape
    shape, size = dynamotor.compile(lambda x: ((x * 2).shape, x.size(1) * 3), fullgraph=True)(x)
    assert shape == x.shape and size == x.size(1) * 3


@pytest.mark.parametrize("first", [0, 1])
def test_two_tensors_are_as_long_where_they_share_offsets(first):
    """Eager compares the tensors of offsets themselves, so the program does."""

    def fn(x, y):
        return x * 2 if x.shape == y.shape else y * 3

    offsets = offsets_of(LENGTHS[0])
    calls = [(offsets, offsets), (offsets, offsets.clone())]
    compiled = dynamotor.compile(fn, fullgraph=True)
    for one, other in [*calls[first:], *calls[:first], *calls]:
        x, y = jagged(offsets=one), jagged(offsets=other)
        assert_same(fn(x, y), compiled(x, y))


def test_offsets_that_are_an_input_of_their_own_are_the_tensors():
    def fn(x, values, offsets):
        return x + from_jagged(values, offsets)

    offsets = offsets_of(LENGTHS[0])
    x, values = jagged(offsets=offsets), torch.randn(7, 6, dtype=torch.float64)
    assert_same(fn(x, values, offsets), dynamotor.compile(fn, fullgraph=True)(x, values, offsets))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(6, 6).double() for _ in range(3)])
        self.outer = nn.Linear(6, 6).double()

    def forward(self, x):
        parts = [inner(x).unflatten(-1, [2, 3]).transpose(1, 2) for inner in self.inner]
        found = F.scaled_dot_product_attention(*parts)
        return self.outer(found.transpose(1, 2).flatten(-2)) + x


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_attention_runs_between_compiled_parts(monkeypatch):
    monkeypatch.setattr(config, "strict", False)
    model = Attention()
    compiled = dynamotor.compile(model)
    for lengths in LENGTHS:
        x = jagged(lengths, graded=True)
        y = x.detach().requires_grad_()
        want, got = model(x), compiled(y)
        assert_same(want, got)
        total(want).backward()
        total(got).backward()
        assert_same(x.grad, y.grad)
    assert "attention over jagged tensors" in str(dynamotor.explain(model)(jagged()))


@pytest.mark.parametrize("fn", [lambda x: x.unbind(), lambda x: x[1] * 2], ids=["rows", "row"])
def test_rows_of_their_own_break_the_graph(fn, monkeypatch):
    monkeypatch.setattr(config, "strict", False)
    for lengths in LENGTHS:
        x = jagged(lengths)
        assert_same(fn(x), dynamotor.compile(fn)(x))


def rows_of_numbers():
    """A jagged tensor of two dimensions, which has no views."""
    return from_jagged(torch.randn(6), torch.tensor([0, 2, 6])).detach().requires_grad_()


def test_rows_of_numbers_have_gradients():
    x = rows_of_numbers()
    y = x.detach().requires_grad_()
    (x.sin() * x).values().sum().backward()
    dynamotor.compile(lambda x: x.sin() * x, fullgraph=True)(y).values().sum().backward()
    assert_same(x.grad, y.grad)


@pytest.mark.parametrize("make", [lambda: jagged(graded=True), rows_of_numbers], ids=["3 d", "2 d"])
def test_a_gradient_of_a_gradient_is_eagers(make):
    def second(fn, x):
        (first,) = torch.autograd.grad(fn(x).values().sum(), x, create_graph=True)
        return torch.autograd.grad((first * first + x).values().sum(), x)[0]

    x = make()
    compiled = dynamotor.compile(lambda x: x.sin(), fullgraph=True)
    assert_same(second(torch.sin, x), second(compiled, x))


def test_torch_compile_hands_jagged_tensors_on():
    x = jagged(graded=True)
    weight = torch.randn(6, 6, dtype=torch.float64)
    fn = torch.compile(lambda x: (x @ weight).relu() * 2, backend="dynamotor")
    y = x.detach().requires_grad_()
    want, got = (x @ weight).relu() * 2, fn(y)
    assert_same(want, got)
    total(want).backward()
    total(got).backward()
    assert_same(x.grad, y.grad)


def test_a_plain_tensor_with_a_jagged_size_is_left_to_eager(monkeypatch):
    """PyTorch's formula makes zeros of the size that it shows."""
    if torch.__version__ < "2.13":
        pytest.skip("this PyTorch has no derivative of nextafter")
    monkeypatch.setattr(config, "strict", False)
    fn, before = lambda x, y: torch.nextafter(x, y), counters["fallback"]["aot.DM260"]
    x, other = rows_of_numbers(), torch.randn(2, 1, requires_grad=True)
    y = x.detach().requires_grad_()
    want, got = fn(x, other), dynamotor.compile(fn)(y, other)
    assert_same(want, got)
    total(want).backward()
    total(got).backward()
    assert_same(x.grad, y.grad)
    assert counters["fallback"]["aot.DM260"] > before
